"""Rollouts by a user's own agent: each sample of each task is one recorded session and one run of the agent.

Ownership: `run_agents` owns every session that it opens, and finishes it. Invariant: each sample gives exactly
one `AgentRecord` and, while the service can be reached, one trajectory; what the agent does wrong is data there
(an error, and a trajectory that is not complete), never an exception here. Of a task's limits, `timeout_s` counts:
turns and tools are the agent's own.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from agentloop.agents.program import AGENT_GRACE_S, AgentPlace, AgentProgram
from agentloop.api.requests import MAX_TIMEOUT_S
from agentloop.api.sessions import OnMalformedCall, OnOverflow
from agentloop.client.client import RolloutClient
from agentloop.client.session import AgentSession, SessionEnd, describe
from agentloop.errors import AgentLoopError, InvalidRequest, RewardError
from agentloop.rollout.rewards import RewardFunction, load_reward, score
from agentloop.score import Score, resolved, score_of
from agentloop.types import Judge, RolloutTask, Trajectory

__all__ = ["AgentLimits", "AgentProgram", "AgentRecord", "AgentRun", "run_agents"]

_SPARE_TTL_S = 300.0  # of a session, beyond all that its run may take

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The number of runs at once, and deadlines beside the task's own."""

    concurrency: int = 16
    settle_s: float = 5.0  # how long calls that the agent left open may still take to end

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequest("at least one run at a time", param="concurrency")


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The record of one sample. Without a `trajectory` the service was out of reach, as `error` says.

    `reward_error` is set if the task's reward function failed: the trajectory then has no reward.
    """

    task_id: str
    group_id: str
    sample_index: int
    trajectory: Trajectory | None
    error: str | None
    reward_error: str | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class AgentRun:
    """A whole run. Its trajectories are read as those of any rollout, by `rollout_id`."""

    rollout_id: str
    num_samples: int
    num_failed: int  # with an error
    num_lost: int  # without a trajectory
    num_reward_errors: int


async def run_agents(
    client: RolloutClient,
    program: AgentProgram,
    tasks: Sequence[RolloutTask],
    *,
    num_samples: int = 1,
    rollout_id: str | None = None,
    limits: AgentLimits = AgentLimits(),
    on_overflow: OnOverflow = "length",
    on_malformed_call: OnMalformedCall = "content",
    on_record: Callable[[AgentRecord], None] | None = None,
) -> AgentRun:
    """Run the agent `num_samples` times for each task; returns once every sample has its record.

    `on_record` is called on this event loop after each. The reward is what the agent returned or else has set
    itself, or else what the task's reward function says of the session's messages. A cancellation finishes the
    sessions that are open, as cancelled. Raises InvalidRequest, before anything runs, for an unknown reward.

    An agent that fails after a failure of the policy (`SessionAnswer.policy_failure`), or that its deadline ends,
    has a record that is complete and rewarded: what the policy did badly is data. `on_overflow` and
    `on_malformed_call` are those of its sessions.
    """
    rollout_id = rollout_id or f"r-{uuid.uuid4().hex[:16]}"
    if any(isinstance(task.reward, Judge) for task in tasks):
        raise InvalidRequest("a judge scores trajectories of workers; an agent asks it itself", param="reward")
    rewards = {task.reward: load_reward(task.reward) for task in tasks if isinstance(task.reward, str)}

    def open_session(sample: _Sample) -> AgentSession:
        own = sample.task.limits
        needed_s = own.timeout_s + AGENT_GRACE_S + own.reward_timeout_s + limits.settle_s + _SPARE_TTL_S
        return client.session(
            rollout_id=rollout_id,
            group_id=sample.group_id,
            task_id=sample.task.task_id,
            sample_index=sample.index,
            ttl_s=min(needed_s, MAX_TIMEOUT_S),
            on_overflow=on_overflow,
            on_malformed_call=on_malformed_call,
            task_messages=sample.task.messages,
        )

    runner = _SampleRunner(program, open_session, limits, rewards)
    samples = _samples(tasks, num_samples, rollout_id)

    async def work() -> None:
        for sample in samples:  # shared by all: each takes the next
            record = await runner.run(sample)
            tally.add(record)
            if on_record is not None:
                on_record(record)

    tally = _Tally()
    num_total = len(tasks) * num_samples
    async with asyncio.TaskGroup() as group:
        for _ in range(min(limits.concurrency, num_total)):
            group.create_task(work())
    return AgentRun(rollout_id, num_total, tally.num_failed, tally.num_lost, tally.num_reward_errors)


@dataclass(frozen=True, slots=True)
class _Sample:
    task: RolloutTask
    group_id: str
    index: int


@dataclass(frozen=True, slots=True)
class _RunEnd:
    value: float | Score | None = None
    error: str = ""
    end: SessionEnd = "completed"


@dataclass(slots=True)
class _Tally:
    num_failed: int = 0
    num_lost: int = 0
    num_reward_errors: int = 0

    def add(self, record: AgentRecord) -> None:
        self.num_failed += record.error is not None
        self.num_lost += record.trajectory is None
        self.num_reward_errors += record.reward_error is not None


def _samples(tasks: Sequence[RolloutTask], num_samples: int, rollout_id: str) -> Iterator[_Sample]:
    for place, task in enumerate(tasks):
        for index in range(num_samples):
            yield _Sample(task, f"{rollout_id}-{place:06d}", index)


class _SampleRunner:
    """The agent and all that its runs share."""

    def __init__(
        self,
        program: AgentProgram,
        open_session: Callable[[_Sample], AgentSession],
        limits: AgentLimits,
        rewards: Mapping[str, RewardFunction],
    ) -> None:
        self._program = program
        self._open_session = open_session
        self._limits = limits
        self._rewards = rewards

    async def run(self, sample: _Sample) -> AgentRecord:
        """One sample, to its record. Raises nothing but a cancellation."""
        started_at = time.monotonic()
        trajectory, reward_error = None, None
        try:
            async with self._open_session(sample) as session:
                run_end = await self._drive(session, sample.task)
                trajectory, reward_error = await self._finish(session, sample.task, run_end)
        except AgentLoopError as error:  # the service: what the agent raised is in the end of its run
            run_end = _RunEnd(error=f"{error.code}: {error}", end="loop_failed")
        record = AgentRecord(
            task_id=sample.task.task_id,
            group_id=sample.group_id,
            sample_index=sample.index,
            trajectory=trajectory,
            error=run_end.error or None,
            reward_error=reward_error,
            duration_s=time.monotonic() - started_at,
        )
        _log.info(
            "agent_finished",
            group=sample.group_id,
            sample=sample.index,
            end=run_end.end,
            error=record.error,
            reward=trajectory.reward if trajectory is not None else None,
            reward_error=reward_error,
            duration_s=round(record.duration_s, 3),
        )
        return record

    async def _drive(self, session: AgentSession, task: RolloutTask) -> _RunEnd:
        """Run the agent and name how it ended. A cancellation from outside is none of its endings."""
        place = AgentPlace(task, session.base_url, session.api_key, session.control_key)
        timeout_s = task.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return _RunEnd(await self._program.run(place))
        except Exception as error:  # user code raises anything
            if isinstance(error, TimeoutError) and deadline.expired():
                return _RunEnd(error=f"the agent did not end within {timeout_s:g} s", end="deadline")
            text = str(error) if type(error) is AgentLoopError else describe(error)
            return _RunEnd(error=text or "the agent failed", end="loop_failed")

    async def _finish(
        self, session: AgentSession, task: RolloutTask, run_end: _RunEnd
    ) -> tuple[Trajectory, str | None]:
        if run_end.end == "loop_failed" and (await session.status()).policy_failure is None:
            return await session.finish(error=run_end.error, stop_reason=run_end.end), None
        reward, reward_error = await self._reward(session, task, run_end.value)
        settle_s = self._limits.settle_s
        trajectory = await session.finish(
            reward=reward,
            reward_error=reward_error or "",
            error=run_end.error if run_end.end == "loop_failed" else "",
            stop_reason=run_end.end,
            wait_s=settle_s,
        )
        return trajectory, reward_error

    async def _reward(
        self, session: AgentSession, task: RolloutTask, returned: float | Score | None
    ) -> tuple[Score | None, str | None]:
        """Return what is to be said at the end: what the agent returned, or else what the task's function says."""
        if returned is not None:
            try:
                return resolved(score_of(returned), await session.trajectory()), None
            except RewardError as error:
                return None, f"the agent's score: {error}"
        if not isinstance(task.reward, str):
            return None, None
        return await self._score(session, task, self._rewards[task.reward])

    async def _score(
        self, session: AgentSession, task: RolloutTask, function: RewardFunction
    ) -> tuple[Score | None, str | None]:
        trajectory = await session.trajectory()
        if trajectory.reward is not None:
            return None, None  # the agent has set it
        return await score(function, task, trajectory, task.limits.reward_timeout_s)
