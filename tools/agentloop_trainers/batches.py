"""Training rows of a group's finished trajectories: token ids, loss mask, logprobs, versions and advantages.

A row is one token path. A trajectory with branches has several rows, and every sampled token is in the mask of at
most one of them. A trajectory without a reward (a failure of the infrastructure, a cancellation, or too much
staleness) has no row and does not count for the baseline, because it does not measure the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agentloop.types import BoolArray, FloatArray, IntArray, TokenPath, Trajectory
from agentloop.values.aux_rows import Values

NO_VERSION = -1
"""The value in `TrainingRow.versions` for tokens that were not sampled."""

_STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One token path of a scored trajectory. All arrays have shape (prompt and response tokens,).

    `mask` is True for trained tokens. `logprobs` (nats) are those of the policy that sampled the token, and 0 for
    tokens that were not sampled. `versions` are the weight versions that sampled the tokens.

    `routed_experts` and `sampling_mask` are those of `TokenPath`; the mask's ends have an entry for each prompt
    token, too. The last positions have no experts: a trainer that replays them lets its own router choose there,
    because no trained token's logits depend on these positions.
    """

    group_id: str
    task_id: str
    sample_index: int
    place: int  # index of the path in its trajectory
    num_prompt: int
    input_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    reward: float
    advantage: float
    weight: float  # see `group_rows`
    routed_experts: Values | None = None
    sampling_mask: tuple[IntArray, IntArray] | None = None

    @property
    def oldest_version(self) -> int:
        """The oldest weight version of the tokens in the mask."""
        return int(self.versions[self.mask].min())

    @property
    def newest_version(self) -> int:
        """The newest weight version of the tokens in the mask."""
        return int(self.versions[self.mask].max())


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Sums over the trajectories of a group, from which a trainer computes rates for its log.

    `num_wasted_tokens` is the number of sampled tokens without a row, because their trajectory failed, or because
    they are too stale or untrainable.
    """

    num_trajectories: int
    num_scored: int
    num_succeeded: int  # scored, with a reward above 0
    num_mixed: int  # scored, with trained tokens of several weight versions
    num_truncated: int  # scored, and truncated by a limit
    num_stale_attempts: int  # earlier attempts that were dropped for staleness
    reward_sum: float
    reward_std: float  # over the scored trajectories
    staleness_sum: int  # over the scored trajectories, each at its end
    staleness_max: int
    num_sampled_tokens: int
    num_wasted_tokens: int


def is_scored(trajectory: Trajectory) -> bool:
    """Return True if a trajectory can be used for training: it ended regularly or at a limit, and has a reward."""
    return trajectory.is_sound and (trajectory.reward is not None or bool(trajectory.agent_rewards))


def group_rows(
    trajectories: Sequence[Trajectory],
    *,
    divides_by_std: bool = False,
    weights: Literal["per_token", "per_trajectory"] = "per_token",
) -> list[TrainingRow]:
    """Return the rows of one group, in the order of its agents, trajectories and paths.

    The advantage of a path is its reward (`Trajectory.reward_of`) minus the mean reward of the scored trajectories,
    as in GRPO. With `divides_by_std` it is divided by their standard deviation, as in DeepSeekMath
    (arXiv:2402.03300) but not in Dr. GRPO (arXiv:2503.20783). Paths without a reward, with an empty mask, or not
    trainable are omitted. In a loop of several agents each agent has its own baseline.

    The group's loss is the sum over its rows of `weight` times the sum of the row's token losses. The weights of
    all trained tokens sum to 1. With `per_token` every token has the weight 1 / (trained tokens of the group).
    With `per_trajectory` it has the weight 1 / (trajectories with rows x trained tokens of its trajectory), so that
    a trajectory with many paths counts as much as one with a single path.
    """
    scored = [trajectory for trajectory in trajectories if is_scored(trajectory)]
    rows = [row for name in _agents_of(scored) for row in _agent_rows(scored, name, divides_by_std=divides_by_std)]
    num_tokens = Counter[int]()  # by sample
    for row in rows:
        num_tokens[row.sample_index] += int(row.mask.sum())
    if weights == "per_token":
        return [replace(row, weight=1 / num_tokens.total()) for row in rows]
    return [replace(row, weight=1 / (len(num_tokens) * num_tokens[row.sample_index])) for row in rows]


def _agents_of(trajectories: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(name for trajectory in trajectories for name in trajectory.agents))


def _agent_rows(scored: Sequence[Trajectory], agent: str, *, divides_by_std: bool) -> list[TrainingRow]:
    """Return the rows of one agent of the trajectories. Its own rewards are the baseline."""
    # A sample without paths is a failure of the main agent: the others had not started.
    own = [one for one in scored if agent in one.agents or (not one.paths and not agent)]
    rewards = [trajectory.agent_rewards.get(agent, trajectory.reward) for trajectory in own]
    known = np.array([reward for reward in rewards if reward is not None], np.float64)
    if not known.size:
        return []
    baseline = float(known.mean())
    scale = float(known.std()) + _STD_FLOOR if divides_by_std else 1.0
    rows = []
    for trajectory in scored:
        for place, (path, reward) in enumerate(zip(trajectory.paths, trajectory.path_rewards, strict=True)):
            if path.agent == agent and reward is not None and path.is_trainable and path.response_mask.any():
                rows.append(_row(trajectory, place, reward, (reward - baseline) / scale))
    return rows


def count_group(trajectories: Sequence[Trajectory], rows: Sequence[TrainingRow]) -> GroupCounts:
    """Return the sums over a group's trajectories. `rows` are the result of `group_rows`."""
    scored = [trajectory for trajectory in trajectories if is_scored(trajectory)]
    rewards = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    staleness = [trajectory.staleness or 0 for trajectory in scored]
    num_sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return GroupCounts(
        num_trajectories=len(trajectories),
        num_scored=len(scored),
        num_succeeded=sum(reward > 0 for reward in rewards),
        num_mixed=sum(_is_mixed(trajectory) for trajectory in scored),
        num_truncated=sum(trajectory.is_truncated for trajectory in scored),
        num_stale_attempts=sum(trajectory.num_stale_attempts for trajectory in trajectories),
        reward_sum=float(sum(rewards)),
        reward_std=float(np.std(rewards)) if rewards else 0.0,
        staleness_sum=sum(staleness),
        staleness_max=max(staleness, default=0),
        num_sampled_tokens=num_sampled,
        num_wasted_tokens=num_sampled - sum(int(row.mask.sum()) for row in rows),
    )


