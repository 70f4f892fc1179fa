"""Realistic trajectories and tasks, for tests of stores, exports and servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentloop.api.encoded_record import EncodedRecord
from agentloop.observability.metrics import Labels, MetricsTally
from agentloop.simulation.policy import routed_experts
from agentloop.storage.trajectory_store import TrajectoryStore
from agentloop.types import (
    FinishReason,
    LossCause,
    Message,
    RolloutGroup,
    RolloutTask,
    StopReason,
    Timings,
    TokenPath,
    ToolCall,
    ToolCallTimes,
    ToolOutcome,
    Trajectory,
    TrajectoryTimes,
    Turn,
    TurnTimes,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import AuxKind, ragged


def make_task(task_id: str = "task-1") -> RolloutTask:
    return RolloutTask(
        task_id, (Message("user", "What is 2 + 3?"),), tools=("calculator",), reward="exact_match", reference="5"
    )


def make_group(group_id: str = "g-0", num_samples: int = 2, rollout_id: str = "r") -> RolloutGroup:
    return RolloutGroup(group_id, make_task(f"task-{group_id}"), num_samples, rollout_id)


def make_path(spans: tuple[tuple[int, int, int], ...] = ((0, 0, 3), (0, 5, 8))) -> TokenPath:
    """Return two turns of three sampled tokens with two observed tokens in between."""
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 1], np.bool_)
    return TokenPath(
        prompt_ids=np.arange(10, dtype=np.int32),
        response_ids=np.arange(100, 108, dtype=np.int32),
        response_mask=mask,
        logprobs=np.where(mask, np.float32(-0.25), np.float32(0)).astype(np.float32),
        weight_versions=tuple(WeightVersionSpan(*span) for span in spans),
        turns=(
            Turn(10, 0, 3, FinishReason.STOP, "replica-0", 0, "0", times=TurnTimes(0, 100, 300)),
            Turn(15, 5, 8, FinishReason.STOP, "replica-0", 8, "1", times=TurnTimes(500, 700, 900)),
        ),
    )


def with_aux(path: TokenPath) -> TokenPath:
    """Return the path with auxiliary rows: simulated experts, and masks of each sampled id and the next one."""
    ids, num_prompt, known = [*path.prompt_ids.tolist(), *path.response_ids.tolist()], len(path.prompt_ids), 0
    experts, masks = [], []
    for turn in path.turns:
        first, end = num_prompt + turn.start, num_prompt + turn.end
        experts.append(routed_experts(ids, max(known - 1, 0), end - 1).packed())
        masks.append(ragged(first, [(one, one + 1) for one in ids[first:end]]).packed())
        known = end
    return replace(path, aux={AuxKind.ROUTED_EXPERTS: tuple(experts), AuxKind.SAMPLING_MASK: tuple(masks)})


def interleaved_paths() -> tuple[TokenPath, TokenPath]:
    """Return two concurrent conversations, whose turns began in the order of their ids."""

    def path(*begins: tuple[str, int]) -> TokenPath:
        made = make_path()
        turns = [
            replace(turn, turn_id=turn_id, times=TurnTimes(begun_us, begun_us + 100, begun_us + 300))
            for turn, (turn_id, begun_us) in zip(made.turns, begins, strict=True)
        ]
        return replace(made, turns=tuple(turns))

    return path(("1", 0), ("3", 1000)), path(("2", 500), ("4", 1500))


def make_trajectory(
    group_id: str = "g-0",
    sample_index: int = 0,
    *,
    rollout_id: str = "r",
    spans: tuple[tuple[int, int, int], ...] = ((0, 0, 3), (0, 5, 8)),
    reward: float | None = 1.0,
    num_tool_errors: int = 0,
    stop_reason: StopReason = StopReason.COMPLETED,
    paths: tuple[TokenPath, ...] | None = None,
) -> Trajectory:
    call = ToolCall("call-1", "calculator", {"expression": "2 + 3"}, token_start=0, token_end=3)
    messages = (
        Message("user", "What is 2 + 3?"),
        Message("assistant", "", (call,)),
        Message("tool", "5", tool_call_id="call-1", name="calculator"),
        Message("assistant", "5 \u2713\n\x00"),
    )
    return Trajectory(
        task_id=f"task-{group_id}",
        group_id=group_id,
        sample_index=sample_index,
        paths=(replace(make_path(spans), messages=messages),) if paths is None else paths,
        stop_reason=stop_reason,
        is_complete=stop_reason is StopReason.COMPLETED,
        reward=reward,
        num_tool_calls=1,
        num_tool_errors=num_tool_errors,
        timings=Timings(0.1, 0.2, 0.3, 0.4, 1.0),
        times=TrajectoryTimes(
            1.7e9,
            1_000_000,
            "worker-1",
            (ToolCallTimes("calculator", 300, 150, ToolOutcome.TIMEOUT),),
            lost_tokens={LossCause.KILL: 7},
        ),
        rollout_id=rollout_id,
    )


def encoded(trajectories: Iterable[Trajectory]) -> list[EncodedRecord]:
    return [EncodedRecord.of(one) for one in trajectories]


def fill_store(
    path: Path, groups: Mapping[str, Sequence[RolloutGroup]], records: Sequence[Trajectory] = ()
) -> None:
    """Write a store as a run leaves it: groups by rollout, and records. Not within a running loop."""

    async def fill() -> None:
        store = TrajectoryStore(path)
        for rollout_id, accepted in groups.items():
            await store.accept(rollout_id, accepted)
        await store.add_records(encoded(records))
        await store.close()

    asyncio.run(fill())


def counted(tally: MetricsTally) -> dict[tuple[str, Labels], float]:
    """Return the counters of a tally, by name and labels."""
    return {(one.name, one.labels): one.value for one in tally.seen().samples}
