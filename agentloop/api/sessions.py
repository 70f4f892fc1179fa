"""The HTTP bodies of the session routes, shared by client and ingress; strict, as those of `requests.py`.

A session is opened, used through the chat routes, given a reward and finished. `finish` and `trajectories` answer
alike: a JSON list of trajectories, or with `Accept: application/msgpack` the binary form of the same list.
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
    Id,
    Name,
    Text,
    VersionDemandBody,
)
from agentloop.score import MAX_NAMES, MAX_SCORE_NAME_CHARS, PathScore, Score
from agentloop.types import JSON, StopReason, Trajectory
from agentloop.values import codec

SESSIONS_ROLLOUT_ID = "sessions"  # of sessions that name no rollout
DEFAULT_TTL_S = 3600.0
MAX_SAMPLE_INDEX = (1 << 31) - 1
MAX_SCORED_TURNS = 10_000

OnOverflow: TypeAlias = Literal["length", "error"]
OnMalformedCall: TypeAlias = Literal["content", "tool_call"]
ScoreName = Annotated[str, Field(min_length=1, max_length=MAX_SCORE_NAME_CHARS)]
TokenRewards = Annotated[list[float], Field(max_length=MAX_PROMPT_TOKENS)]
TurnId = Annotated[str, Field(min_length=1, max_length=256)]


class TaskMessage(Body):
    """The words of one message of a task."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""


class NewSessionBody(Body):
    """The body of `POST /sessions`. The session's record goes to `rollout_id`, as a sample of `group_id`.

    With a `session_id` of the caller's own, a create whose answer was lost can be repeated: it makes one session.
    `on_overflow` is for a prompt, after the first turn, that leaves no room in the context: it gets a reply that
    was cut before its first token, or an error. `on_malformed_call` is for a call that cannot be read: it is
    content, or a tool call, without a name if that cannot be read either. `task_messages` are the task's own: the
    conversation that begins with them is the main one. `weight_version` is for calls that say none. All calls are
    under the `adapter`, whatever model they name.
    """

    session_id: Id | None = None
    ttl_s: float = Field(default=DEFAULT_TTL_S, gt=0, le=MAX_TIMEOUT_S)
    rollout_id: Id = SESSIONS_ROLLOUT_ID
    group_id: Id | None = None  # None: a group of its own, named as the session
    task_id: Name | None = None
    sample_index: int = Field(default=0, ge=0, le=MAX_SAMPLE_INDEX)
    on_overflow: OnOverflow = "length"
    on_malformed_call: OnMalformedCall = "content"
    task_messages: list[TaskMessage] = Field(default_factory=list, max_length=MAX_TASK_MESSAGES)
    weight_version: VersionDemandBody | None = None
    adapter: Name | None = None


class PathScoreBody(Body):
    """`PathScore` without its turns, which `ScoreBody` names by their ids."""

    reward: float | None = None
    tokens: TokenRewards | None = None
    is_trainable: bool = True


class ScoreBody(Body):
    """`Score`, each path named by the id of its last turn."""

    reward: float | None = None
    components: dict[ScoreName, float] = Field(default_factory=dict, max_length=MAX_NAMES)
    metrics: dict[ScoreName, float] = Field(default_factory=dict, max_length=MAX_NAMES)
    turn_rewards: dict[TurnId, float] = Field(default_factory=dict, max_length=MAX_SCORED_TURNS)
    paths: dict[TurnId, PathScoreBody] = Field(default_factory=dict, max_length=MAX_SCORED_TURNS)
    untrainable_turns: list[TurnId] = Field(default_factory=list, max_length=MAX_SCORED_TURNS)

    def to_score(self) -> Score:
        """Return the score as the service holds it."""
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
    """Return the values of the `ScoreBody` of a `resolved` score."""
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
    """The body of `POST /sessions/{id}/reward`. A later one replaces the same values of an earlier one."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.to_score().is_empty:
            raise ValueError("a reward, or something else to score, is missing")
        return self


class FinishBody(ScoreBody):
    """The body of `POST /sessions/{id}/finish`; with an `error` the record is incomplete.

    `reward_error` says why there is no reward. `wait_s` is the time for open calls, which then fail.
    """

    reward_error: Text = ""
    error: Text = ""
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)
    stop_reason: Literal["completed", "deadline", "cancelled", "loop_failed"] | None = None

    @property
    def reason(self) -> StopReason:
        """The reason for the session's end: the one given, or else whether there is an error."""
        if self.stop_reason is not None:
            return StopReason(self.stop_reason)
        return StopReason.LOOP_FAILED if self.error else StopReason.COMPLETED


class NewSessionAnswer(BaseModel):
    """The place of a new session. `direct_url` leads straight to its process, from its own host only, or, over
    several hosts, to the one that has the session.

    `api_key` is for its agent: it makes calls. `control_key`, for the session's maker, also rewards, finishes,
    revokes and deletes.
    """

    session_id: str
    base_url: str
    api_key: str
    control_key: str = ""
    direct_url: str | None = None


class SessionLine(BaseModel):
    """A session in the answer of `GET /sessions`."""

    session_id: str
    state: Literal["open", "finished"]
    created_at: float  # seconds since 1970
    rollout_id: str


class SessionsAnswer(BaseModel):
    """The answer of `GET /sessions`: a page of the caller's own, by id."""

    sessions: list[SessionLine]


class SessionAnswer(BaseModel):
    """A session at one moment: the answer of `GET /sessions/{id}` and of `POST /sessions/{id}/reward`."""

    session_id: str
    state: Literal["open", "finished"]
    created_at: float  # seconds since 1970
    ttl_s: float
    rollout_id: str
    group_id: str
    task_id: str
    sample_index: int
    reward: float | None
    components: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    stop_reason: str | None
    policy_failure: str | None = None  # the stop reason that it would end with if its agent failed now
    error: str
    num_turns: int
    num_open_calls: int
    num_bytes: int
    is_complete: bool
    is_revoked: bool = False


class DeletedAnswer(BaseModel):
    """The answer of `DELETE /sessions/{id}`."""

    session_id: str
    is_deleted: Literal[True] = True


def encode_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Write the binary form of what `finish` and `trajectories` answer."""
    return codec.encode(list(trajectories))


def decode_trajectories(data: bytes) -> list[Trajectory]:
    """Read what `encode_trajectories` writes. Raises InvalidRequest if `data` holds something else."""
    return codec.decode(data, list[Trajectory])
