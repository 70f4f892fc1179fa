"""MCP servers as tools, over both transports, against a server written with the SDK."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager

import pytest

from agentloop.errors import InvalidRequest, ToolLost
from agentloop.rollout.tool_loading import tools_at
from agentloop.rollout.toolbox import Toolbox, ToolScope
from agentloop.types import RolloutTask, ToolCall, ToolResult
from agentloop_tools.mcp import McpTools
from tests.support.fleet.worker import task

COMMAND = [sys.executable, "-m", "tests.support.service.mcp_server"]
NAMES = ["add", "note", "wait", "picture", "die_once", "die"]
stdio = McpTools(COMMAND, names=["add"])


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


@asynccontextmanager
async def opened(server: McpTools, trajectory_id: str = "t", toolbox: Toolbox | None = None):
    """One trajectory's tools of a server."""
    box = toolbox or Toolbox(server.tools())
    scope = box.open(NAMES, trajectory_id, 0)
    try:
        async with asyncio.timeout(60):
            await scope.open(a_task())
            yield scope
    finally:
        await scope.close()
        if toolbox is None:
            await box.close()


def a_task() -> RolloutTask:
    return task(tools=tuple(NAMES))


async def answer(scope: ToolScope, name: str, **arguments: object) -> ToolResult:
    [result] = await scope.run([call(name, **arguments)], 10_000)
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serving(port: int) -> subprocess.Popen[bytes]:
    """Start the server over HTTP, and wait until its port is open."""
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    process.kill()
    raise TimeoutError("the server did not start")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server that lives as long as this module's tests."""
    number = free_port()
    process = serving(number)
    yield number
    process.kill()
    process.wait()


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/mcp"


@pytest.mark.parametrize("transport", [pytest.param("stdio", marks=pytest.mark.slow), "http"])
async def test_a_server_is_listed_and_called(transport: str, port: int, tmp_path) -> None:
    server = McpTools(COMMAND if transport == "stdio" else url(port))
    async with opened(server) as scope:
        results = await scope.run([call("add", a=n, b=1) for n in range(20)], 10_000)
        assert [result.content for result in results] == [str(n + 1) for n in range(20)]
        wrong = await answer(scope, "add", a="x")
        assert wrong.is_error
        assert "valid integer" in wrong.content
        shown = await answer(scope, "picture")
        assert shown.content == "a dot:\n[image image/png is not shown: a tool's answer is text]"
        if transport == "stdio":  # what only reads is asked again of the server's next process
            assert (await answer(scope, "die_once", path=str(tmp_path / "died"))).content == "lived"
            with pytest.raises(ToolLost, match="went away during a call"):
                await answer(scope, "die")


async def test_one_that_is_too_late_is_an_error_and_the_session_goes_on(port: int) -> None:
    async with opened(McpTools(url(port), call_timeout_s=1.0)) as scope:
        late = await answer(scope, "wait", seconds=60)
        assert (late.content, late.is_error) == ("Error: timed out after 1 s", True)
        assert (await answer(scope, "add", a=1, b=1)).content == "2"


async def test_a_cancelled_call_leaves_the_session_usable(port: int) -> None:
    async with opened(McpTools(url(port))) as scope:
        calling = asyncio.create_task(answer(scope, "wait", seconds=30))
        await asyncio.sleep(0.1)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert (await answer(scope, "add", a=1, b=2)).content == "3"


async def test_definitions_are_the_servers_own(port: int) -> None:
    server = McpTools(url(port), names=["add"], prefix="numbers_")
    [tool] = server.tools()
    try:
        definition = tool.spec.definition()["function"]
        assert (definition["name"], definition["description"]) == ("numbers_add", "Add two numbers.")
        assert set(definition["parameters"]["properties"]) == {"a", "b"}
        assert not tool.spec.has_state, "it is shared: no trajectory has a state of its own there"
    finally:
        await server.close()


@pytest.mark.slow
async def test_each_trajectory_has_a_server_of_its_own_for_all_its_tools() -> None:
    server = McpTools(COMMAND, is_shared=False)
    toolbox = Toolbox(server.tools())
    try:
        async with opened(server, "one", toolbox) as one, opened(server, "two", toolbox) as two:
            assert (await answer(one, "note", text="a")).content == "a"
            assert (await answer(one, "note", text="b")).content == "a b"
            assert (await answer(two, "note", text="c")).content == "c"
            with pytest.raises(ToolLost, match="went away during a call"):
                await answer(one, "die")
            with pytest.raises(ToolLost, match="is lost"):
                await answer(one, "add", a=1, b=1)
            assert (await answer(two, "note", text="d")).content == "c d", "the other's is another process"
    finally:
        await toolbox.close()


@pytest.mark.slow
async def test_a_server_that_went_away_is_found_again_and_one_that_stays_away_is_named_in_a_line() -> None:
    number = free_port()
    process = serving(number)
    server = McpTools(url(number), connect_timeout_s=2.0)
    try:
        async with opened(server) as scope:
            assert (await answer(scope, "note", text="a")).content == "a"
            process.kill()
            process.wait()
            process = serving(number)
            try:
                again = await answer(scope, "add", a=1, b=1)
            except ToolLost:  # it was noticed in the call, which is not to be repeated
                again = await answer_in_a_new_scope(server)
            assert again.content == "2"
            process.kill()
            process.wait()
            with pytest.raises(ToolLost, match=f"MCP server '{url(number)}': ") as lost:
                await answer(scope, "note", text="b")
            assert "\n" not in lost.value.message
    finally:
        process.kill()
        process.wait()


async def answer_in_a_new_scope(server: McpTools) -> ToolResult:
    session = next(tool for tool in server.tools() if tool.spec.name == "add").open_session("t2", 0)
    return ToolResult("c", "add", await session.call({"a": 1, "b": 1}))


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (["/no/such/program"], "FileNotFoundError"),
        (["true"], "Connection closed"),
        ("http://127.0.0.1:{port}/mcp", "ConnectError"),
    ],
)
def test_one_that_cannot_be_reached_is_refused_where_it_is_loaded(server, says: str, monkeypatch) -> None:
    monkeypatch.setattr("agentloop_tools.mcp.FIRST_PAUSE_S", 0.001)
    if isinstance(server, str):
        server = server.format(port=free_port())
    with pytest.raises(InvalidRequest, match=says) as refused:
        McpTools(server, connect_timeout_s=10.0).tools()
    assert "\n" not in refused.value.message
    assert refused.value.param == "tools"


async def test_a_configuration_names_it_like_a_tool_and_a_tool_it_does_not_have_is_refused() -> None:
    [add] = tools_at(f"{__name__}:stdio")
    assert add.spec.name == "add"
    await add.close()
    with pytest.raises(InvalidRequest, match="has no tool 'subtract'"):
        McpTools(COMMAND, names=["subtract"]).tools()
