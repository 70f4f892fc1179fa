"""Rollouts by a user's agent: each sample of a task is one recorded session and one run of the agent.

`run_agents` owns the sessions that it opens and finishes each of them. Invariant: every sample has exactly one
`AgentRecord` and, while the service is reachable, one trajectory. A failure of the agent is data (an error and an
incomplete trajectory), not an exception. Of a task's limits only the timeouts apply, because the agent controls
turns and tools.
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

# The session must not expire before the run, its reward and its open calls have ended.
_SPARE_TTL_S = AGENT_GRACE_S + 300.0  # added to the limits of a run for the TTL of its session

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The number of concurrent runs, and deadlines in addition to the task's limits."""

    concurrency: int = 16
    settle_s: float = 5.0  # for calls that are still open when the agent ends

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InvalidRequest(f"concurrency must be at least 1, not {self.concurrency}", param="concurrency")


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """The outcome of one sample. `trajectory` is None if a call to the service failed; `error` has the reason.

    `reward_error` is set if the reward function failed; the trajectory then has no reward.
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
    """The result of `run_agents`. Read its trajectories like those of any rollout, by `rollout_id`."""

    rollout_id: str
    num_samples: int
    num_failed: int  # samples with an error
    num_lost: int  # samples without a trajectory
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
    """Run the agent `num_samples` times for each task. Returns once every sample has its record.

    `on_record` is called on this event loop after each sample. The reward is the agent's return value, or else the
    reward that it set in the session, or else the result of the task's reward function. A cancellation finishes
    open sessions as cancelled. Raises InvalidRequest for an unknown reward, before anything runs.

    If the agent fails because of the policy (`SessionAnswer.policy_failure`) or at its deadline, the record is
    complete and has a reward, because the policy's failure is training data. `on_overflow` and `on_malformed_call`
    are options of the sessions.
    """
    rollout_id = rollout_id or f"r-{uuid.uuid4().hex[:16]}"
    if any(isinstance(task.reward, Judge) for task in tasks):
        raise InvalidRequest(
            "a Judge reward is not supported with agents: call the judge's model in the agent or a reward function",
            param="reward",
        )
    rewards = {task.reward: load_reward(task.reward) for task in tasks if isinstance(task.reward, str)}

    def open_session(sample: _Sample) -> AgentSession:
        own = sample.task.limits
        return client.session(
            rollout_id=rollout_id,
            group_id=sample.group_id,
            task_id=sample.task.task_id,
            sample_index=sample.index,
            ttl_s=min(own.timeout_s + own.reward_timeout_s + limits.settle_s + _SPARE_TTL_S, MAX_TIMEOUT_S),
            on_overflow=on_overflow,
            on_malformed_call=on_malformed_call,
            task_messages=sample.task.messages,
            credit=sample.task.credit,
        )

    runner = _SampleRunner(program, open_session, limits, rewards)
    samples = _samples(tasks, num_samples, rollout_id)

    async def work() -> None:
        for sample in samples:  # a shared iterator: each worker takes the next sample
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
    for position, task in enumerate(tasks):
        for index in range(num_samples):
            yield _Sample(task, f"{rollout_id}-{position:06d}", index)


class _SampleRunner:
    """Runs the agent for single samples."""

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
        """Run one sample and return its record. Raises only CancelledError."""
        started_at = time.monotonic()
        trajectory, reward_error = None, None
        try:
            async with self._open_session(sample) as session:
                run_end = await self._drive(session, sample.task)
                trajectory, reward_error = await self._finish(session, sample.task, run_end)
        except AgentLoopError as error:  # from the service; the agent's own errors are in the `_RunEnd`
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
        """Run the agent and return its end. Raises only a cancellation from outside."""
        place = AgentPlace(task, session.base_url, session.api_key, session.control_key)
        timeout_s = task.limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return _RunEnd(await self._program.run(place))
        except Exception as error:  # user code may raise any exception
            if isinstance(error, TimeoutError) and deadline.expired():
                return _RunEnd(
                    error=f"the agent did not finish within {timeout_s:g} s (limits.timeout_s)", end="deadline"
                )
            text = str(error) if type(error) is AgentLoopError else describe(error)
            return _RunEnd(error=text or "the agent failed", end="loop_failed")

    async def _finish(
        self, session: AgentSession, task: RolloutTask, run_end: _RunEnd
    ) -> tuple[Trajectory, str | None]:
        # Only a failure of the agent itself makes the record incomplete.
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
        """Return the score and the reward error, from the agent's return value or else the reward function."""
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
            return None, None  # the agent has set a reward in the session
        return await score(function, task, trajectory, task.limits.reward_timeout_s)
