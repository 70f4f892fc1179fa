"""User code is a boundary: no failure of a loop, tool or reward affects another trajectory.

The trajectory of the failing code ends with a record that states the failure.
"""

import asyncio
import sys
import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest
from structlog.testing import capture_logs
from structlog.types import EventDict

from agentloop.concurrency import aio
from agentloop.concurrency.aio import MAX_ABANDONED_THREADS, LoopWatch, num_abandoned_threads
from agentloop.errors import InvalidRequest
from agentloop.rollout.tool import ToolSpec, tool
from agentloop.rollout.toolbox import Toolbox, capped
from agentloop.types import Limits, Message, RolloutTask, StopReason, ToolCall, Trajectory
from agentloop.values.codec import decode, encode
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.worker import running_worker, task

CALL = call("calculator", expression="2 + 3")
ANSWER = "The answer is 5."
HERE = "tests.rollout.test_user_code"


class Storing(FakeCoordinator):
    """Accepts the records that a store can hold, and refuses others like the real store."""

    async def finish_one(self, worker_id, trajectory):
        await super().finish_one(worker_id, decode(encode(trajectory), Trajectory))


class Bounded(FakeCoordinator):
    """Accepts records up to a size, and refuses larger ones like the private port."""

    max_bytes = 3_200
    num_refused = 0

    async def finish_one(self, worker_id, trajectory):
        if len(encode(trajectory)) > self.max_bytes:
            self.num_refused += 1
            raise InvalidRequest(f"a body of more than {self.max_bytes} bytes")
        return await super().finish_one(worker_id, trajectory)


async def test_a_record_beyond_the_bound_is_handed_in_once_without_what_its_trajectory_made():
    feeder = Bounded([task("large", loop=f"{HERE}:Sprawls"), task("good")])
    engines = {"sim://a": scripted_engine(CALL, ANSWER)}
    async with running_worker(feeder, engines, max_record_bytes=feeder.max_bytes), asyncio.timeout(30):
        await feeder.is_done.wait()
    large = feeder.records["large/0"]
    assert (large.stop_reason, large.attempt, large.is_complete) == (StopReason.LOOP_FAILED, 0, False)
    assert "exceeds the limit of 3200" in (large.error or "")
    assert not large.paths
    assert feeder.records["good/0"].reward == 1.0
    assert feeder.num_refused == 0


class Sprawls:
    """A loop whose messages exceed the size of a record."""

    async def run(self, task, ctx):
        await ctx.sample()
        ctx.set_metrics(**{f"{'metric' * 8}_{number}": 1.0 for number in range(50)})


async def beside_good_ones(*bad: RolloutTask, timeout_s: float = 30, tools=(), **config):
    """Run bad tasks among eight good ones. Return the records of the bad tasks after checking the good ones."""
    feeder = Storing([*bad, *(task(f"good{n}") for n in range(8))])
    engines = {"sim://a": scripted_engine(CALL, ANSWER)}
    async with running_worker(feeder, engines, tools=tools, **config) as worker, asyncio.timeout(timeout_s):
        await feeder.is_done.wait()
        assert worker.num_running <= len(feeder.records)
    assert all(feeder.records[f"good{n}/0"].reward == 1.0 for n in range(8))
    return [feeder.records[f"{one.task_id}/0"] for one in bad]


# Loading and construction


class WantsAnArgument:
    def __init__(self, path):
        self.path = path


class WantsAFile:
    def __init__(self):
        open("/no/such/file")  # noqa: SIM115


class Exits:
    def __init__(self):
        sys.exit(3)


class Interrupted:
    def __init__(self):
        raise KeyboardInterrupt


class InAGroup:
    def __init__(self):
        raise BaseExceptionGroup("several", [SystemExit(1), ValueError("x")])


class Unspeakable(Exception):
    def __str__(self):
        raise SystemExit(4)


class RaisesTheUnspeakable:
    def __init__(self):
        raise Unspeakable


