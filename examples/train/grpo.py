"""GRPO in plain torch over an agentloop service: the whole trainer, to be read from top to bottom.

The service runs elsewhere (`learn.py` starts one); all that is asked of it goes through `RolloutClient`: tasks in,
trajectories out, weights in, while rollouts are in flight. The trainer does no bookkeeping for asynchrony:
`max_staleness` says how far the service may begin ahead of it, and each sampled token comes with the logprob that
it had under the weights that sampled it. With `max_staleness` 0 the same code is a synchronous trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from agentloop.api.coordinator import UpdateReport
from agentloop.client import Batch, BatchPosition, RolloutClient
from agentloop.types import FloatArray, OnStale, RolloutTask, Trajectory
from agentloop.values.mismatch import Mismatch, mismatch
from agentloop_trainers import TrainingRow, group_rows, teacher_logprobs


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one training run. A step trains on `num_groups` tasks of `group_size` samples each."""

    num_steps: int = 90
    max_s: float | None = None  # the first step that ends later is the last one; needs `over_provision`
    num_groups: int = 16
    group_size: int = 8
    max_staleness: int = 4  # versions that a trained token may be behind; 0: synchronous
    over_provision: float = 0.0  # groups unfinished as a step begins, for each that it takes; 0: as many as may be
    carry: str = "next"  # with it: what becomes of groups that are not whole when a step is, as `Carry` says
    max_replaced: int = 0  # groups with equal rewards that a step may replace, if `over_provision` is set
    loss: str = "ppo"  # or "cispo", or "distill": PPO's, with a teacher's advantages in place of the rewards'
    learning_rate: float = 1e-4
    num_warmup_steps: int = 5  # at least 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    seed: int = 0
    compute: str = "float32"  # or "bfloat16", by autocast; weights and optimizer are those of the model

    @property
    def batch_size(self) -> int:
        """Trajectories of one step."""
        return self.num_groups * self.group_size


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of one step."""

    version: int  # that the step trained
    at_s: float  # since training began, when its weights were live
    wait_s: float  # for trajectories
    train_s: float
    push_s: float
    stall_ms: float  # decoding stood still for the weights
    reward: float
    num_trajectories: int
    num_sampled: int  # tokens, over all trajectories
    num_informative: int  # groups whose rewards differ
    staleness_mean: float  # of the trained rows: versions between their oldest token and the trainer
    staleness_max: int
    num_too_old: int  # rows left out
    loss: float
    grad_norm: float
    mismatch: Mismatch  # of the trainer's logprobs to the recorded ones
    k3_by_lag: dict[str, float]  # k3 by the number of versions between sampling and training
    num_crossed: int  # trajectories with tokens of several versions
    num_replaced: int  # groups without signal that are in no step
    tasks: tuple[str, ...]  # the tasks of the trained groups


@dataclass(slots=True)
class Training:
    """The state of a run that a checkpoint saves with the weights, so that another process can continue it."""

    optimizer: torch.optim.Optimizer
    version: int  # the weights' version in the service
    steps: list[Step] = field(default_factory=list)
    position: str | None = None  # `agentloop.client.Batch.position` after the last trained batch


CHUNK = 4096  # tokens whose logits of the vocabulary are in memory at a time: 2.5 GB for 152,000 ids

TEACHER = "teacher"  # the name of the model beside the policy that "distill" learns from

Taught: TypeAlias = Mapping[TrainingRow, FloatArray]
"""The advantages of each row's masked tokens."""

Prepare = Callable[[list[TrainingRow], torch.nn.Module, int], list[TrainingRow]]
"""A change of a batch's rows before they are trained on, given the model and its version; for ablations."""


def unchanged(rows: list[TrainingRow], model: torch.nn.Module, version: int) -> list[TrainingRow]:
    """Train on what was recorded."""
    return rows