def versions_of(path: TokenPath) -> IntArray:
    """Return the weight version of every prompt and response token; NO_VERSION for tokens that were not sampled."""
    num_prompt = len(path.prompt_ids)
    versions = np.full(num_prompt + len(path.response_ids), NO_VERSION, np.int32)
    for span in path.weight_versions:
        versions[num_prompt + span.start : num_prompt + span.end] = span.version
    return versions


def _row(trajectory: Trajectory, place: int, reward: float, advantage: float) -> TrainingRow:
    path = trajectory.paths[place]
    num_prompt, mask = len(path.prompt_ids), path.sampling_mask
    return TrainingRow(
        group_id=trajectory.group_id,
        task_id=trajectory.task_id,
        sample_index=trajectory.sample_index,
        place=place,
        num_prompt=num_prompt,
        input_ids=np.concatenate([path.prompt_ids, path.response_ids]),
        mask=np.concatenate([np.zeros(num_prompt, np.bool_), path.response_mask]),
        logprobs=np.concatenate([np.zeros(num_prompt, np.float32), path.logprobs]),
        versions=versions_of(path),
        reward=reward,
        advantage=advantage,
        weight=1.0,
        routed_experts=path.routed_experts,
        sampling_mask=None
        if mask is None
        else (mask[0], np.concatenate([np.zeros(num_prompt, np.int32), mask[1]])),
    )


def _is_mixed(trajectory: Trajectory) -> bool:
    return len(trajectory.trained_versions) > 1