def __getattr__(name):
    if name == "Trapped":
        raise OSError("the module's own __getattr__")
    raise AttributeError(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{HERE}:WantsAnArgument", "TypeError"),
        (f"{HERE}:WantsAFile", "FileNotFoundError"),
        (f"{HERE}:Exits", "SystemExit: 3"),
        (f"{HERE}:Interrupted", "KeyboardInterrupt"),
        (f"{HERE}:InAGroup", "BaseExceptionGroup: several"),
        (f"{HERE}:RaisesTheUnspeakable", "Unspeakable"),
        (f"{HERE}:Trapped", "OSError: the module's own __getattr__"),
        ("subprocess:Popen", "TypeError"),
    ],
)
async def test_a_loop_that_cannot_be_constructed_is_an_invalid_task(name: str, says: str):
    (found,) = await beside_good_ones(task("bad", loop=name))
    assert found.stop_reason is StopReason.INVALID_TASK
    assert says in (found.error or "")
    assert not found.is_complete


async def test_a_reward_that_cannot_be_loaded_is_an_invalid_task():
    (found,) = await beside_good_ones(task("bad", reward=f"{HERE}:Trapped"))
    assert found.stop_reason is StopReason.INVALID_TASK


async def test_modules_are_imported_off_the_event_loop_and_failures_are_remembered(tmp_path, monkeypatch):
    imports = tmp_path / "imports"
    lines = (
        "import threading, time",
        f"with open({str(imports)!r}, 'a') as file:",
        "    print(threading.get_ident(), file=file)",
        "time.sleep(2.5)",
        "raise OSError('no GPU here')",
    )
    (tmp_path / "slow_user_module.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    gaps = []

    async def beat():
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - started)

    beating = asyncio.create_task(beat())
    found = await beside_good_ones(*(task(f"bad{n}", loop="slow_user_module:Loop") for n in range(5)))
    beating.cancel()
    assert {one.stop_reason for one in found} == {StopReason.INVALID_TASK}
    assert all("OSError: no GPU here" in (one.error or "") for one in found)
    (thread,) = imports.read_text().split()  # one import for five tasks
    assert int(thread) != threading.get_ident()
    assert max(gaps) < 2.0  # also on busy cores


# Running


class Raises:
    """A loop that raises the error named by its task's reference after a turn."""

    async def run(self, rollout_task, ctx):
        await ctx.sample()
        raise {
            "exit": SystemExit(2),
            "interrupt": KeyboardInterrupt(),
            "group": BaseExceptionGroup("several", [SystemExit(1)]),
            "cancelled": asyncio.CancelledError(),
            "unspeakable": Unspeakable(),
            "base": GeneratorExit(),
            "surrogate": ValueError("caf\udce9.txt"),
        }[rollout_task.reference]


RAISED = {
    "exit": "SystemExit: 2",
    "interrupt": "KeyboardInterrupt",
    "group": "BaseExceptionGroup: several",
    "cancelled": "CancelledError",
    "unspeakable": "Unspeakable",
    "base": "GeneratorExit",
    "surrogate": "ValueError: caf\\udce9.txt",
}


@pytest.mark.parametrize("what", RAISED)
async def test_what_a_loop_raises_is_its_own_failure(what: str):
    (found,) = await beside_good_ones(task("bad", loop=f"{HERE}:Raises", reference=what))
    assert found.stop_reason is StopReason.LOOP_FAILED
    assert found.error is not None
    assert found.error.startswith(RAISED[what])
    assert found.path.response_mask.any(), "what was sampled is kept"


class Observes:
    """A loop that observes values that a record cannot hold."""

    async def run(self, rollout_task, ctx):
        await ctx.sample()
        ctx.observe(
            replace(Message("user", ""), content={"surrogate": "caf\udce9", "number": 17}[rollout_task.reference])
        )


@pytest.mark.parametrize("what", ["surrogate", "number"])
async def test_a_message_that_no_record_can_hold_is_a_failure_at_once(what: str):
    (found,) = await beside_good_ones(task("bad", loop=f"{HERE}:Observes", reference=what))
    assert found.stop_reason is StopReason.LOOP_FAILED
    assert "content" in (found.error or "")
    assert found.path.response_mask.any(), "what was sampled is kept"


class Spoils:
    """A loop that puts values into the conversation, bypassing every check, that a record cannot hold."""

    async def run(self, rollout_task, ctx):
        await ctx.sample()
        ctx.path.observe(Message("user", "caf\udce9"))


