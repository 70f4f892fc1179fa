"""Isolated trajectories: their records equal those of a worker's process, and a death ends only its own process."""

import asyncio
from functools import partial

import pytest

from agentloop.api.coordinator import TurnEnded
from agentloop.observability.trace_context import turn_context
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import KVPolicy, Limits, PauseMode, StopReason
from agentloop_isolation.processes import IsolationConfig
from agentloop_servers.config.service import KeysConfig
from tests.parts.isolation.isolated_worker import TRACES, isolated_worker
from tests.rollout.test_environment import ending, kitchen_task
from tests.support.engine.recording import RecordingEngine
from tests.support.engine.scripted import call, scripted_engine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.fleet.lost_worker import HangingEngine, Relay, files
from tests.support.fleet.worker import running_worker, task
from tests.support.records.samples import counted

CALL = call("calculator", expression="2 + 3")
ANSWER = "The answer is 5."
HERE = "tests.parts.isolation.poison"
poisoned_worker = partial(isolated_worker, tools={"dies": f"{HERE}:dies"})


async def one(asked, *replies: str, **options):
    feeder = FakeCoordinator([asked])
    async with poisoned_worker(feeder, scripted_engine(*replies), **options):
        await feeder.is_done.wait()
    return feeder.records[f"{asked.task_id}/0"]


async def test_a_record_is_that_of_the_workers_own_process_and_processes_are_used_again():
    tasks = [task(f"t{n}", seed=7) for n in range(4)]
    feeder, own = FakeCoordinator(tasks), FakeCoordinator(tasks)
    engine = RecordingEngine(scripted_engine(CALL, ANSWER))
    async with poisoned_worker(feeder, engine, capacity=1) as runs:
        await feeder.is_done.wait()
        assert runs.num_started == 1
    trajectories = {one.request_id.rpartition(":")[0] for one in engine.requests}
    contexts = {turn_context(TRACES, one, "", turn) for one in trajectories for turn in "01"}
    assert {one.traceparent for one in engine.requests} == contexts
    async with running_worker(own, {"sim://a": scripted_engine(CALL, ANSWER)}), asyncio.timeout(60):
        await own.is_done.wait()
    for name, expected in own.records.items():
        found = feeder.records[name]
        assert (found.stop_reason, found.reward, found.num_tool_calls) == (StopReason.COMPLETED, 1.0, 1)
        assert found.messages == expected.messages
        assert found.path.response_ids.tolist() == expected.path.response_ids.tolist()
        assert found.path.logprobs.tolist() == expected.path.logprobs.tolist()
        assert [turn.replica_id for turn in found.path.turns] == [turn.replica_id for turn in expected.path.turns]


async def test_what_its_parser_cannot_read_in_a_process_is_counted_by_the_worker():
    feeder = FakeCoordinator([task("t"), task("u")])
    engine = scripted_engine("<tool_call>\n{not json\n</tool_call>", ANSWER)
    async with poisoned_worker(feeder, engine, capacity=1, parser_name="hermes") as runs:
        await feeder.is_done.wait()
    found = counted(runs.tally)
    assert (
        found["malformed_calls_total", ("hermes",)]
        == found["trajectories_total", ("completed", "", "rollout")]
        == 2
    )
    assert found["logprob_problems_total", ()] == 0


async def test_the_coordinator_hears_of_turns_that_run_in_a_process():
    feeder = FakeCoordinator([task("t")])

    class AfterFirstReport(RecordingEngine):
        """The first report lists leases and running turns. It leaves out a turn that ended before it."""

        async def generate(self, request, on_progress=None):
            while not feeder.reports:
                await asyncio.sleep(0.01)
            return await super().generate(request, on_progress)

    async with poisoned_worker(feeder, AfterFirstReport(scripted_engine(CALL, ANSWER))):
        await feeder.is_done.wait()
        ends = []
        while len(ends) < 2:
            await asyncio.sleep(0.05)
            ends = [news for one in feeder.reports for news in one.turns if isinstance(news, TurnEnded)]
    assert all(news.num_context_tokens > news.num_sampled_tokens > 0 for news in ends)
    assert len(ends) == 2


