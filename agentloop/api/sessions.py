"""HTTP bodies of the session routes, shared by client and ingress. Validation is strict, as in `requests.py`.

A session is opened, used through the chat routes, given a reward and finished. `finish` and `trajectories` both
return a JSON list of trajectories, or the same list in the binary encoding with `Accept: application/msgpack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self, TypeAlias

import numpy as np
from pydantic import BaseModel, Field, model_validator

from agentloop.api.requests import (
    MAX_PROMPT_TOKENS,
    MAX_TASK_MESSAGES,
    MAX_TIMEOUT_S,
    MAX_WAIT_S,
    Body,
    CreditName,
    Id,
    Name,
    Text,
    VersionDemandBody,
)
from agentloop.score import MAX_NAMES, MAX_SCORE_NAME_CHARS, PathScore, Score
from agentloop.types import JSON, Credit, StopReason, Trajectory
from agentloop.values import codec

SESSIONS_ROLLOUT_ID = "sessions"  # the default rollout of sessions
DEFAULT_TTL_S = 3600.0
MAX_SAMPLE_INDEX = (1 << 31) - 1
MAX_SCORED_TURNS = 10_000

OnOverflow: TypeAlias = Literal["length", "error"]
OnMalformedCall: TypeAlias = Literal["content", "tool_call"]
ScoreName = Annotated[str, Field(min_length=1, max_length=MAX_SCORE_NAME_CHARS)]
TokenRewards = Annotated[list[float], Field(max_length=MAX_PROMPT_TOKENS)]
TurnId = Annotated[str, Field(min_length=1, max_length=256)]


class TaskMessage(Body):
    """The role and text of one message of a task."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""


class NewSessionBody(Body):
    """The body of `POST /sessions`. The session's record is stored in `rollout_id` as a sample of `group_id`.

    - `session_id`: an id chosen by the caller. The request can then be repeated if its response was lost.
    - `on_overflow`: the result of a later prompt that fills the context. `length` returns a reply without tokens
    and finish reason `length`; `error` returns an error.
    - `on_malformed_call`: a tool call that cannot be parsed is returned as `content` or as a `tool_call`, whose
    name may be empty.
    - `task_messages`: the messages of the task. The conversation that begins with them is the main one.
    - `weight_version`: the versions accepted by calls that do not set their own.
    - `adapter`: used for all calls, regardless of their `model`.
    - `credit`: the token paths that receive the session's reward. See docs/guides/lineage.md.
    """

    session_id: Id | None = None
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=MAX_TIMEOUT_S)
    rollout_id: Id = SESSIONS_ROLLOUT_ID
    group_id: Id | None = None  # None: a new group with the session's id
    task_id: Name | None = None
    sample_index: int = Field(default=0, ge=0, le=MAX_SAMPLE_INDEX)
    on_overflow: OnOverflow = "length"
    on_malformed_call: OnMalformedCall = "content"
    task_messages: list[TaskMessage] = Field(default_factory=list, max_length=MAX_TASK_MESSAGES)
    weight_version: VersionDemandBody | None = None
    adapter: Name | None = None
    credit: CreditName = Credit.LINEAGE.value


class PathScoreBody(Body):
    """A `PathScore` without turn rewards, which are in `ScoreBody.turn_rewards`."""

    reward: float | None = None
    tokens: TokenRewards | None = None
    is_trainable: bool = True


class ScoreBody(Body):
    """A `Score`. The keys of `paths` are the ids of the last turn of each path."""

    reward: float | None = None
    components: dict[ScoreName, float] = Field(default_factory=dict, max_length=MAX_NAMES)
    metrics: dict[ScoreName, float] = Field(default_factory=dict, max_length=MAX_NAMES)
    turn_rewards: dict[TurnId, float] = Field(default_factory=dict, max_length=MAX_SCORED_TURNS)
    paths: dict[TurnId, PathScoreBody] = Field(default_factory=dict, max_length=MAX_SCORED_TURNS)
    untrainable_turns: list[TurnId] = Field(default_factory=list, max_length=MAX_SCORED_TURNS)

    def to_score(self) -> Score:
        paths: dict[int | str, PathScore] = {
            turn_id: PathScore(
                path.reward,
                tokens=None if path.tokens is None else np.array(path.tokens, np.float32),
                is_trainable=path.is_trainable,
            )
            for turn_id, path in self.paths.items()
        }
        return Score(
            self.reward,
            self.components,
            self.metrics,
            paths=paths,
            turn_rewards=self.turn_rewards,
            untrainable_turns=tuple(self.untrainable_turns),
        )