async def test_a_record_that_cannot_be_encoded_is_replaced_at_once():
    (found,) = await beside_good_ones(task("bad", loop=f"{HERE}:Spoils"))
    assert found.stop_reason is StopReason.LOOP_FAILED
    assert "UnicodeEncodeError" in (found.error or "")
    assert found.messages == task().messages


# Code that does not end


class Stubborn:
    """A loop that ignores every cancellation and continues to request turns."""

    refused: ClassVar[list[str]] = []
    release = threading.Event()

    async def run(self, rollout_task, ctx):
        while not self.release.is_set():
            try:
                await asyncio.sleep(0.05 if self.refused else 60)
                await ctx.sample()
            except BaseException as error:
                self.refused.append(type(error).__name__)


@pytest.fixture
def stubborn():
    Stubborn.refused.clear()
    Stubborn.release.clear()
    yield Stubborn
    Stubborn.release.set()


async def test_a_loop_that_ignores_its_deadline_is_abandoned(stubborn):
    bad = task("bad", loop=f"{HERE}:Stubborn", limits=Limits(timeout_s=0.2))
    (found,) = await beside_good_ones(bad, grace_s=0.2)
    assert found.stop_reason is StopReason.DEADLINE
    assert found.error is not None
    assert found.error.startswith("the loop ignored its cancellation for 0.2 s and was abandoned")


async def test_a_loop_that_ignores_the_clients_cancellation_is_abandoned_and_can_do_no_more(stubborn):
    feeder = Storing([task("bad", loop=f"{HERE}:Stubborn")])
    engine = scripted_engine(ANSWER)
    async with running_worker(feeder, {"sim://a": engine}, grace_s=0.2) as worker, asyncio.timeout(30):
        while worker.num_running == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        feeder.cancel_next = ["bad/0"]
        await feeder.is_done.wait()
        while "Conflict" not in stubborn.refused:
            await asyncio.sleep(0.05)
        assert worker.num_running == 0
        assert engine.load().num_running == 0
    assert feeder.records["bad/0"].stop_reason is StopReason.CANCELLED


async def test_a_worker_closes_over_a_loop_that_ignores_its_cancellation(stubborn):
    feeder = Storing([task("bad", loop=f"{HERE}:Stubborn")])
    async with asyncio.timeout(60):
        async with running_worker(feeder, {"sim://a": scripted_engine(ANSWER)}, grace_s=0.2) as worker:
            while worker.num_running == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
    assert feeder.records == {}, "a shutdown leaves the trajectory to another worker"


RELEASE = threading.Event()


@tool(timeout_s=0.02, max_concurrency=1000)
def hangs() -> str:
    """Wait for the test to end."""
    RELEASE.wait(60)
    return "done"


async def test_threads_that_hang_are_counted_and_bounded():
    RELEASE.clear()
    toolbox = Toolbox([hangs], grace_s=0.02)
    scope = toolbox.open(("hangs",), "t", 0)
    before = num_abandoned_threads()
    calls = [ToolCall(str(n), "hangs", {}) for n in range(MAX_ABANDONED_THREADS + 10)]
    async with asyncio.timeout(30):
        first = await scope.run(calls[:10], 1000)
        assert {result.content for result in first} == {"Error: timed out after 0.02 s"}
        assert toolbox.num_abandoned - before == 10
        await scope.run(calls[10:], 1000)
        refused = await scope.run(calls[:5], 1000)
        assert {result.content for result in refused} == {"Error: too many earlier tool calls are still running"}
        RELEASE.set()
        while num_abandoned_threads() > before:
            await asyncio.sleep(0.01)
        assert (await scope.run(calls[:1], 1000))[0].content == "done"
    await toolbox.close()


class Blocks:
    """A loop that blocks the event loop until the log names it."""

    logs: ClassVar[list[EventDict]] = []

    async def run(self, rollout_task, ctx):
        while "Blocks of bad/0" not in str(self.logs):  # on a busy host, the watch may check too late
            time.sleep(0.5)  # noqa: ASYNC251 - the test is about blocking calls
            await asyncio.sleep(0.1)