async def train(
    client: RolloutClient,
    model: torch.nn.Module,
    tasks: Iterable[RolloutTask],
    recipe: Recipe,
    on_step: Callable[[Step], None] = lambda step: None,
    prepare: Prepare = unchanged,
    training: Training | None = None,
    after_step: Callable[[], Awaitable[None]] | None = None,
) -> list[Step]:
    """Train `model` in place, and push its weights after each step. Returns the numbers of every step.

    With `training` it continues from that state and updates it; `after_step` may then save a checkpoint.
    """
    if training is None:
        training = Training(optimizer_of(model, recipe), await push_next(client, model))
    optimizer, version, steps = training.optimizer, training.version, training.steps
    ready_at = time.monotonic()
    started_at = ready_at - (steps[-1].at_s if steps else 0.0)

    def is_over() -> bool:
        return recipe.max_s is not None and bool(steps) and steps[-1].at_s >= recipe.max_s

    async for offered in batches(client, tasks, recipe, len(steps), training.position, is_over):
        batch = offered.groups
        got_at = time.monotonic()
        # One row for each token path. Advantage: the reward minus its group's mean. What failed is in neither.
        rows = [row for group in batch for row in group_rows(group)]
        # A group waits for its last sample; what grew too old meanwhile is left out.
        fresh = [row for row in rows if version - row.oldest_version <= recipe.max_staleness]
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1, (len(steps) + 1) / recipe.num_warmup_steps)
        prepared = prepare(fresh, model, version)
        taught = await taught_by(TEACHER, prepared, client) if recipe.loss == "distill" else None
        numbers = await asyncio.to_thread(train_step, model, optimizer, prepared, recipe, taught)
        trained_at = time.monotonic()
        version += 1
        report = await client.update_weights(model.named_parameters(), version=version)
        now = time.monotonic()
        times = {"at_s": now - started_at, "wait_s": got_at - ready_at, "train_s": trained_at - got_at}
        times |= {"push_s": now - trained_at, "stall_ms": report.stall_ms}
        ages = [version - 1 - row.oldest_version for row in fresh] or [0]
        aged = {"staleness_mean": float(np.mean(ages)), "staleness_max": max(ages)}
        aged |= {"num_too_old": len(rows) - len(fresh)}
        by_version = numbers.pop("k3_by_version")
        numbers["k3_by_lag"] = {str(version - 1 - sampled): k3 for sampled, k3 in by_version.items()}
        numbers |= {"num_replaced": offered.num_replaced, "tasks": tuple(group[0].task_id for group in batch)}
        steps.append(Step(version=version, **times, **aged, **describe(batch), **numbers))
        training.version, training.position = version, offered.position
        on_step(steps[-1])
        if after_step is not None:
            await after_step()
        ready_at = time.monotonic()
    return steps


def optimizer_of(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a run."""
    return torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


async def taught_by(model: str, rows: Sequence[TrainingRow], client: RolloutClient) -> Taught:
    """On-policy distillation: a token's advantage is how much likelier the teacher finds it than the policy did."""
    found = await teacher_logprobs(rows, client, model=model)
    return {row: (logprobs - row.logprobs)[row.mask] for row, logprobs in zip(rows, found, strict=True)}


async def push_next(client: RolloutClient, model: torch.nn.Module) -> int:
    """Make the model's weights the next version of the service, and return it."""
    version = (await client.status()).weight_version
    report: UpdateReport = await client.update_weights(
        model.named_parameters(), version=0 if version is None else version + 1
    )
    return report.version


async def batches(
    client: RolloutClient,
    tasks: Iterable[RolloutTask],
    recipe: Recipe,
    num_done: int = 0,
    resume: str | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Batch]:
    """Yield complete groups, `num_groups` at a time, until `is_over`.

    `resume` is the position after `num_done` steps.
    """
    limit: dict[str, Any] = {"max_staleness": recipe.max_staleness, "on_stale": OnStale.MASK}
    if recipe.over_provision:
        sizes: dict[str, Any] = {"num_groups": recipe.num_groups, "num_samples": recipe.group_size}
        offer: dict[str, Any] = {"over_provision": recipe.over_provision, "carry": recipe.carry}
        offer |= {"max_replaced": recipe.max_replaced, "resume": resume, "cancel_on_close": False}
        async with aclosing(client.batches(tasks, **sizes, **offer, **limit)) as steps:
            for _ in range(num_done, recipe.num_steps):
                if is_over():
                    break
                if (step := await anext(steps, None)) is None:
                    return
                resume = step.position
                yield step
        # The last step is trained. After an interruption the unfinished groups continue, for the next process.
        for part in BatchPosition.decode(resume).parts if resume else ():
            await client.cancel(part.rollout_id)
        return
    # All tasks of the run at once: the service holds back what would be too old when it is its turn.
    rollout = await client.submit(
        list(islice(tasks, recipe.num_steps * recipe.num_groups)),
        num_samples=recipe.group_size,
        trajectories_per_version=recipe.batch_size,
        **limit,
    )
    batch: list[Sequence[Trajectory]] = []
    async for group in rollout.groups():
        batch.append(group)
        if len(batch) == recipe.num_groups:
            yield Batch(0, tuple(batch), (), 0)
            batch = []


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[TrainingRow],
    recipe: Recipe,
    taught: Taught | None = None,
) -> dict[str, Any]:
    """Take an optimizer step on the mean over all sampled tokens. Rows without an advantage add nothing.

    `taught` has advantages of single tokens in place of the rows'.
    """
    device = next(model.parameters()).device
    if taught is None:
        rows = [row for row in rows if row.advantage != 0.0]
        taught = {row: np.full(row.mask.sum(), row.advantage, np.float32) for row in rows}
    num_tokens = sum(int(row.mask.sum()) for row in rows)
    total, recorded, trained = 0.0, [np.empty(0)], [np.empty(0)]
    versions = [np.empty(0, np.int32)]
    optimizer.zero_grad()
    for group in by_prompt(rows):
        sampled_with = torch.from_numpy(np.concatenate([row.logprobs[row.mask] for row in group])).to(device)
        advantages = torch.from_numpy(np.concatenate([taught[row] for row in group])).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.compute == "bfloat16"):
            logprobs = logprobs_of(model, group)
        loss = token_losses(logprobs, sampled_with, advantages, recipe).sum() / num_tokens
        loss.backward()
        total += loss.item()
        recorded.append(sampled_with.numpy(force=True))
        trained.append(logprobs.numpy(force=True))
        versions += [row.versions[row.mask] for row in group]
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    if rows and torch.isfinite(grad_norm):  # otherwise every weight would become NaN
        optimizer.step()
    old, new, sampled_by = np.concatenate(recorded), np.concatenate(trained), np.concatenate(versions)
    found = mismatch(old, new, clip_range=(recipe.clip_low, recipe.clip_high))
    k3 = {int(one): mismatch(old, new, sampled_by == one).k3_kl for one in np.unique(sampled_by)}
    return {"loss": total, "grad_norm": float(grad_norm), "mismatch": found, "k3_by_version": k3}


