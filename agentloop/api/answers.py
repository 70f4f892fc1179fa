"""The HTTP answers, for the OpenAPI page and for clients in other languages.

The service writes them with `codec.to_builtins`, without these models; a test holds the two shapes equal.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from agentloop import codec
from agentloop.api.coordinator import RolloutStatus
from agentloop.api.requests import MessageBody


class SpanBody(BaseModel):
    """Ids `[start, end)` were sampled under weight `version`."""

    version: int
    start: int
    end: int


class GenerateAnswer(BaseModel):
    """Token ids out: the stop token included, one logprob an id, spans that tile the ids."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[SpanBody]
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int
    replica_id: str
    top_logprobs: list[list[tuple[int, float]]] = []  # empty unless asked for; else one list an id, best first


class RolloutStatusBody(BaseModel):
    """Counts in trajectories."""

    rollout_id: str
    num_accepted: int
    num_finished: int
    num_running: int
    num_queued: int
    num_held: int
    is_done: bool


class TurnBody(BaseModel):
    """One generation within a path."""

    prompt_len: int
    start: int
    end: int
    finish_reason: Literal["stop", "length", "abort"]
    replica_id: str
    cached_tokens: int


class PathBody(BaseModel):
    """`TokenPath`: one sequence to train on."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[bool]
    logprobs: list[float]
    weight_versions: list[SpanBody]
    turns: list[TurnBody]
    split_reason: str | None
    parent: int | None = None
    num_shared: int = 0
    split_detail: str | None = None


class TimingsBody(BaseModel):
    """Seconds."""

    queue_s: float
    generate_s: float
    tool_s: float
    reward_s: float
    total_s: float


class TrajectoryBody(BaseModel):
    """`Trajectory`: the terminal record of one sample."""

    task_id: str
    group_id: str
    sample_index: int
    paths: list[PathBody]
    messages: list[MessageBody]
    stop_reason: str
    is_complete: bool
    reward: float | None
    reward_error: str | None
    error: str | None
    num_tool_calls: int
    num_tool_errors: int
    attempt: int
    timings: TimingsBody
    rollout_id: str
    num_masked_tokens: int
    num_stale_attempts: int
    max_staleness: int | None
    staleness: int | None


class PageBody(BaseModel):
    """Finished trajectories in commit order; `cursor` is the next read's `after`."""

    trajectories: list[TrajectoryBody]
    cursor: int
    status: RolloutStatusBody


class ReplicaUpdateBody(BaseModel):
    """What one update meant for one replica."""

    replica_id: str
    stage_ms: float
    stall_ms: float
    error: str | None
    held_in: Literal["device", "host", "files", "nowhere"] | None
    transport: str | None
    num_bytes: int
    transfer_ms: float
    swap_ms: float
    verify_ms: float
    num_verified: int


class UpdateBody(BaseModel):
    """`UpdateReport`."""

    version: int
    previous_version: int | None
    kv_policy: Literal["keep", "fresh", "recompute"]
    replicas: list[ReplicaUpdateBody]
    total_ms: float


class LoadBody(BaseModel):
    """`Load`."""

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    weight_version: int | None


class ReplicaStatusBody(BaseModel):
    """One line of the fleet table."""

    replica_id: str
    state: str
    engine: str
    weight_version: int | None
    load: LoadBody
    num_leases: int
    heartbeat_age_s: float
    num_workers: int
    weight_dtype: str | None
    error: str | None


class StatusBody(BaseModel):
    """`ServiceStatus`."""

    is_ready: bool
    is_paused: bool
    weight_version: int | None
    replicas: list[ReplicaStatusBody]
    num_workers: int
    rollouts: list[RolloutStatusBody]
    updates: list[UpdateBody]
    asleep: list[Literal["weights", "kv_cache"]]


class HealthBody(BaseModel):
    """Whether a replica takes traffic."""

    is_ready: bool


class StateBody(BaseModel):
    """The answer to a pause or a resume."""

    is_paused: bool


class MemoryBody(BaseModel):
    """The answer to a sleep or a wake: the memory that the fleet has given back now."""

    asleep: list[Literal["weights", "kv_cache"]]


class ErrorDetail(BaseModel):
    """One error: `code` is stable and machine-readable, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The one envelope of every answer that is no success."""

    error: ErrorDetail


def rollout_status(status: RolloutStatus) -> dict[str, Any]:
    """`RolloutStatusBody` as plain JSON."""
    return {**codec.to_builtins(status), "is_done": status.is_done}
