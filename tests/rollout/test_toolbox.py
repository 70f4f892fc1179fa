"""The toolbox: a result for every call, also from failing tools, enforced caps, and sessions that always close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import InvalidRequest, InvariantBroken, ToolError
from agentloop.rollout.tool import ToolSpec, load_tools, tool, tools_at
from agentloop.rollout.toolbox import Toolbox, ToolScope, capped
from agentloop.types import JSON, ToolCall, ToolCallStatus, ToolResult

MAX_BYTES = 16_384
GRACE_S = 0.05
LONG_S = 60.0

Body = Callable[["FakeToolSession", Mapping[str, JSON]], Awaitable[str]]


class FakeToolSession:
    """A session whose call is a given coroutine function and whose state is `numbers`."""

    def __init__(self, fake: FakeTool, trajectory_id: str, seed: int) -> None:
        self.fake, self.trajectory_id, self.seed = fake, trajectory_id, seed
        self.num_closes = 0
        self.numbers: list[int] = []

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        self.fake.num_running += 1
        self.fake.peak_running = max(self.fake.peak_running, self.fake.num_running)
        try:
            return await self.fake.body(self, arguments)
        finally:
            self.fake.num_running -= 1

    async def close(self) -> None:
        self.num_closes += 1
        await self.fake.on_close()


class FakeTool:
    """A tool that records its sessions."""

    def __init__(
        self, body: Body, name: str = "fake", on_close: Callable[[], Awaitable[None]] | None = None, **caps: Any
    ):
        self.spec = ToolSpec(name=name, description="", parameters={"type": "object"}, **caps)
        self.body = body
        self.on_close = on_close or nothing
        self.sessions: list[FakeToolSession] = []
        self.num_closes = self.num_running = self.peak_running = 0

    def open_session(self, trajectory_id: str, seed: int) -> FakeToolSession:
        self.sessions.append(FakeToolSession(self, trajectory_id, seed))
        return self.sessions[-1]

    async def close(self) -> None:
        self.num_closes += 1


async def nothing() -> None:
    return None


async def echo(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
    return str(arguments.get("text", "ok"))


async def sleep_long(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
    await asyncio.sleep(LONG_S)
    return "late"


def raising(error: BaseException) -> Body:
    async def body(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        raise error

    return body


def call(name: str = "fake", call_id: str = "c1", **arguments: JSON) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def scope_of(*tools: Any, seed: int = 0) -> tuple[Toolbox, ToolScope]:
    toolbox = Toolbox(tools, grace_s=GRACE_S, close_timeout_s=0.2)
    return toolbox, toolbox.open([made.spec.name for made in tools], "traj-1", seed)


async def run(tools: Sequence[Any], calls: Sequence[ToolCall], max_bytes: int = MAX_BYTES) -> list[ToolResult]:
    toolbox, scope = scope_of(*tools)
    try:
        async with asyncio.timeout(30):
            return await scope.run(calls, max_bytes)
    finally:
        await toolbox.close()


async def answer(body: Body, **caps: Any) -> ToolResult:
    [result] = await run([FakeTool(body, **caps)], [call()])
    return result


# Declarations


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="two tools are named 'fake'"):
        Toolbox([FakeTool(echo), FakeTool(echo)])


def test_definitions_are_in_the_order_asked_for() -> None:
    toolbox = Toolbox([FakeTool(echo, "a"), FakeTool(echo, "b")])
    assert [d["function"]["name"] for d in toolbox.definitions(["b", "a"])] == ["b", "a"]
    assert toolbox.definitions([]) == []


@pytest.mark.parametrize(
    ("names", "text"), [(["a", "x"], "unknown tool 'x'. Available: a, b"), (["a", "a"], "tool 'a' is listed twice")]
)
def test_unknown_and_repeated_names_are_refused(names: list[str], text: str) -> None:
    toolbox = Toolbox([FakeTool(echo, "a"), FakeTool(echo, "b")])
    for attempt in (toolbox.definitions, lambda names: toolbox.open(names, "t", 0)):
        with pytest.raises(InvalidRequest, match=text) as caught:
            attempt(names)
        assert caught.value.param == "tools"


# Results


async def test_calls_run_at_once_and_results_come_in_call_order() -> None:
    both_run = asyncio.Barrier(3)

    async def meet(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        await both_run.wait()  # passes only if all three run at the same time
        await asyncio.sleep(0.01 * (3 - arguments["n"]))
        return f"answer {arguments['n']}"

    results = await run([FakeTool(meet)], [call(call_id=f"c{n}", n=n) for n in range(3)])
    assert [(r.call_id, r.content, r.is_error) for r in results] == [
        (f"c{n}", f"answer {n}", False) for n in range(3)
    ]
    assert all(r.name == "fake" and r.duration_s > 0 for r in results)


async def test_no_calls_no_results() -> None:
    assert await run([FakeTool(echo)], []) == []


async def test_a_malformed_call_is_answered_with_the_parsers_words() -> None:
    broken = ToolCall("c1", "fake", status=ToolCallStatus.MALFORMED, error="not valid JSON: line 1")
    tool_ = FakeTool(echo)
    results = await run([tool_], [broken, call(call_id="c2")])
    assert [(r.call_id, r.content, r.is_error) for r in results] == [
        ("c1", "Error: not valid JSON: line 1", True),
        ("c2", "ok", False),
    ]
    assert len(tool_.sessions) == 1


async def test_an_unknown_tool_is_answered_with_the_available_ones() -> None:
    results = await run([FakeTool(echo, "a"), FakeTool(echo, "b")], [call("rm_rf")])
    assert results[0].content == "Error: unknown tool 'rm_rf'. Available: a, b"
    assert results[0].is_error
    assert (await run([], [call("a")]))[0].content == "Error: unknown tool 'a'. Available: none"


async def test_an_undeclared_tool_is_as_unknown_as_one_that_does_not_exist() -> None:
    secret = FakeTool(echo, "secret")
    toolbox = Toolbox([FakeTool(echo, "a"), secret])
    scope = toolbox.open(["a"], "t", 0)
    [result] = await scope.run([call("secret")], MAX_BYTES)
    await toolbox.close()
    assert result.content == "Error: unknown tool 'secret'. Available: a"
    assert secret.sessions == []


async def test_invalid_arguments_and_tool_errors_reach_the_policy() -> None:
    @tool
    async def double(n: int) -> int:
        """Double."""
        if n < 0:
            raise ToolError("negative")
        return 2 * n

    results = await run(
        [double], [call("double", n=4), call("double", n=-1), call("double", n="x"), call("double")]
    )
    assert [r.content for r in results] == [
        "8",
        "Error: negative",
        "Error: invalid arguments: n: Input should be a valid integer, unable to parse string as an integer",
        "Error: invalid arguments: n: Field required",
    ]
    assert [r.is_error for r in results] == [False, True, True, True]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("/secret/path"),
        RuntimeError("key=123"),
        SystemExit(3),
        RecursionError(),
        MemoryError(),
        OSError(5, "x"),
    ],
)
async def test_other_exceptions_tell_only_their_class(error: BaseException) -> None:
    result = await answer(raising(error))
    assert (result.content, result.is_error) == (f"Error: {type(error).__name__}", True)


async def test_a_tool_that_cancels_itself_is_an_error_and_not_a_missing_result() -> None:
    assert (await answer(raising(asyncio.CancelledError()))).content == "Error: cancelled"


async def test_a_tool_that_answers_no_text_is_an_error() -> None:
    async def none(session: FakeToolSession, arguments: Mapping[str, JSON]) -> Any:
        return None

    assert (await answer(none)).content == "Error: TypeError"


async def test_a_session_that_cannot_open_is_an_error() -> None:
    class Broken(FakeTool):
        def open_session(self, trajectory_id: str, seed: int) -> FakeToolSession:
            raise ConnectionError("host:port")

    [result] = await run([Broken(echo)], [call()])
    assert result.content == "Error: ConnectionError"


# Timeouts


async def test_a_timeout_is_an_error_and_the_next_call_gets_a_new_session() -> None:
    async def slow_once(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        return await (sleep_long if arguments["slow"] else echo)(session, arguments)

    fake = FakeTool(slow_once, timeout_s=0.05, max_concurrency=1)
    toolbox, scope = scope_of(fake)
    async with asyncio.timeout(30):
        [late] = await scope.run([call(slow=True)], MAX_BYTES)
        [good] = await scope.run([call(slow=False)], MAX_BYTES)
    assert (late.content, late.is_error) == ("Error: timed out after 0.05 s", True)
    assert late.duration_s >= 0.05
    assert (good.content, len(fake.sessions), fake.sessions[0].num_closes) == ("ok", 2, 1)
    await toolbox.close()
    assert fake.sessions[1].num_closes == 1
    assert toolbox.num_abandoned == 0


async def test_a_tool_that_ignores_cancellation_is_abandoned_and_frees_its_slot() -> None:
    released = asyncio.Event()

    async def stubborn(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        while arguments["slow"] and not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return "ok"

    fake = FakeTool(stubborn, timeout_s=0.05, max_concurrency=1)
    toolbox, scope = scope_of(fake)
    async with asyncio.timeout(30):
        [late] = await scope.run([call(slow=True)], MAX_BYTES)
        assert late.content == "Error: timed out after 0.05 s"
        assert toolbox.num_abandoned == 1
        [good] = await scope.run([call(slow=False)], MAX_BYTES)
        assert good.content == "ok"
        await toolbox.close()  # does not wait for the call either
        released.set()
        while toolbox.num_abandoned:
            await asyncio.sleep(0)
    assert [session.num_closes for session in fake.sessions] == [1, 1]


def test_a_session_with_other_calls_in_flight_is_closed_after_them() -> None:
    closes_seen: list[int] = []

    async def body(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        await asyncio.sleep(LONG_S if arguments["n"] == 0 else 0.2)
        closes_seen.append(session.num_closes)
        return "ok"

    fake = FakeTool(body, timeout_s=0.3)

    async def main() -> None:
        toolbox, scope = scope_of(fake)
        first = asyncio.create_task(scope.run([call(n=0)], MAX_BYTES))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(scope.run([call(n=1)], MAX_BYTES))  # in flight when the first one times out
        await first
        assert not second.done()
        [result] = await second
        assert (result.content, closes_seen) == ("ok", [0])
        assert [session.num_closes for session in fake.sessions] == [1]
        await toolbox.close()

    VirtualClock().run(main())


async def test_concurrency_is_bounded_over_all_trajectories() -> None:
    async def short(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        await asyncio.sleep(0.01)
        return "ok"

    fake = FakeTool(short, max_concurrency=2)
    toolbox = Toolbox([fake])
    scopes = [toolbox.open(["fake"], f"t{n}", n) for n in range(4)]
    async with asyncio.timeout(30):
        results = await asyncio.gather(
            *(scope.run([call(call_id=str(n)) for n in range(3)], 100) for scope in scopes)
        )
    assert fake.peak_running == 2
    assert {r.content for turn in results for r in turn} == {"ok"}
    assert [(s.trajectory_id, s.seed) for s in fake.sessions] == [(f"t{n}", n) for n in range(4)]
    await toolbox.close()


async def test_the_wait_for_a_slot_is_not_part_of_the_timeout() -> None:
    async def work(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        await asyncio.sleep(0.1)
        return "ok"

    results = await run(
        [FakeTool(work, max_concurrency=1, timeout_s=1.0)], [call(call_id=str(n)) for n in range(15)]
    )
    assert {r.content for r in results} == {"ok"}


# Cancellation and closing


async def test_cancellation_passes_through_and_reaches_the_tool() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def body(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        started.set()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            await asyncio.sleep(0.05)  # the following close does not interrupt cleanup that awaits
            ended.set()
        return ""

    fake = FakeTool(body)
    toolbox = Toolbox([fake], grace_s=10.0)
    scope = toolbox.open(["fake"], "t", 0)
    running = asyncio.create_task(scope.run([call(), call(call_id="c2")], MAX_BYTES))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await scope.close()
    assert ended.is_set()
    assert fake.sessions[0].num_closes == 1
    assert toolbox.num_abandoned == 0
    await toolbox.close()


async def test_sessions_open_lazily_once_and_close_once() -> None:
    async def remember(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        session.numbers.append(arguments["n"])
        return str(sum(session.numbers))

    fake, unused = FakeTool(remember), FakeTool(echo, "unused")
    toolbox, scope = scope_of(fake, unused, seed=7)
    assert fake.sessions == []
    contents = [(await scope.run([call(n=n)], MAX_BYTES))[0].content for n in (1, 2, 3)]
    await asyncio.gather(scope.close(), scope.close())
    await scope.close()
    assert contents == ["1", "3", "6"]
    assert [(s.trajectory_id, s.seed, s.num_closes) for s in fake.sessions] == [("traj-1", 7, 1)]
    assert unused.sessions == []
    with pytest.raises(InvariantBroken, match="closed"):
        await scope.run([call()], MAX_BYTES)
    await toolbox.close()


async def hang() -> None:
    await asyncio.sleep(LONG_S)


async def fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("on_close", [hang, fail])
async def test_a_session_that_closes_badly_does_not_hold_up_the_others(
    on_close: Callable[[], Awaitable[None]],
) -> None:
    bad, good = FakeTool(echo, "bad", on_close), FakeTool(echo, "good")
    toolbox, scope = scope_of(bad, good)
    await scope.run([call("bad"), call("good", "c2")], MAX_BYTES)
    async with asyncio.timeout(30):
        await scope.close()
    assert good.sessions[0].num_closes == 1
    await toolbox.close()


async def test_closing_goes_on_when_its_caller_is_cancelled() -> None:
    may_close = asyncio.Event()

    async def slow_close() -> None:
        await may_close.wait()

    fake = FakeTool(echo, on_close=slow_close)
    toolbox = Toolbox([fake])
    scope = toolbox.open(["fake"], "t", 0)
    await scope.run([call()], MAX_BYTES)
    closing = asyncio.create_task(scope.close())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_close.set()
    await scope.close()
    assert fake.sessions[0].num_closes == 1
    await toolbox.close()


async def test_closing_the_toolbox_closes_scopes_and_tools_once() -> None:
    fake = FakeTool(sleep_long)
    toolbox, scope = scope_of(fake)
    running = asyncio.create_task(scope.run([call()], MAX_BYTES))
    await asyncio.sleep(0.01)
    await toolbox.close()
    await toolbox.close()
    [result] = await running
    assert result.content == "Error: cancelled"
    assert (fake.num_closes, fake.sessions[0].num_closes) == (1, 1)
    with pytest.raises(InvariantBroken):
        toolbox.open(["fake"], "t", 0)


# Output


async def test_output_is_capped_by_the_smaller_bound_with_a_visible_mark() -> None:
    async def flood(session: FakeToolSession, arguments: Mapping[str, JSON]) -> str:
        return "x" * 1000

    for spec_bytes, response_bytes in ((100, MAX_BYTES), (MAX_BYTES, 100)):
        [result] = await run([FakeTool(flood, max_output_bytes=spec_bytes)], [call()], response_bytes)
        assert result.is_truncated
        assert result.content == "x" * 75 + "...[truncated 925 bytes]"
    [whole] = await run([FakeTool(flood, max_output_bytes=1000)], [call()], 1000)
    assert (whole.content, whole.is_truncated) == ("x" * 1000, False)


async def test_errors_are_capped_too() -> None:
    [result] = await run([FakeTool(raising(ToolError("y" * 1000)))], [call()], 60)
    assert result.content.startswith("Error: yyy")
    assert result.content.endswith("...[truncated 972 bytes]")
    assert (len(result.content), result.is_error, result.is_truncated) == (59, True, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udfff", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("nul\x00 \x1b[31m <|im_end|> <tool_call>", "nul\x00 \x1b[31m <|im_end|> <tool_call>"),
    ],
)
async def test_odd_text_stays_plain_and_becomes_valid_utf_8(text: str, expected: str) -> None:
    for body in (lambda session, arguments: echo(session, {"text": text}), raising(ToolError(text))):
        content = (await answer(body)).content
        assert content.removeprefix("Error: ") == expected
        content.encode()


@given(st.text(alphabet=st.characters(exclude_categories=())), st.integers(0, 80))
def test_a_cap_is_never_exceeded_and_cuts_between_characters(text: str, max_bytes: int) -> None:
    content, is_truncated = capped(text, max_bytes)
    size = len(content.encode())
    if is_truncated:
        head, _, mark = content.rpartition("...[truncated ")
        clean = capped(text, 10_000)[0]
        assert clean.startswith(head)
        assert mark == f"{len(clean.encode()) - len(head.encode())} bytes]"
        assert size <= max_bytes or head == ""
    else:
        assert size <= max_bytes


# Tool lookup


@tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


class NeedsArgument:
    def __init__(self, key: str) -> None: ...


def make_shout() -> Any:
    return shout


def make_nonsense() -> int:
    return 3


def make_refusal() -> Any:
    raise InvalidRequest("no key", param="key")


class Idle:
    spec = ToolSpec("idle", "", {})
    open_session = close = print


def test_load_tool_takes_a_tool_or_what_makes_one() -> None:
    assert tools_at(f"{__name__}:shout") == [shout]
    assert tools_at(f"{__name__}:make_shout") == [shout]
    [found] = tools_at(f"{__name__}:Idle")
    assert found.spec.name == "idle"


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("NeedsArgument", "that returns one: TypeError"),
        ("make_nonsense", "is neither a tool"),
        ("LONG_S", "is neither a tool"),
        ("no_such", "has no attribute 'no_such'"),
    ],
)
def test_load_tool_refuses_the_rest(attribute: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        tools_at(f"{__name__}:{attribute}")
    assert caught.value.param == "tools"


def test_a_factorys_own_refusal_passes_through() -> None:
    with pytest.raises(InvalidRequest, match="no key") as caught:
        tools_at(f"{__name__}:make_refusal")
    assert caught.value.param == "key"


def test_load_tools_knows_configured_names_and_import_paths() -> None:
    configured = {"shout": f"{__name__}:shout"}
    assert load_tools(["shout", f"{__name__}:make_shout"], configured) == [shout, shout]
    with pytest.raises(InvalidRequest, match="no tools are registered as 'whisper'; there are: ") as caught:
        load_tools(["shout", "whisper"], configured)
    assert caught.value.param == "tools"
