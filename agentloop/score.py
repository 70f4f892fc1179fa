"""Scores of trajectories, from reward functions, loops, tool sessions and agents.

A score is a number, or a `Score` with named components, metrics, and rewards of turns, paths and tokens. Only
`scored` writes a score into a record. It validates the complete score first, so that a record has all values of a
score or none. An incomplete trajectory is never trainable, regardless of its score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from agentloop.errors import RewardError
from agentloop.types import TRUNCATIONS, FinishReason, FloatArray, TokenPath, Trajectory
from agentloop.values.endings import NOT_THE_POLICYS

MAX_NAMES = 256
"""The maximum number of components, and of metrics, of one trajectory."""

MAX_SCORE_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class PathScore:
    """The score of one path. `turns` is empty, or has a number or None for each turn of the path.

    `tokens` has shape (response tokens,); rewards of observed tokens are ignored. `is_trainable` can only exclude a
    path from training.
    """

    reward: float | None = None
    turns: tuple[float | None, ...] = ()
    tokens: FloatArray | None = None
    is_trainable: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """A score of one trajectory. All numbers are finite; names have 1 to 128 characters.

    The keys of `paths` are indexes in `Trajectory.paths`, or ids of the paths' last turns, which remain valid while
    a session continues. The keys of `turn_rewards` are `Turn.turn_id`.
    """

    reward: float | None = None  # the trajectory's reward; None: not set by this score
    components: Mapping[str, float] = field(default_factory=dict)  # the parts of the reward
    metrics: Mapping[str, float] = field(default_factory=dict)  # recorded, but not used for training
    main: PathScore | None = None  # the score of `Trajectory.path`, the latest path of the main conversation
    paths: Mapping[int | str, PathScore] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, float] = field(
        default_factory=dict
    )  # the rewards of agents with their own reward, by name
    untrainable_turns: tuple[str, ...] = ()  # paths with one of these as an own turn are not trainable

    @property
    def is_empty(self) -> bool:
        """True if no value is set."""
        return self == _EMPTY

    def updated(self, newer: Score) -> Score:
        """Return this score with the values of a newer one, which replace existing values."""
        return Score(
            reward=self.reward if newer.reward is None else newer.reward,
            components={**self.components, **newer.components},
            metrics={**self.metrics, **newer.metrics},
            main=self.main if newer.main is None else newer.main,
            paths={**self.paths, **newer.paths},
            turn_rewards={**self.turn_rewards, **newer.turn_rewards},
            agents={**self.agents, **newer.agents},
            untrainable_turns=tuple(dict.fromkeys((*self.untrainable_turns, *newer.untrainable_turns))),
        )

    def joined(self, other: Score) -> Score:
        """Return the union of two independent scores.

        Raises RewardError if both set the reward or the same name.
        """
        pairs = ((self.components, other.components, "component"), (self.metrics, other.metrics, "metric"))
        for mine, theirs, kind in pairs:
            if duplicates := sorted(mine.keys() & theirs.keys()):
                raise RewardError(f"two scores set the {kind} {duplicates[0]!r}: rename one of them")
        if self.reward is not None and other.reward is not None:
            raise RewardError("two scores set a reward: add a reward function to the task, which overrides both")
        return self.updated(other)


_EMPTY = Score()


def score_of(value: object) -> Score:
    """Convert a number to a `Score`. Raises RewardError for other types.

    The values of a `Score` are not validated here, but in `resolved`.
    """
    if isinstance(value, Score):
        return value
    if not isinstance(value, Real):
        raise RewardError(f"the reward must be a number or a Score, not {type(value).__name__}")
    return Score(reward=_number(value, "the reward"))


def checked(score: Score) -> Score:
    """Return the score with validated numbers and names, converted to floats and float32 arrays.

    Raises RewardError with a one-line message. See `resolved` for the comparison with a trajectory.
    """
    return Score(
        reward=None if score.reward is None else _number(score.reward, "the reward"),
        components=_named(score.components, "component"),
        metrics=_named(score.metrics, "metric"),
        main=None if score.main is None else _checked_path(score.main, "the main path"),
        paths={name: _checked_path(path_score, f"path {name}") for name, path_score in score.paths.items()},
        turn_rewards={
            turn_id: _number(reward, f"the reward of turn {turn_id!r}")
            for turn_id, reward in score.turn_rewards.items()
        },
        agents={name: _number(reward, f"the reward of agent {name!r}") for name, reward in score.agents.items()},
        untrainable_turns=tuple(score.untrainable_turns),
    )


def resolved(score: Score, trajectory: Trajectory) -> Score:
    """Validate a score against its trajectory, and replace path indexes by the ids of the paths' last turns.

    The result can be serialized and remains valid while a session grows. Raises RewardError with a one-line
    message.
    """
    score, paths = checked(score), trajectory.paths
    known = {turn.turn_id for path in paths for turn in path.turns}
    for turn_id in (*score.turn_rewards, *score.untrainable_turns):
        if turn_id not in known:
            name = str(turn_id)[:MAX_SCORE_NAME_CHARS]
            raise RewardError(f"unknown turn {name!r}: the trajectory has {len(known)} turns, see Turn.turn_id")
    if unknown_agents := sorted(score.agents.keys() - set(trajectory.agents)):
        raise RewardError(
            f"unknown agent {unknown_agents[0]!r}: the trajectory's agents are {[*trajectory.agents]}"
        )
    indexes: dict[int | str, int] = {index: index for index in range(len(paths))}
    indexes |= {path.turns[-1].turn_id: index for index, path in enumerate(paths) if path.turns}
    if unknown := [name for name in score.paths if name not in indexes]:
        key = str(unknown[0])[:MAX_SCORE_NAME_CHARS]
        raise RewardError(
            f"unknown path {key!r}: expected an index below {len(paths)} or the id of a path's last turn"
        )
    named = [(indexes[name], path_score) for name, path_score in score.paths.items()]
    if score.main is not None:
        if not paths:
            raise RewardError("the score has a main path, but the trajectory has no path: nothing was rendered")
        named.append((trajectory.final_path, score.main))
    turn_rewards, path_scores = dict(score.turn_rewards), dict[int | str, PathScore]()
    for index, path_score in named:
        path, label = paths[index], f"path {index}"
        _check_lengths(path_score, path, label)
        pairs = zip(path.turns, path_score.turns, strict=False)
        turn_rewards.update({turn.turn_id: reward for turn, reward in pairs if reward is not None})
        path_scores[path.turns[-1].turn_id] = replace(path_score, turns=())
    return replace(score, main=None, paths=path_scores, turn_rewards=turn_rewards)


def scored(trajectory: Trajectory, score: Score) -> Trajectory:
    """Return the trajectory with the values of a score, which replace existing values.

    Raises RewardError, like `resolved`.
    """
    if score.is_empty:
        return trajectory
    score = resolved(score, trajectory)
    untrainable = set(score.untrainable_turns)
    return replace(
        trajectory,
        reward=trajectory.reward if score.reward is None else score.reward,
        components={**trajectory.components, **score.components},
        metrics={**trajectory.metrics, **score.metrics},
        agent_rewards={**trajectory.agent_rewards, **score.agents},
        paths=tuple(_scored_path(path, score, untrainable) for path in trajectory.paths),
    )


def scored_or_told(trajectory: Trajectory, score: Score) -> Trajectory:
    """Return the trajectory with the score or, if the score is invalid, with the reason in `reward_error`."""
    try:
        return scored(trajectory, score)
    except RewardError as error:
        problems = (trajectory.reward_error, str(error))
        return replace(trajectory, reward_error="; ".join(problem for problem in problems if problem))


def scored_group(
    group: Sequence[Trajectory], function: Callable[[Sequence[Trajectory]], Sequence[float | Score]]
) -> list[Trajectory]:
    """Return a group with scores from a function of all its complete trajectories, such as ranks.

    The scores replace existing values. Raises RewardError for an invalid score or a different number of scores.
    """
    complete = [trajectory for trajectory in group if trajectory.is_complete]
    scores = list(function(complete)) if complete else []
    if len(scores) != len(complete):
        raise RewardError(
            f"the function returned {len(scores)} scores for {len(complete)} complete trajectories: return one "
            "per trajectory"
        )
    remaining = iter(scores)
    return [scored(each, score_of(next(remaining))) if each.is_complete else each for each in group]


def ended(trajectory: Trajectory) -> Trajectory:
    """Return a record with `is_truncated` set and, if it is not complete, with all paths untrainable."""
    turns = trajectory.path.turns if trajectory.paths else ()
    is_cut = bool(turns) and turns[-1].finish_reason is not FinishReason.STOP
    paths = trajectory.paths
    if not trajectory.is_complete:
        paths = tuple(replace(path, is_trainable=False) for path in paths)
    return replace(trajectory, paths=paths, is_truncated=is_cut or trajectory.stop_reason in TRUNCATIONS)


def judged(trajectory: Trajectory) -> Trajectory:
    """Return a scored record, without its reward if the infrastructure or a weight update ended it."""
    # Such a reward is for an unfinished conversation and would distort the baseline of its group.
    is_failed = trajectory.failure in NOT_THE_POLICYS
    return replace(trajectory, reward=None) if is_failed and trajectory.reward is not None else trajectory


def _scored_path(path: TokenPath, score: Score, untrainable: set[str]) -> TokenPath:
    own = score.paths.get(path.turns[-1].turn_id) if path.turns else None
    rewards = score.turn_rewards
    turns = tuple(
        replace(turn, reward=rewards[turn.turn_id]) if turn.turn_id in rewards else turn for turn in path.turns
    )
    is_marked = any(turn.turn_id in untrainable for turn in path.own_turns)
    return replace(
        path,
        turns=turns,
        reward=path.reward if own is None or own.reward is None else own.reward,
        token_rewards=path.token_rewards if own is None or own.tokens is None else own.tokens,
        is_trainable=path.is_trainable and not is_marked and (own is None or own.is_trainable),
    )


def _check_lengths(score: PathScore, path: TokenPath, label: str) -> None:
    num_turns, num_tokens = len(path.turns), len(path.response_ids)
    if not path.turns:
        raise RewardError(f"{label} has no turns, so it cannot have a score")
    if score.turns and len(score.turns) != num_turns:
        raise RewardError(
            f"{label} has {num_turns} turns, but its score has {len(score.turns)} turn rewards: give one per turn"
        )
    if score.tokens is not None and len(score.tokens) != num_tokens:
        raise RewardError(
            f"{label} has {num_tokens} response tokens, but its score has {len(score.tokens)} token rewards: "
            "give one per token"
        )


def _checked_path(score: PathScore, label: str) -> PathScore:
    if not isinstance(score, PathScore):
        raise RewardError(f"the score of {label} must be a PathScore, not {type(score).__name__}")
    return PathScore(
        reward=None if score.reward is None else _number(score.reward, f"the reward of {label}"),
        turns=tuple(
            None if reward is None else _number(reward, f"the reward of turn {index} of {label}")
            for index, reward in enumerate(score.turns)
        ),
        tokens=None if score.tokens is None else _tokens(score.tokens, label),
        is_trainable=bool(score.is_trainable),
    )


def _tokens(tokens: FloatArray, label: str) -> FloatArray:
    try:
        array = np.asarray(tokens, np.float32)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the token rewards of {label} must be an array of numbers") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise RewardError(f"the token rewards of {label} must be a one-dimensional array of finite numbers")
    return array


def _named(numbers: Mapping[str, float], kind: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping):
        raise RewardError(f"{kind}s must be a mapping from names to numbers, not {type(numbers).__name__}")
    if len(numbers) > MAX_NAMES:
        raise RewardError(f"the score has {len(numbers)} {kind}s; the maximum is {MAX_NAMES}")
    for name in numbers:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_SCORE_NAME_CHARS:
            raise RewardError(f"the name of a {kind} must be a str of 1 to {MAX_SCORE_NAME_CHARS} characters")
    return {name: _number(value, f"the {kind} {name!r}") for name, value in numbers.items()}


def _number(value: Any, label: str) -> float:
    if not isinstance(value, Real):
        raise RewardError(f"{label} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{label} must be finite, not {number}")
    return number
