"""Rollouts by a user's agent code: every sample produces one record, for any error that the code raises."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.agents.program import AgentPlace, AgentProgram, environment, run_command
from agentloop.agents.runner import AgentLimits, AgentRecord, AgentRun, run_agents
from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.types import Message, RolloutTask, StopReason
from tests.servers.processes import pids_with, processes_with
from tests.support.endpoint.fake_sessions import FakeSessions, session_service
from tests.support.records.samples import make_task
from tests.support.service import sample_agents

AGENTS = "tests.support.service.sample_agents"
COMMAND = f"{sys.executable} {Path(__file__).with_name('agent_command.py')}"
PLACE = AgentPlace(make_task(), "http://127.0.0.1:9/sessions/s/v1", "sk-s")


@pytest.fixture
async def service() -> AsyncIterator[FakeSessions]:
    fake = FakeSessions()
    async with session_service(fake):
        yield fake


def tasks_of(count: int, *, timeout_s: float = 60.0, reward: str | None = None) -> list[RolloutTask]:
    tasks = [replace(make_task(f"t{index}"), reward=reward) for index in range(count)]
    return [replace(task, limits=replace(task.limits, timeout_s=timeout_s)) for task in tasks]


async def roll_out(
    service: FakeSessions,
    program: AgentProgram,
    tasks: list[RolloutTask],
    num_samples: int = 1,
    concurrency: int = 8,
) -> tuple[AgentRun, list[AgentRecord]]:
    records: list[AgentRecord] = []
    limits = AgentLimits(concurrency=concurrency)
    async with RolloutClient(service.url, retry_timeout_s=5.0) as client, asyncio.timeout(90):
        with program:
            run = await run_agents(
                client, program, tasks, num_samples=num_samples, limits=limits, on_record=records.append
            )
    assert service.num_open == 0
    assert len(records) == run.num_samples == len(tasks) * num_samples
    return run, records


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (AgentProgram.load(f"{AGENTS}:ask"), None),
        (AgentProgram.load(f"{AGENTS}:ask_plainly"), 0.25),
        (AgentProgram.load(f"{AGENTS}:ask_blocking"), 0.25),
        (AgentProgram.load(f"{AGENTS}:asker"), 0.75),
        (AgentProgram.command(f"{COMMAND} ask"), None),
        (AgentProgram.command(f"{COMMAND} reward"), 0.125),
    ],
    ids=lambda value: getattr(value, "name", "").rsplit("/")[-1].rsplit(":")[-1] or None,
)
async def test_every_kind_of_agent_is_recorded(service: FakeSessions, program: AgentProgram, reward) -> None:
    run, records = await roll_out(service, program, tasks_of(2), num_samples=2)
    groups = [f"{run.rollout_id}-{index:06d}" for index in range(2)]
    keys = {(record.group_id, record.sample_index) for record in service.records}
    assert keys == {(group, sample) for group in groups for sample in range(2)}
    for record in service.records:
        assert record.rollout_id == run.rollout_id
        assert (record.is_complete, record.reward, record.error) == (True, reward, None)
        assert record.messages[-1].content == "The answer is 5."
    assert (run.num_failed, run.num_lost, run.num_reward_errors) == (0, 0, 0)
    assert {record.task_id for record in records} == {"t0", "t1"}


async def test_what_is_asynchronous_shares_one_loop_that_is_not_ours(service: FakeSessions) -> None:
    sample_agents.loops_seen.clear()
    sample_agents.threads_seen.clear()
    await roll_out(service, AgentProgram.load(f"{AGENTS}:ask"), tasks_of(6))
    assert len(sample_agents.loops_seen) == len(sample_agents.threads_seen) == 1
    assert threading.get_ident() not in sample_agents.threads_seen
    assert id(asyncio.get_running_loop()) not in sample_agents.loops_seen


async def test_no_more_run_at_once_than_allowed(service: FakeSessions) -> None:
    service.call_s = 0.3
    await roll_out(service, AgentProgram.load(f"{AGENTS}:ask_plainly"), tasks_of(5), num_samples=2, concurrency=3)
    assert service.most_open_calls == 3
    assert len(service.records) == 10


# Rewards


@pytest.mark.parametrize(
    ("program", "function", "expected"),
    [
        (AgentProgram.load(f"{AGENTS}:ask"), "exact_match", 1.0),
        (AgentProgram.load(f"{AGENTS}:ask_plainly"), "exact_match", 0.25),  # the returned reward counts
        (AgentProgram.command(f"{COMMAND} reward"), "exact_match", 0.125),  # or the reward that the agent set
        (AgentProgram.command(f"{COMMAND} ask"), "exact_match", 1.0),
    ],
    ids=["function", "returned", "set", "command"],
)
async def test_where_a_reward_comes_from(service: FakeSessions, program, function: str, expected: float) -> None:
    await roll_out(service, program, tasks_of(1, reward=function))
    assert service.records[0].reward == expected


async def test_a_failed_reward_loses_no_trajectory(service: FakeSessions) -> None:
    tasks = [replace(task, reference=None) for task in tasks_of(2, reward="exact_match")]
    run, records = await roll_out(service, AgentProgram.load(f"{AGENTS}:ask"), tasks)
    assert (run.num_reward_errors, run.num_failed) == (2, 0)
    assert "has no reference" in str(records[0].reward_error)
    assert [(one.reward, one.is_complete) for one in service.records] == [(None, True)] * 2
    assert [one.reward_error for one in service.records] == [one.reward_error for one in records]


async def test_an_unknown_reward_is_told_before_anything_runs(service: FakeSessions) -> None:
    async with RolloutClient(service.url) as client:
        with pytest.raises(InvalidRequest, match="no rewards are registered as 'nonsense'"):
            await run_agents(client, AgentProgram.load(f"{AGENTS}:ask"), tasks_of(1, reward="nonsense"))
    assert not service.sessions


# Failures


async def test_every_sample_has_one_record_though_agents_fail(service: FakeSessions) -> None:
    service.refused = {"t3"}
    run, records = await roll_out(service, AgentProgram.load(f"{AGENTS}:by_number"), tasks_of(12), num_samples=2)
    by_task = {record.task_id: record for record in records}
    assert by_task["t0"].error == "ValueError: number 0"
    assert by_task["t1"].error == "raised SystemExit"
    assert "returned a str: the reward must be a number" in str(by_task["t2"].error)
    assert (by_task["t3"].trajectory, by_task["t3"].error) == (None, "not_found: no such place")
    assert (run.num_failed, run.num_lost) == (14, 2)
    assert len({(one.task_id, one.sample_index) for one in service.records}) == len(service.records) == 22
    for record in service.records:
        is_good = int(record.task_id[1:]) % 6 > 2
        expected = (True, StopReason.COMPLETED) if is_good else (False, StopReason.LOOP_FAILED)
        assert (record.is_complete, record.stop_reason) == expected
        assert record.reward == (float(record.task_id[1:]) if is_good else None)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (BaseExceptionGroup("several", [SystemExit(1)]), "raised BaseExceptionGroup"),
        (Unspeakable(), "Unspeakable"),
        (ValueError("caf\udce9.txt"), "ValueError: caf\\udce9.txt"),
    ],
    ids=["interrupt", "group", "unspeakable", "surrogate"],
)
async def test_whatever_an_agent_raises_is_its_own_failure(
    service: FakeSessions, raised: BaseException, says: str, is_async: bool
) -> None:
    async def asynchronously(task, base_url, api_key):
        raise raised

    def plainly(task, base_url, api_key):
        raise raised

    run, records = await roll_out(service, AgentProgram.of(asynchronously if is_async else plainly), tasks_of(2))
    assert [record.error for record in records] == [says] * 2
    assert run.num_failed == 2
    assert {record.stop_reason for record in service.records} == {StopReason.LOOP_FAILED}


async def test_an_agent_that_cancels_itself_has_failed(service: FakeSessions) -> None:
    _, [record] = await roll_out(service, AgentProgram.load(f"{AGENTS}:cancels_itself"), tasks_of(1))
    assert record.error == "raised CancelledError"


async def test_a_command_fails_by_its_status(service: FakeSessions) -> None:
    _, [record] = await roll_out(service, AgentProgram.command(f"{COMMAND} fail"), tasks_of(1))
    assert record.error == "exit status 3: no such luck"
    assert not service.records[0].is_complete


async def test_a_service_that_goes_away_is_an_error_of_the_sample(service: FakeSessions) -> None:
    service.is_down = True
    async with RolloutClient(service.url, retry_timeout_s=0.2) as client:
        run = await run_agents(client, AgentProgram.load(f"{AGENTS}:ask"), tasks_of(2))
    assert (run.num_failed, run.num_lost) == (2, 2)


# Deadlines and cancellation


@pytest.mark.parametrize("name", ["never_ends", "hangs", "ignores_cancellation"])
async def test_the_deadline_ends_an_agent_whatever_it_does(service: FakeSessions, name: str) -> None:
    program = AgentProgram.load(f"{AGENTS}:{name}", grace_s=0.2)
    began_at = asyncio.get_running_loop().time()
    _, records = await roll_out(service, program, tasks_of(3, timeout_s=0.5))
    assert asyncio.get_running_loop().time() - began_at < 8  # the failing agents would run for 10 s
    for record in service.records:
        assert (record.stop_reason, record.is_complete) == (StopReason.DEADLINE, False)
    assert {record.error for record in records} == {"the agent did not finish within 0.5 s (limits.timeout_s)"}


async def test_newcomers_get_another_loop_than_one_that_ignores_cancellation(service: FakeSessions) -> None:
    sample_agents.loops_seen.clear()
    program = AgentProgram.load(f"{AGENTS}:ignores_cancellation", grace_s=0.1)
    await roll_out(service, program, tasks_of(2, timeout_s=0.5), concurrency=1)
    assert len(sample_agents.loops_seen) == 2


@pytest.mark.parametrize("order", ["hang", "leave"])
async def test_no_process_outlives_its_command(service: FakeSessions, monkeypatch, order: str) -> None:
    """The command either ignores SIGTERM and has a child process, or exits normally and leaves one behind."""
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(marker, "1")
    program = AgentProgram.command(f"{COMMAND} {order} {marker}", grace_s=0.3)
    is_hanging = order == "hang"
    await roll_out(service, program, tasks_of(2, timeout_s=3.0 if is_hanging else 200.0))
    reason = StopReason.DEADLINE if is_hanging else StopReason.COMPLETED
    assert {record.stop_reason for record in service.records} == {reason}
    assert await asyncio.to_thread(processes_with, marker) == []


@pytest.mark.parametrize("kind", ["async", "command"])
async def test_a_cancelled_run_finishes_its_sessions(service: FakeSessions, monkeypatch, kind: str) -> None:
    marker = f"AGENTLOOP_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(marker, "1")
    is_async = kind == "async"
    command = f"{COMMAND} hang {marker}"
    program = AgentProgram.load(f"{AGENTS}:never_ends") if is_async else AgentProgram.command(command, grace_s=0.3)
    async with RolloutClient(service.url) as client, asyncio.timeout(60):
        limits = AgentLimits(concurrency=2)
        with program:
            running = asyncio.create_task(run_agents(client, program, tasks_of(4), limits=limits))
            while service.num_open < 2:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])
    assert running.cancelled()
    assert [record.stop_reason for record in service.records] == [StopReason.CANCELLED] * 2
    assert await asyncio.to_thread(processes_with, marker) == []


async def test_a_command_that_is_cancelled_while_it_starts_leaves_nothing(monkeypatch) -> None:
    start, marker = asyncio.create_subprocess_exec, f"AGENTLOOP_TEST_{uuid.uuid4().hex}"

    async def slow_start(*arguments, **options):
        process = await start(*arguments, **options)
        while len(pids_with(marker)) < 2:  # it has started a child process
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.sleep(0.1)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_start)
    command = [*shlex.split(COMMAND), "hang", marker]
    running = asyncio.create_task(run_command(command, {**os.environ, marker: "1"}, grace_s=0.3))
    async with asyncio.timeout(60):
        await asyncio.wait([running])
    assert running.cancelled()
    assert await asyncio.to_thread(processes_with, marker) == []


# Environment and arguments of an agent


async def test_a_command_finds_what_it_needs_and_no_more(service, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", "secret")
    shown = tmp_path / "shown.json"
    program = AgentProgram.command(
        f"{COMMAND} show {shown} {{task_id}} -- '{{prompt}}' {{base_url}}",
        withheld=frozenset({"AGENTLOOP_ADMIN_KEY"}),
    )
    [task] = tasks_of(1)
    task = replace(task, messages=(Message("user", "{task_id}; $HOME 'quoted'"),))
    await roll_out(service, program, [task])
    document = json.loads(shown.read_text())
    [session_id] = service.sessions
    url = f"{service.url}/sessions/{session_id}"
    assert document["arguments"] == [str(shown), "t0", "--", "{task_id}; $HOME 'quoted'", f"{url}/v1"]
    variables = document["environment"]
    assert "AGENTLOOP_ADMIN_KEY" not in variables
    assert variables["OPENAI_BASE_URL"] == f"{url}/v1"
    assert variables["ANTHROPIC_BASE_URL"] == variables["AGENTLOOP_SESSION_URL"] == url
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"] == f"sk-{session_id}"
    given = json.loads(variables["AGENTLOOP_TASK"])
    assert (given["task_id"], given["messages"][0]["content"]) == ("t0", "{task_id}; $HOME 'quoted'")
    assert "reference" not in given


def test_a_task_that_no_environment_holds_is_told() -> None:
    task = replace(make_task(), messages=(Message("user", "x" * 130_000),))
    with pytest.raises(InvalidRequest, match="longer than"):
        environment(replace(PLACE, task=task))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; print('x' * 100_000); print('late'); sys.exit('the end')", "exit status 1: the end"),
        ("import sys; print('x\\nthe end'); sys.exit(2)", "exit status 2: the end"),
        ("import os; print('buffered'); os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("import sys; print('x' * 100_000); sys.exit(3)", f"exit status 3: {'x' * 500}"),
    ],
)
async def test_a_command_s_end_is_one_line(program: str, expected: str) -> None:
    ending = await run_command([sys.executable, "-c", program], {}, grace_s=1.0)
    assert ending.describe() == expected
    assert len(ending.output_tail) <= 4096


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{AGENTS}:NOT_A_FUNCTION", "not a function"),
        (f"{AGENTS}:takes_too_little", "run\\(task, base_url, api_key\\)"),
        (f"{AGENTS}:absent", "no attribute"),
        ("no_such_module:run", "no module named"),
        ("nonsense", "not an import path"),
    ],
)
def test_what_is_no_agent_is_told_at_once(path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        AgentProgram.load(path)
    assert raised.value.param == "agent"


@pytest.mark.parametrize("template", ["", "no-such-program-here x", "'unclosed"])
def test_what_is_no_command_is_told_at_once(template: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        AgentProgram.command(template)
    assert raised.value.param == "agent_command"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", [1.0]])
async def test_only_a_finite_number_is_a_reward(value: object) -> None:
    async def returns(task, base_url, api_key):
        return value

    with AgentProgram.of(returns) as program, pytest.raises(AgentLoopError, match="the reward must be"):
        await program.run(PLACE)