async def test_what_blocks_the_event_loop_is_named(monkeypatch):
    with capture_logs() as logs:
        monkeypatch.setattr(Blocks, "logs", logs)
        watch = LoopWatch(blocked_s=0.2)
        await beside_good_ones(task("bad", loop=f"{HERE}:Blocks"))
        watch.close()
    told = [line for line in logs if line["event"] == "event_loop_blocked" and "Blocks" in line["by"]]
    assert {line["by"] for line in told} == {f"loop {HERE}:Blocks of bad/0"}
    assert told[0]["at"].endswith(" in run")
    assert watch.blocked is not None  # a busy host blocks the loop too, and the last block counts
    assert watch.longest_s >= 0.2


class Frozen(LoopWatch):
    """A watch that sees its loop in a stack without user code, as on a host with busy CPUs."""

    places: ClassVar[list[str]] = []
    is_computing = False

    def _cpu_s(self) -> float:
        return time.monotonic() if self.is_computing else 0.0

    def _place(self, still_s: float) -> str:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(aio, "_is_user_code", lambda frame: False)
            self.places.append(super()._place(still_s))
        return self.places[-1]


@pytest.mark.parametrize("is_computing", [False, True])
async def test_a_loop_that_waits_for_a_cpu_blames_no_code(is_computing, monkeypatch):
    monkeypatch.setattr(Frozen, "is_computing", is_computing)
    Frozen.places.clear()
    with capture_logs() as logs:
        watch = Frozen(blocked_s=0.1)
        await asyncio.sleep(0)
        while not Frozen.places:
            time.sleep(0.05)  # noqa: ASYNC251 - the loop stands
        watch.close()
    assert bool(Frozen.places[0]) is is_computing
    assert watch.blocked is not None
    assert {line["event"] for line in logs} == {"event_loop_blocked" if is_computing else "host_short_of_cpu"}


# Tools


class Poison:
    """A tool whose session does what its argument names."""

    spec = ToolSpec("poison", "Poison.", {"type": "object"})

    def open_session(self, trajectory_id, seed):
        return self

    async def call(self, arguments):
        raise {
            "exit": SystemExit(2),
            "interrupt": KeyboardInterrupt(),
            "group": BaseExceptionGroup("several", [SystemExit(1)]),
            "base": GeneratorExit(),
        }[arguments["what"]]

    async def close(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["exit", "interrupt", "group", "base"])
async def test_what_a_tool_raises_is_an_answer(what: str):
    feeder = Storing([task("bad", tools=("poison",)), task("good", tools=())])
    engines = {"sim://a": scripted_engine(call("poison", what=what), ANSWER)}
    async with running_worker(feeder, engines, tools=[Poison()]), asyncio.timeout(30):
        await feeder.is_done.wait()
    found = feeder.records["bad/0"]
    assert (found.stop_reason, found.num_tool_errors, found.reward) == (StopReason.COMPLETED, 1, 1.0)


def interrupting_reward(rollout_task, messages):
    raise KeyboardInterrupt


async def interrupting_async_reward(rollout_task, messages):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["interrupting_reward", "interrupting_async_reward"])
async def test_what_a_reward_raises_is_its_own_failure(name: str):
    (found,) = await beside_good_ones(task("bad", reward=f"{HERE}:{name}"))
    assert (found.stop_reason, found.is_complete, found.reward) == (StopReason.COMPLETED, True, None)
    assert "KeyboardInterrupt" in (found.reward_error or "")


class CountsItsReads(str):
    """A text that records how many of its characters were encoded."""

    num_encoded = 0

    def encode(self, *arguments, **named):
        CountsItsReads.num_encoded += len(self)
        return super().encode(*arguments, **named)


@pytest.mark.parametrize("character", ["x", "é"])
def test_a_huge_answer_is_cut_before_it_is_encoded(character: str):
    huge = CountsItsReads(character * 2_000_000)
    CountsItsReads.num_encoded = 0
    content, is_truncated = capped(huge, 100)
    assert is_truncated
    assert len(content.encode()) <= 100
    assert content.startswith(character * 20)
    assert CountsItsReads.num_encoded <= 101
