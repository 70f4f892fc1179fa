"""Scores: what reward functions, loops, tool sessions and agents say of a trajectory, and how a record takes it.

One number is a score; a `Score` has named components and metrics beside it, and numbers for single turns, paths and
tokens. `scored` is the only place where a score enters a record. It is checked as a whole before that, so that a
record has all of a score or nothing. A trajectory that is not complete is never trained on, whatever its score.
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
"""Components, and likewise metrics, of one trajectory."""

MAX_SCORE_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class PathScore:
    """The score of one path. `turns` has a number or None for each of the path's turns, or nothing.

    `tokens` is one-dimensional, with one reward for each token of the response; those of observed tokens are
    ignored. `is_trainable` can only take a path away from the trainer.
    """

    reward: float | None = None
    turns: tuple[float | None, ...] = ()
    tokens: FloatArray | None = None
    is_trainable: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """A score of one trajectory. All numbers are finite; names have 1 to 128 characters.

    `paths` are named by their place in `Trajectory.paths`, or by the id of their last turn, which is also right
    while a session goes on. Turns are named by `Turn.turn_id`.
    """

    reward: float | None = None  # of the whole; None: this one says nothing of it
    components: Mapping[str, float] = field(default_factory=dict)  # the parts that a reward is made of
    metrics: Mapping[str, float] = field(default_factory=dict)  # numbers to look at, not to train on
    main: PathScore | None = None  # of `Trajectory.path`, the latest path of the main conversation
    paths: Mapping[int | str, PathScore] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    untrainable_turns: tuple[str, ...] = ()  # the paths that have them as their own turns are not trained on

    @property
    def is_empty(self) -> bool:
        """True if it holds no value."""
        return self == _EMPTY

    def updated(self, newer: Score) -> Score:
        """Return this score with a newer one's values over it: numbers of one name or place are replaced."""
        return Score(
            reward=self.reward if newer.reward is None else newer.reward,
            components={**self.components, **newer.components},
            metrics={**self.metrics, **newer.metrics},
            main=self.main if newer.main is None else newer.main,
            paths={**self.paths, **newer.paths},
            turn_rewards={**self.turn_rewards, **newer.turn_rewards},
            untrainable_turns=tuple(dict.fromkeys((*self.untrainable_turns, *newer.untrainable_turns))),
        )

    def joined(self, other: Score) -> Score:
        """Return the values of two independent scores. Raises RewardError for a value in both."""
        pairs = ((self.components, other.components, "component"), (self.metrics, other.metrics, "metric"))
        for mine, theirs, kind in pairs:
            if twice := sorted(mine.keys() & theirs.keys()):
                raise RewardError(f"two scores name the {kind} {twice[0]!r}")
        if self.reward is not None and other.reward is not None:
            raise RewardError("two scores have a reward; let a reward function choose")
        return self.updated(other)


_EMPTY = Score()


def score_of(value: object) -> Score:
    """Return a number or a `Score` as a score. Raises RewardError for anything else.

    Only the type is checked: `resolved` looks at the rest.
    """
    if isinstance(value, Score):
        return value
    if not isinstance(value, Real):
        raise RewardError(f"a reward is a number or a Score, not {type(value).__name__}")
    return Score(reward=_number(value, "a reward"))


def checked(score: Score) -> Score:
    """Return the score with its numbers as floats and its arrays as they are stored. Raises RewardError, one line.

    Nothing is compared with a trajectory: see `resolved`.
    """
    return Score(
        reward=None if score.reward is None else _number(score.reward, "a reward"),
        components=_named(score.components, "component"),
        metrics=_named(score.metrics, "metric"),
        main=None if score.main is None else _checked_path(score.main, "the main path"),
        paths={name: _checked_path(one, f"path {name}") for name, one in score.paths.items()},
        turn_rewards={
            turn_id: _number(reward, f"the reward of turn {turn_id!r}")
            for turn_id, reward in score.turn_rewards.items()
        },
        untrainable_turns=tuple(score.untrainable_turns),
    )


