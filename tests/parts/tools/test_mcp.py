"""MCP servers as tools, over both transports, against a server written with the SDK."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager

import pytest

from agentloop.errors import InvalidRequest, ToolError, ToolLost
from agentloop.rollout.tool import tools_at
from agentloop.rollout.toolbox import Toolbox, ToolScope
from agentloop.types import RolloutTask, ToolCall, ToolResult
from agentloop_servers.net.tcp import free_ports
from agentloop_tools.mcp import McpTools
from tests.support.fleet.worker import task
from tests.support.service.mcp_fake import Reply, fake_mcp

COMMAND = [sys.executable, "-m", "tests.support.service.mcp_server"]
NAMES = ["add", "note", "wait", "picture", "die_once", "die"]
stdio = McpTools(COMMAND, names=["add"], connect_timeout_s=120.0)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


@asynccontextmanager
async def opened(server: McpTools, trajectory_id: str = "t", toolbox: Toolbox | None = None):
    """Open a server's tools for one trajectory."""
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
    """The port of a server that runs as long as this module's tests."""
    number = free_ports(1, "127.0.0.1")[0]
    process = serving(number)
    yield number
    process.kill()
    process.wait()


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/mcp"


@pytest.mark.parametrize("transport", [pytest.param("stdio", marks=pytest.mark.slow), "http"])
async def test_a_server_is_listed_and_called(transport: str, port: int, tmp_path) -> None:
    server = McpTools(COMMAND if transport == "stdio" else url(port), connect_timeout_s=120.0)
    async with opened(server) as scope:
        results = await scope.run([call("add", a=n, b=1) for n in range(20)], 10_000)
        assert [result.content for result in results] == [str(n + 1) for n in range(20)]
        wrong = await answer(scope, "add", a="x")
        assert wrong.is_error
        assert "valid integer" in wrong.content
        shown = await answer(scope, "picture")
        assert shown.content == "a dot:\n[image image/png is not shown: a tool's answer is text]"
        if transport == "stdio":  # a read-only call is retried on the server's next process
            assert (await answer(scope, "die_once", path=str(tmp_path / "died"))).content == "lived"
            with pytest.raises(ToolLost, match="closed the connection during a call"):
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
    server = McpTools(COMMAND, is_shared=False, connect_timeout_s=120.0)
    toolbox = Toolbox(server.tools())
    try:
        async with opened(server, "one", toolbox) as one, opened(server, "two", toolbox) as two:
            assert (await answer(one, "note", text="a")).content == "a"
            assert (await answer(one, "note", text="b")).content == "a b"
            assert (await answer(two, "note", text="c")).content == "c"
            with pytest.raises(ToolLost, match="closed the connection during a call"):
                await answer(one, "die")
            with pytest.raises(ToolLost, match="is lost"):
                await answer(one, "add", a=1, b=1)
            assert (await answer(two, "note", text="d")).content == "c d", "the other's is another process"
    finally:
        await toolbox.close()


@pytest.mark.slow
async def test_a_server_that_went_away_is_found_again_and_one_that_stays_away_is_named_in_a_line() -> None:
    number = free_ports(1, "127.0.0.1")[0]
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
            except ToolLost:  # the loss was noticed in the call, which must not be repeated
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
        server = server.format(port=free_ports(1, "127.0.0.1")[0])
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


def failed(code: int, message: str, call_id: object = None):
    """Return the body of a JSON-RPC error. Its id is the call's id unless another one is given."""
    return lambda own: json.dumps(
        {"jsonrpc": "2.0", "id": own if call_id is None else call_id, "error": {"code": code, "message": message}}
    )


FORGOTTEN = Reply(404, failed(-32600, "Session not found", "server-error"))
REFUSED = [
    FORGOTTEN,
    Reply(404, lambda _: "no such page", "text/html"),
    Reply(429, lambda _: "slow down", "text/plain", {"retry-after": "0.01"}),
    Reply(503, failed(-32000, "restarting"), headers={"retry-after": "0"}),
]
NO_ANSWER = [
    Reply(401, failed(-32001, "who are you?")),
    Reply(502, lambda _: "<html>bad gateway</html>", "text/html"),
    Reply(503, lambda _: ""),
    Reply(500, failed(-32603, "Internal error")),
    Reply(200, lambda _: "<html>log in</html>", "text/html"),
    Reply(200, lambda _: ""),
    Reply(200, lambda _: "{"),
    Reply(200, failed(-32603, "of another call", "other")),
    Reply(200, lambda _: "{}"),
    Reply(202, lambda _: ""),
    Reply(307, lambda _: "", headers={"location": "http://127.0.0.1:9/mcp"}),
    Reply(200, lambda _: "data: {\n\n", "text/event-stream"),
]


@pytest.mark.parametrize("reply", [*REFUSED, *NO_ANSWER])
@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_failed_exchange_is_repeated_or_ends_the_trajectory_and_is_never_text(
    reply: Reply, is_read_only: bool, is_shared: bool
) -> None:
    async with fake_mcp(is_read_only=is_read_only, replies=[reply]) as fake:
        server = McpTools(fake.url, is_shared=is_shared)
        [tool] = await asyncio.to_thread(server.tools)
        session = tool.open_session("t", 0)
        await session.open(a_task())
        num_initialized = fake.num_initialized
        is_forgotten = reply.status == 404
        try:
            if (reply in REFUSED or is_read_only) and (is_shared or not is_forgotten):
                try:
                    assert await session.call({}) == "rain"
                except ToolLost:  # a broken stream ends the session, and a session with state is not opened again
                    assert reply is NO_ANSWER[-1]
                    assert not is_shared
                else:
                    assert fake.num_calls == 2
                if is_forgotten:
                    assert fake.num_initialized == num_initialized + 1
            else:
                with pytest.raises(ToolLost, match=f"MCP server '{fake.url}': ") as lost:
                    await session.call({})
                assert "\n" not in lost.value.message
                assert fake.num_calls == 1
        finally:
            await session.close()
            await server.close()


async def test_errors_of_the_server_itself_are_text_for_the_policy() -> None:
    verdicts = [Reply(200, failed(-32602, "no city")), Reply(400, failed(-32602, "no city"))]
    async with fake_mcp(replies=[*verdicts, Reply(200, failed(-32000, "no weather"))]) as fake:
        server = McpTools(fake.url)
        [tool] = await asyncio.to_thread(server.tools)
        session = tool.open_session("t", 0)
        for says in ("no city", "no city", "no weather"):
            with pytest.raises(ToolError, match=says):
                await session.call({})
        assert fake.num_calls == 3
        await session.close()
        await server.close()


async def test_a_server_that_stays_busy_or_asks_for_a_long_wait_ends_the_trajectory() -> None:
    busy = Reply(429, lambda _: "", headers={"retry-after": "0"})
    late = Reply(429, lambda _: "", headers={"retry-after": "3600"})
    async with fake_mcp(replies=[busy, busy, busy, late]) as fake:
        server = McpTools(fake.url)
        [tool] = await asyncio.to_thread(server.tools)
        session = tool.open_session("t", 0)
        for num_calls in (3, 4):
            with pytest.raises(ToolLost, match="HTTP 429"):
                await session.call({})
            assert fake.num_calls == num_calls
        await session.close()
        await server.close()