def score_values(score: Score) -> dict[str, JSON]:
    """Return the fields of the `ScoreBody` of a `resolved` score."""
    paths = {
        turn_id: {
            "reward": path.reward,
            "tokens": None if path.tokens is None else path.tokens.tolist(),
            "is_trainable": path.is_trainable,
        }
        for turn_id, path in score.paths.items()
    }
    return {
        "reward": score.reward,
        "components": dict(score.components),
        "metrics": dict(score.metrics),
        "turn_rewards": dict(score.turn_rewards),
        "paths": paths,
        "untrainable_turns": list(score.untrainable_turns),
    }


class RewardBody(ScoreBody):
    """The body of `POST /sessions/{id}/reward`. Its values replace those of earlier requests."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.to_score().is_empty:
            raise ValueError("the body is empty: set 'reward' or another field of the score")
        return self


class FinishBody(ScoreBody):
    """The body of `POST /sessions/{id}/finish`. With an `error`, the record is incomplete.

    `reward_error` is the reason that there is no reward. Open calls have `wait_s` to end, then they fail.
    """

    reward_error: Text = ""
    error: Text = ""
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)
    stop_reason: Literal["completed", "deadline", "cancelled", "loop_failed"] | None = None

    @property
    def reason(self) -> StopReason:
        """The stop reason: `stop_reason`, or else LOOP_FAILED with an `error` and COMPLETED without."""
        if self.stop_reason is not None:
            return StopReason(self.stop_reason)
        return StopReason.LOOP_FAILED if self.error else StopReason.COMPLETED


class NewSessionAnswer(BaseModel):
    """A new session. `direct_url` reaches its process directly: on a single host from that host only, with several
    hosts it is the URL of the session's host.

    `api_key` is for the agent and only allows calls. `control_key` is for the creator and also allows to set
    rewards and to finish, revoke and delete the session.
    """

    session_id: str
    base_url: str
    api_key: str
    control_key: str = ""
    direct_url: str | None = None


class SessionLine(BaseModel):
    """A session in the response of `GET /sessions`."""

    session_id: str
    state: Literal["open", "finished"]
    created_at: float  # Unix time in seconds
    rollout_id: str


class SessionsAnswer(BaseModel):
    """The response of `GET /sessions`: a page of the caller's sessions, ordered by id."""

    sessions: list[SessionLine]


class SessionAnswer(BaseModel):
    """The current state of a session: the response of `GET /sessions/{id}` and `POST /sessions/{id}/reward`."""

    session_id: str
    state: Literal["open", "finished"]
    created_at: float  # Unix time in seconds
    ttl_s: float
    rollout_id: str
    group_id: str
    task_id: str
    sample_index: int
    reward: float | None
    components: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    stop_reason: str | None
    policy_failure: str | None = None  # the stop reason, instead of loop_failed, if its agent failed now
    error: str
    num_turns: int
    num_open_calls: int
    num_bytes: int
    is_complete: bool
    is_revoked: bool = False


class DeletedAnswer(BaseModel):
    """The response of `DELETE /sessions/{id}`."""

    session_id: str
    is_deleted: Literal[True] = True


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Return the binary encoding of the response of `finish` and `trajectories`."""
    return codec.encode(list(trajectories))


def decode_trajectories(data: bytes) -> list[Trajectory]:
    """Decode the result of `encode_trajectories`. Raises InvalidRequest if `data` is not a list of trajectories."""
    return codec.decode(data, list[Trajectory])