def resolved(score: Score, trajectory: Trajectory) -> Score:
    """Return the score, checked against the trajectory, with turns and paths (by their last turns) named by ids.

    So it can travel, and stays right while a session grows. Raises RewardError, one line, for what does not fit.
    """
    score, paths = checked(score), trajectory.paths
    known = {turn.turn_id for path in paths for turn in path.turns}
    for turn_id in (*score.turn_rewards, *score.untrainable_turns):
        if turn_id not in known:
            raise RewardError(f"there is no turn {str(turn_id)[:MAX_SCORE_NAME_CHARS]!r}")
    places: dict[int | str, int] = {place: place for place in range(len(paths))}
    places |= {path.turns[-1].turn_id: place for place, path in enumerate(paths) if path.turns}
    if unknown := [name for name in score.paths if name not in places]:
        raise RewardError(f"no path of {len(paths)} is {str(unknown[0])[:MAX_SCORE_NAME_CHARS]!r}, or ends with it")
    named = [(places[name], one) for name, one in score.paths.items()]
    if score.main is not None:
        if not paths:
            raise RewardError("there is no main path to score: nothing was rendered")
        named.append((trajectory.main_conversation[-1], score.main))
    turn_rewards, path_scores = dict(score.turn_rewards), dict[int | str, PathScore]()
    for place, one in named:
        path, label = paths[place], f"path {place}"
        _check_lengths(one, path, label)
        pairs = zip(path.turns, one.turns, strict=False)
        turn_rewards.update({turn.turn_id: reward for turn, reward in pairs if reward is not None})
        path_scores[path.turns[-1].turn_id] = replace(one, turns=())
    return replace(score, main=None, paths=path_scores, turn_rewards=turn_rewards)


def scored(trajectory: Trajectory, score: Score) -> Trajectory:
    """Return the trajectory with a score over the one it has. Raises RewardError as `resolved`."""
    if score.is_empty:
        return trajectory
    score = resolved(score, trajectory)
    untrainable = set(score.untrainable_turns)
    return replace(
        trajectory,
        reward=trajectory.reward if score.reward is None else score.reward,
        components={**trajectory.components, **score.components},
        metrics={**trajectory.metrics, **score.metrics},
        paths=tuple(_scored_path(path, score, untrainable) for path in trajectory.paths),
    )


def scored_or_told(trajectory: Trajectory, score: Score) -> Trajectory:
    """Return the trajectory with the score; if that does not fit, with the reason in `reward_error`."""
    try:
        return scored(trajectory, score)
    except RewardError as error:
        problems = (trajectory.reward_error, str(error))
        return replace(trajectory, reward_error="; ".join(problem for problem in problems if problem))


def scored_group(
    group: Sequence[Trajectory], function: Callable[[Sequence[Trajectory]], Sequence[float | Score]]
) -> list[Trajectory]:
    """Return a group with the scores that a function gives its complete trajectories at once, such as ranks.

    Scores are over those that there are. Raises RewardError, also for another number of scores.
    """
    whole = [one for one in group if one.is_complete]
    scores = list(function(whole)) if whole else []
    if len(scores) != len(whole):
        raise RewardError(f"{len(scores)} scores of {len(whole)} complete trajectories")
    left = iter(scores)
    return [scored(one, score_of(next(left))) if one.is_complete else one for one in group]


def ended(trajectory: Trajectory) -> Trajectory:
    """Return a record with `is_truncated` set by its end, and without trainable paths unless it is complete."""
    turns = trajectory.path.turns if trajectory.paths else ()
    is_cut = bool(turns) and turns[-1].finish_reason is not FinishReason.STOP
    paths = trajectory.paths
    if not trajectory.is_complete:
        paths = tuple(replace(path, is_trainable=False) for path in paths)
    return replace(trajectory, paths=paths, is_truncated=is_cut or trajectory.stop_reason in TRUNCATIONS)


def judged(trajectory: Trajectory) -> Trajectory:
    """Return a scored record, without its reward if the infrastructure or a weight update ended it.

    Such a reward describes an unfinished conversation, and would distort its group's baseline.
    """
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
        raise RewardError(f"{label} has no turn to score")
    if score.turns and len(score.turns) != num_turns:
        raise RewardError(f"{label} has {num_turns} turns, its score {len(score.turns)}")
    if score.tokens is not None and len(score.tokens) != num_tokens:
        raise RewardError(f"{label} has {num_tokens} response tokens, its score {len(score.tokens)} token rewards")


def _checked_path(score: PathScore, label: str) -> PathScore:
    if not isinstance(score, PathScore):
        raise RewardError(f"the score of {label} is a PathScore, not {type(score).__name__}")
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
        raise RewardError(f"the token rewards of {label} are no array of numbers") from error
    if array.ndim != 1 or not np.isfinite(array).all():
        raise RewardError(f"the token rewards of {label} are not finite numbers in one row")
    return array


def _named(numbers: Mapping[str, float], kind: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping):
        raise RewardError(f"{kind}s are numbers by name, not {type(numbers).__name__}")
    if len(numbers) > MAX_NAMES:
        raise RewardError(f"{len(numbers)} {kind}s are more than {MAX_NAMES}")
    for name in numbers:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_SCORE_NAME_CHARS:
            raise RewardError(f"the name of a {kind} is a text of 1 to {MAX_SCORE_NAME_CHARS} characters")
    return {name: _number(value, f"the {kind} {name!r}") for name, value in numbers.items()}


def _number(value: Any, label: str) -> float:
    if not isinstance(value, Real):
        raise RewardError(f"{label} is a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{label} is finite, not {number}")
    return number