def token_losses(
    logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """The loss of each token, given the trainer's logprobs and those recorded when it was sampled.

    PPO-clip (arXiv 1707.06347) with the wider upper range of DAPO (2503.14476), or CISPO (2506.13585), which clips
    the weight and lets every token keep its gradient.
    """
    ratio = (logprobs - recorded).exp()
    if recipe.loss == "cispo":
        return -ratio.detach().clamp(max=1 + recipe.clip_high) * advantages * logprobs
    clipped = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def logprobs_of(model: Any, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """Logprobs of the masked tokens of rows that share one prompt, one row after the other; differentiable.

    The prompt is read once for all rows, as a prefix cache does; most tokens of a batch of groups are prompts.
    """
    device, num_prompt = next(model.parameters()).device, rows[0].num_prompt
    prompt = torch.from_numpy(rows[0].input_ids[:num_prompt]).long().to(device)
    ids = pad_sequence([torch.from_numpy(row.input_ids[num_prompt:]) for row in rows], batch_first=True).long()
    mask = pad_sequence([torch.from_numpy(row.mask[num_prompt:]) for row in rows], batch_first=True).to(device)
    ids = ids.to(device)
    read = model.model(prompt[None], use_cache=True)
    read.past_key_values.batch_repeat_interleave(len(rows))
    states = [read.last_hidden_state[:, -1:].expand(len(rows), -1, -1)]
    if ids.shape[1] > 1:  # models refuse an empty input, after responses of one token
        response = model.model(ids[:, :-1], past_key_values=read.past_key_values, use_cache=True)
        states.append(response.last_hidden_state)
    hidden = torch.cat(states, dim=1)[mask]
    parts = list(zip(hidden.split(CHUNK), ids[mask].split(CHUNK), strict=True))
    if len(parts) == 1:
        return head_logprobs(model, *parts[0])
    # The logits of a chunk are computed again in the backward pass, so that only one chunk's are in memory.
    return torch.cat([checkpoint(head_logprobs, model, *part, use_reentrant=False) for part in parts])


def head_logprobs(model: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of the ids that follow the hidden states."""
    return model.lm_head(hidden).float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def by_prompt(rows: Sequence[TrainingRow]) -> Iterable[list[TrainingRow]]:
    """Rows that share a prompt: a group's, and apart from them those of each path with a prompt of its own."""
    shared: dict[bytes, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        shared[row.input_ids[: row.num_prompt].tobytes()].append(row)
    return shared.values()


def describe(batch: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """What a batch says of the policies that sampled it."""
    rewards = [[one.reward for one in group if one.reward is not None] for group in batch]
    return {
        "reward": float(np.mean(list(chain.from_iterable(rewards)) or [0.0])),
        "num_trajectories": sum(map(len, batch)),
        "num_sampled": sum(one.num_sampled_tokens for group in batch for one in group),
        "num_crossed": sum(len(one.trained_versions) > 1 for group in batch for one in group),
        "num_informative": sum(len(set(group)) > 1 for group in rewards),
    }


async def evaluate(client: RolloutClient, tasks: Sequence[RolloutTask], num_samples: int) -> dict[str, float]:
    """The mean reward of each task under the weights that the service holds; ahead of all training."""
    rewards: dict[str, list[float]] = defaultdict(list)
    async for trajectory in await client.submit(tasks, num_samples=num_samples, priority=1):
        if trajectory.reward is not None:
            rewards[trajectory.task_id].append(trajectory.reward)
    return {task_id: float(np.mean(found)) for task_id, found in rewards.items()}


def paired(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """The mean difference over tasks, and its standard error: tasks differ more than samples of one task do."""
    differences = np.array([after[task_id] - before[task_id] for task_id in before.keys() & after.keys()])
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(len(differences)))