@pytest.mark.slow
async def test_a_death_is_one_trajectorys_and_names_its_signal_or_status():
    deaths = {
        "exit": "exit status 7",
        "segfault": "signal 11 (SIGSEGV)",
        "kill": "signal 9 (SIGKILL)",
        "exit in a task": "exit status 3",
    }
    bad = [task(name, loop=f"{HERE}:Dies", reference=name) for name in deaths]
    poisoned = task("tool", tools=("dies",), limits=Limits(max_turns=2))
    feeder = FakeCoordinator([*bad, *(task(f"good{n}", tools=()) for n in range(8)), poisoned])
    async with poisoned_worker(feeder, scripted_engine(call("dies"), ANSWER)):
        await feeder.is_done.wait()
    for name, death in deaths.items():
        assert feeder.records[f"{name}/0"].stop_reason is StopReason.LOOP_FAILED
        assert feeder.records[f"{name}/0"].error == f"its process ended: {death}"
    assert feeder.records["tool/0"].error == "its process ended: exit status 9"
    assert all(feeder.records[f"good{n}/0"].is_complete for n in range(8))


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "late"])
async def test_a_process_that_blocks_is_killed_with_its_group(tmp_path, is_cancelled: bool):
    told = tmp_path / "pids"
    limits = Limits(timeout_s=0.5, reward_timeout_s=0.1)
    bad = task("bad", loop=f"{HERE}:Blocks", reference=str(told), limits=limits)
    feeder = FakeCoordinator([bad])
    allowance_s = 60.0 if is_cancelled else 0.4
    config = IsolationConfig(cancel_grace_s=0.2, allowance_s=allowance_s, check_interval_s=0.2)
    async with poisoned_worker(feeder, scripted_engine(ANSWER), config=config) as runs:
        while not told.exists() or not told.read_text():
            await asyncio.sleep(0.02)
        if is_cancelled:
            feeder.cancel_next = ["bad/0"]
        await feeder.is_done.wait()
        assert runs.num_processes == 0
    found = feeder.records["bad/0"]
    assert found.stop_reason is (StopReason.CANCELLED if is_cancelled else StopReason.LOOP_FAILED)
    if not is_cancelled:
        assert found.error == "it made no call for 1 s: signal 9 (SIGKILL)"
    for pid in map(int, told.read_text().split()):
        while _is_alive(pid):
            await asyncio.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def test_what_a_trajectory_leaves_behind_ends_its_process():
    feeder = FakeCoordinator([task(f"t{n}", loop=f"{HERE}:Leaves") for n in range(2)])
    async with poisoned_worker(feeder, scripted_engine(ANSWER), capacity=1) as runs:
        await feeder.is_done.wait()
        assert runs.num_started == 2
    assert all(record.stop_reason is StopReason.COMPLETED for record in feeder.records.values())


async def test_a_process_knows_no_key_and_no_address_and_asks_for_its_own_trajectory_only(monkeypatch):
    monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", "the-secret")
    KeysConfig().hide()  # like a worker
    found = await one(task("bad", loop=f"{HERE}:Pries", tools=()), ANSWER)
    assert found.stop_reason is StopReason.COMPLETED, found.error
    said = [message.content for message in found.messages[1:-1]]
    assert "the-secret" not in said[0]
    assert all(
        text.startswith("Forbidden: 'other/0@0:0' is not a request of trajectory bad/0") for text in said[1:3]
    )
    assert all(
        text.startswith("Forbidden: trajectory 'other/0' is not this process' bad/0") for text in said[3:6]
    ), said
    assert said[6] == "lease: ''"


@pytest.mark.slow
@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_trajectory_whose_process_died_goes_on_at_its_last_turn_in_another(tmp_path, is_stored):
    """The child processes of the lost worker are killed; its journal entries are older than `YOUNG_S`."""
    asked, replies = task("t", seed=7), (CALL, CALL, ANSWER)
    engine, feeder = HangingEngine(*replies, hangs_at=2), Relay([asked])
    store, folder = TrajectoryStore(tmp_path / "trajectories.sqlite"), tmp_path / "turns"
    feeder.keep_turns, feeder.kept_turns = store.keep_turns, store.kept_turns

    async def journals():
        return await store.kept_turns("t/0") if is_stored else files(folder)

    turns_folder = "" if is_stored else str(folder)
    async with poisoned_worker(feeder, engine, turns_folder=turns_folder):
        await engine.is_hanging.wait()
        while not await journals():
            await asyncio.sleep(0.05)
    assert feeder.records == {}
    feeder.lose_worker()
    engine = HangingEngine(*replies)
    async with poisoned_worker(feeder, engine, turns_folder=turns_folder):
        await feeder.is_done.wait()
        while await journals():  # no journal is left
            await asyncio.sleep(0.05)
    await store.close()
    assert engine.num_turns == 1
    own = FakeCoordinator([asked])
    async with running_worker(own, {"sim://a": scripted_engine(*replies)}), asyncio.timeout(60):
        await own.is_done.wait()
    found, expected = feeder.records["t/0"], own.records["t/0"]
    assert (found.attempt, found.num_resumed_turns, found.reward) == (1, 2, 1.0)
    assert found.messages == expected.messages
    assert found.path.response_ids.tolist() == expected.path.response_ids.tolist()
    assert found.path.logprobs.tolist() == expected.path.logprobs.tolist()


async def test_an_update_and_a_shutdown_reach_processes():
    """A turn that an operator's abort cuts continues; a worker that closes kills the running processes."""
    engine = scripted_engine(" ".join(["word"] * 300), decode_s=0.005)
    feeder = FakeCoordinator([task("long", tools=(), limits=Limits(max_tokens_per_turn=2000))])
    async with poisoned_worker(feeder, engine):
        while engine.load().num_running == 0:
            await asyncio.sleep(0.01)
        await engine.pause(PauseMode.ABORT, KVPolicy.KEEP)
        await engine.resume()
        await feeder.is_done.wait()
    assert feeder.records["long/0"].stop_reason is StopReason.COMPLETED
    engine, feeder = scripted_engine(ANSWER, decode_s=5.0), FakeCoordinator([task("cut")])
    async with poisoned_worker(feeder, engine):
        while engine.load().num_running == 0:
            await asyncio.sleep(0.01)
    assert feeder.records == {}


async def test_an_environment_lives_in_its_trajectorys_process():
    feeder, engine = FakeCoordinator([kitchen_task()]), scripted_engine(call("put", pot="soup"), call("serve"))
    async with isolated_worker(feeder, engine, tools={}, capacity=1):
        await feeder.is_done.wait()
    assert (*ending(feeder.records["t/0"]), feeder.records["t/0"].end_reason) == (
        StopReason.COMPLETED,
        None,
        1.0,
        "served soup",
    )
