"""Adapters for TRL's trainers: `AsyncRollouts` for `AsyncGRPOTrainer`, `SyncRollouts` for `GRPOTrainer`.

    rollouts = AsyncRollouts(url, tasks, num_generations=8, max_staleness=4)
    trainer = AsyncGRPOTrainer(
        model=DIR, args=AsyncGRPOConfig(max_staleness=4, token_budget=8192), train_dataset=rollouts.dataset(),
        rollout_worker=rollouts, weight_transfer=rollouts,
    )

TRL 1.16 defines the interfaces `RolloutWorkerProtocol` and `WeightTransferProtocol` in
`trl/experimental/async_grpo/async_grpo_trainer.py`, and `rollout_func` of `GRPOTrainer`. TRL itself is not
imported. The service samples, runs the tools and rewards, and limits the staleness; TRL computes the loss.

Tasks must be sampled at the temperature by which TRL divides its logits (`args.temperature`), and without top_p,
top_k and min_p (`docs/guides/distribution.md`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import queue
import random
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from agentloop.client.client import RolloutClient
from agentloop.client.rollout import Rollout
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest, error_line, first_cause
from agentloop.types import FloatArray, Message, OnStale, RolloutTask, Trajectory
from agentloop.values.endings import FailureClass
from agentloop_trainers.batches import GroupCounts, TrainingRow, count_group, group_rows, is_scored
from agentloop_trainers.service_link import ServiceLink

OnGroup: TypeAlias = Callable[[Sequence[Trajectory], Sequence[TrainingRow]], None]
"""Called with each finished group and its rows, before TRL receives the rows."""

Metric: TypeAlias = float | tuple[float, float]
"""A value for TRL's log: a number, or a rate as numerator and denominator."""

_BUFFER_ROWS = 1024
_METRICS = 4096  # groups between two logs of TRL; the oldest are dropped
_POLL_S = 0.05
_LANES = 4  # concurrent rollouts: new ones start while the slowest groups of others finish
_CANCEL_TIMEOUT_S = 20.0
_MIN_FAILED = 16  # the run stops after at least this many consecutive failed trajectories

_log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True, eq=False)
class BufferedRow:
    """A row with the fields of TRL 1.16's `RolloutSample`, whose import takes seconds.

    All arrays have equal length.
    """

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: FloatArray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None  # Unix time in seconds


class AsyncRollouts:
    """Rollouts and weight pushes for `AsyncGRPOTrainer`. Pass it as both `rollout_worker` and `weight_transfer`.

    `tasks` are rolled out in repeated passes, each shuffled (`seed`), with `num_generations` samples per task. At
    most `groups_in_flight` groups are unfinished, and at most `_BUFFER_ROWS` rows wait for the trainer; then no
    further groups are submitted.

    `on_stale` applies to trajectories that are more than `max_staleness` versions older than the fleet. Set the
    same `max_staleness` in TRL's config, which drops rows that became stale in the buffer. The `model_version` of a
    row is that of its oldest trained token. A restarted trainer with the same `run_id` shares the staleness budget
    with the trajectories of its predecessor that still run.

    `divides_by_std` selects TRL's definition of the advantage. `check_health` raises the errors of the service.
    """

    def __init__(
        self,
        url: str,
        tasks: Sequence[RolloutTask],
        *,
        num_generations: int = 8,
        groups_in_flight: int = 16,
        max_staleness: int = 4,
        on_stale: OnStale = OnStale.MASK,
        trajectories_per_version: int | None = None,
        divides_by_std: bool = False,
        run_id: str | None = None,
        seed: int = 0,
        api_key: str | None = None,
        admin_key: str | None = None,
        listen_host: str | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        """Raises InvalidRequest for no tasks, tasks with different temperatures, and groups of one sample."""
        _check(tasks)
        if num_generations < 2 or groups_in_flight < 1:
            raise InvalidRequest(
                f"num_generations must be at least 2 and groups_in_flight at least 1, not {num_generations} and "
                f"{groups_in_flight}"
            )
        # The rollout waits for the trainer.
        self.rollout_buffer: queue.Queue[BufferedRow] = queue.Queue(_BUFFER_ROWS)
        self.metrics_queue: queue.Queue[dict[str, Metric]] = queue.Queue(_METRICS)
        self._link = ServiceLink(url, api_key=api_key, admin_key=admin_key, listen_host=listen_host)
        self._tasks = tuple(tasks)
        self._num_generations = num_generations
        self._num_in_lane = -(-groups_in_flight // _LANES)
        self._num_lanes = -(-groups_in_flight // self._num_in_lane)
        self._submit_options: dict[str, Any] = {
            "num_samples": num_generations,
            "max_staleness": max_staleness,
            "on_stale": on_stale,
            "trajectories_per_version": trajectories_per_version,
            "run_id": run_id or f"trl-{uuid.uuid4().hex[:16]}",
        }
        self._divides_by_std = divides_by_std
        self._order = _passes(self._tasks, seed)
        self._on_group = on_group
        self._version_offset = 0  # the service's version minus TRL's
        self._num_groups = 0  # groups emitted so far: TRL numbers its groups from 0
        self._num_failed = 0  # consecutive failed trajectories
        self._work: concurrent.futures.Future[None] | None = None
        self._running: asyncio.Task[None] | None = None  # the task of `_work` on the link's loop
        self._rollouts: dict[int, Rollout] = {}  # in flight, by lane
        self._row_at = 0.0  # monotonic time of the last row
        self._last_failure = ""

    @property
    def run_id(self) -> str:
        """The id of this run's staleness budget in the service."""
        return str(self._submit_options["run_id"])

    @property
    def version(self) -> int | None:
        """The service's version of the last pushed weights; None before the first push."""
        return self._link.version

    def dataset(self) -> Any:
        """Return TRL's `train_dataset`. Only its length is used, for an epoch; its prompts are not sampled."""
        return _dataset(self._tasks)

    # Methods of RolloutWorkerProtocol

    def start(self) -> None:
        """Start the rollouts, also after `stop`. TRL calls it after the first weight push."""
        if self._work is None:
            self._link.open()
            self._num_failed, self._row_at = 0, time.monotonic()
            self._work = self._link.start(self._roll_out)

    def stop(self) -> None:
        """Cancel running rollouts and discard the buffered rows. Idempotent. `start` starts again."""
        work, self._work = self._work, None
        if work is None:
            return
        work.cancel()
        try:
            self._link.call(self._cancel_rollouts, _CANCEL_TIMEOUT_S)
        except AgentLoopError as error:  # they end on their own, and their records are not read
            _log.warning("rollouts_not_cancelled", url=self._link.url, error=error_line(error))
        with contextlib.suppress(queue.Empty):
            while True:
                self.rollout_buffer.get_nowait()

    def update_model_version(self, model_version: int) -> None:
        """Store TRL's version number of the last pushed weights."""
        if self._link.version is not None:
            self._version_offset = self._link.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the rollouts, or DeadlineExceeded if there was no row for `stale_after_s`.

        The message of DeadlineExceeded has the reason that the service makes no progress.
        """
        work = self._work
        if work is None:
            raise InvalidRequest("the rollouts are not started: call start() first")
        if work.done():
            failure = None if work.cancelled() else work.exception()
            error = None if failure is None else first_cause(failure)
            if isinstance(error, AgentLoopError):
                raise error
            raise AgentLoopError(
                f"the rollouts have ended: {error_line(error) if error else 'cancelled'}"
            ) from error
        age_s = time.monotonic() - self._row_at
        if age_s > stale_after_s:
            failed = f"; {self._num_failed} trajectories failed, the last: {self._last_failure}"
            raise DeadlineExceeded(
                f"no row for {age_s:.0f} s from {self._link.url}: {self._link.unavailable()}"
                + (failed if self._num_failed else "")
            )

    # Methods of WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Connect to the service."""
        self._link.open()

    def pause(self) -> None:
        """Do nothing: the service stages an update while it decodes, and pauses its engines for the weight swap."""

    def send_weights(self, iterator: Iterable[tuple[str, object]]) -> None:
        """Push the tensors as the service's next version. Raises the errors of `ServiceLink.push`."""
        report = self._link.push(iterator)
        self._log({"weights/stall_s": report.stall_ms / 1000, "weights/update_s": report.total_ms / 1000})

    def resume(self) -> None:
        """Do nothing, like `pause`."""

    def destroy(self) -> None:
        """Stop the rollouts and close the connection. Idempotent."""
        self.stop()
        self._link.close()

    # The methods below run on the link's event loop.

    async def _roll_out(self, client: RolloutClient) -> None:
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as lanes:
            for lane in range(self._num_lanes):
                lanes.create_task(self._run_lane(lane, client))

    async def _run_lane(self, lane: int, client: RolloutClient) -> None:
        while True:
            tasks = [next(self._order) for _ in range(self._num_in_lane)]
            rollout = await client.submit(tasks, **self._submit_options)
            self._rollouts[lane] = rollout
            async for group in rollout.groups():
                await self._emit(group)
            await rollout.acknowledge()  # all rows are in the buffer or with the trainer
            del self._rollouts[lane]

    async def _cancel_rollouts(self, client: RolloutClient) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])  # it is being cancelled: wait until it adds no more rows
        rollouts = list(self._rollouts.values())
        self._rollouts.clear()
        await asyncio.gather(*(rollout.cancel() for rollout in rollouts))

    async def _emit(self, group: Sequence[Trajectory]) -> None:
        rows = group_rows(group, divides_by_std=self._divides_by_std)
        counts = count_group(group, rows)
        self._watch_failures(group)
        if self._on_group is not None:
            self._on_group(group, rows)
        by_sample = {trajectory.sample_index: trajectory for trajectory in group}
        began_at = time.monotonic()
        for row in rows:
            trajectory = by_sample[row.sample_index]
            sample = BufferedRow(
                **_messages(trajectory.paths[row.place].messages),
                input_ids=row.input_ids.astype(np.int64),
                completion_mask=row.mask.astype(np.int64),
                old_log_probs=row.logprobs,
                advantage=row.advantage,
                model_version=row.oldest_version - self._version_offset,
                group_id=self._num_groups,
                metrics=_sample_metrics(trajectory, row, counts),
                enqueued_at=time.time(),
            )
            await self._put(sample)
            self._row_at = time.monotonic()
        self._num_groups += 1
        self._log({**group_metrics(counts), "rollout/backpressure_s": time.monotonic() - began_at})

    async def _put(self, sample: BufferedRow) -> None:
        while True:
            try:
                self.rollout_buffer.put_nowait(sample)
            except queue.Full:
                await asyncio.sleep(_POLL_S)
            else:
                return

    def _watch_failures(self, group: Sequence[Trajectory]) -> None:
        """Count consecutive failures.

        Raises AgentLoopError after too many, since further waiting would not help.
        """
        for trajectory in group:
            if is_scored(trajectory):
                self._num_failed = 0
            elif trajectory.failure is not FailureClass.STALE:  # staleness passes, other failures may not
                self._num_failed += 1
                self._last_failure = _failure(trajectory)
        if self._num_failed >= max(_MIN_FAILED, 2 * self._num_generations):
            raise AgentLoopError(
                f"{self._num_failed} consecutive trajectories failed; the last one, of task {group[-1].task_id!r}: "
                f"{self._last_failure}"
            )

    def _log(self, metrics: dict[str, Metric]) -> None:
        if self.metrics_queue.full():
            with contextlib.suppress(queue.Empty):
                self.metrics_queue.get_nowait()
        with contextlib.suppress(queue.Full):
            self.metrics_queue.put_nowait(metrics)


class SyncRollouts:
    """The `rollout_func` of `GRPOTrainer`: trajectories of the service, sampled with the current step's weights.

        rollouts = SyncRollouts(url, tasks)
        trainer = GRPOTrainer(model=DIR, args=GRPOConfig(...), train_dataset=rollouts.dataset(),
                              rollout_func=rollouts, reward_funcs=rollouts.reward)
        rollouts.attach(trainer)
        trainer.train()

    `attach` is required: without it, TRL ignores the logprobs of a `rollout_func` (all ratios are 1) and never
    pushes weights. TRL accepts one completion per prompt: of a trajectory with branches, it receives the latest
    path of the main conversation, and the other paths count as wasted tokens. `AsyncRollouts` trains all paths.
    """

    __name__ = "agentloop"

    def __init__(
        self,
        url: str,
        tasks: Sequence[RolloutTask],
        *,
        timeout_s: float = 3600.0,
        api_key: str | None = None,
        admin_key: str | None = None,
        listen_host: str | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        """`timeout_s` is the timeout of one step's rollout.

        Raises InvalidRequest if two tasks have equal messages.
        """
        _check(tasks)
        self._link = ServiceLink(url, api_key=api_key, admin_key=admin_key, listen_host=listen_host)
        self._tasks = {_prompt_key(_prompt(task)): task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise InvalidRequest(
                "two tasks have the same messages: TRL identifies tasks by their prompts; make them differ",
                param="tasks",
            )
        self._timeout_s = timeout_s
        self._on_group = on_group

    def dataset(self) -> Any:
        """Return TRL's `train_dataset`, with one prompt per task."""
        return _dataset(tuple(self._tasks.values()))

    def attach(self, trainer: Any) -> None:
        """Make TRL use the recorded logprobs and push weights before each rollout. Call it before `train`.

        It sets TRL's `use_vllm` after the construction, because a trainer constructed with `use_vllm` would connect
        to a vLLM server. Raises InvalidRequest for a trainer with a different temperature, or that trains an
        adapter.
        """
        temperature = next(iter(self._tasks.values())).temperature
        if trainer.temperature != temperature:
            raise InvalidRequest(
                f"TRL divides logits by {trainer.temperature:g}, but the tasks are sampled at temperature "
                f"{temperature:g}: use equal values",
                param="temperature",
            )
        if hasattr(trainer.model, "peft_config"):
            raise InvalidRequest(
                "a trainer with an adapter is not supported: push adapters with RolloutClient.update_adapter",
                param="trainer",
            )
        self._link.open()
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: self._push(trainer))

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Roll out each prompt once. Equal prompts are the samples of one group. Blocks.

        Returns lists in the order of `prompts`: prompt_ids, completion_ids, logprobs, env_mask and
        agentloop_reward. The reward of a failed trajectory is None, so that TRL excludes it from the baseline.
        """
        indexes: dict[str, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            indexes[_prompt_key(prompt)].append(index)
        if unknown := indexes.keys() - self._tasks.keys():
            raise InvalidRequest(f"no task has this prompt: {min(unknown)[:200]}", param="prompts")

        async def roll_out(client: RolloutClient) -> list[tuple[str, Sequence[Trajectory]]]:
            return [group async for group in self._groups(client, indexes)]

        try:
            groups = self._link.call(roll_out, self._timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error.message}: {self._link.unavailable()}") from error
        eos_id = int(trainer.processing_class.eos_token_id)
        rows = {index: row for key, group in groups for index, row in self._placed(indexes[key], group, trainer)}
        columns = [_completion(rows.get(index), eos_id) for index in range(len(prompts))]
        return {name: [column[name] for column in columns] for name in columns[0]}

    def reward(self, completions: Sequence[Any], agentloop_reward: Sequence[float | None], **_: Any) -> list[Any]:
        """Return the rewards of the trajectories, as TRL's `reward_funcs`."""
        return list(agentloop_reward)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close()

    async def _groups(
        self, client: RolloutClient, indexes: Mapping[str, Sequence[int]]
    ) -> AsyncIterator[tuple[str, Sequence[Trajectory]]]:
        keys_of: dict[int, list[str]] = defaultdict(list)  # by group size, because a submit has only one
        for key, prompt_indexes in indexes.items():
            keys_of[len(prompt_indexes)].append(key)
        for num_samples, keys in keys_of.items():
            by_task = {self._tasks[key].task_id: key for key in keys}
            rollout = await client.submit([self._tasks[key] for key in keys], num_samples=num_samples)
            try:
                async for group in rollout.groups():
                    yield by_task[group[0].task_id], group
            except BaseException:
                with contextlib.suppress(AgentLoopError, TimeoutError):
                    async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                        await rollout.cancel()
                raise

    def _placed(
        self, indexes: Sequence[int], group: Sequence[Trajectory], trainer: Any
    ) -> Iterator[tuple[int, TrainingRow]]:
        """Yield pairs of a prompt's index and its row. Samples without a row are omitted."""
        last = {trajectory.sample_index: trajectory.final_path for trajectory in group if trajectory.paths}
        rows = [row for row in group_rows(group) if row.place == last[row.sample_index]]
        if self._on_group is not None:
            self._on_group(group, rows)
        log = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in group_metrics(count_group(group, rows)).items():
            if not isinstance(value, tuple):
                log[name].append(float(value))
            elif value[1]:
                log[name].append(value[0] / value[1])
        for row in rows:
            yield indexes[row.sample_index], row

    def _push(self, trainer: Any) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        tensors = [
            (name, own.full_tensor() if hasattr(own, "full_tensor") else own.detach())  # a collective: on all ranks
            for name, own in model.named_parameters()
        ]
        if trainer.accelerator.is_main_process:
            report = self._link.push(tensors)
            trainer._metrics["train"]["weights/stall_s"].append(report.stall_ms / 1000)
            trainer._metrics["train"]["weights/update_s"].append(report.total_ms / 1000)
        trainer.accelerator.wait_for_everyone()


def group_metrics(counts: GroupCounts) -> dict[str, Metric]:
    """Return a group's metrics for TRL's log. TRL sums the pairs of a rate over its window before it divides."""
    scored = counts.num_scored
    return {
        "rollout/reward": (counts.reward_sum, scored),
        "rollout/success": (counts.num_succeeded, scored),
        "rollout/staleness": (counts.staleness_sum, scored),
        "rollout/staleness_max": float(counts.staleness_max),
        "rollout/mixed_version_share": (counts.num_mixed, scored),
        "rollout/truncated_share": (counts.num_truncated, scored),
        "rollout/failed_share": (counts.num_trajectories - scored, counts.num_trajectories),
        "rollout/wasted_token_share": (counts.num_wasted_tokens, counts.num_sampled_tokens),
        "rollout/sampled_tokens_total": float(counts.num_sampled_tokens),
        "rollout/wasted_tokens_total": float(counts.num_wasted_tokens),
        "rollout/stale_attempts_total": float(counts.num_stale_attempts),
    }


def _sample_metrics(trajectory: Trajectory, row: TrainingRow, counts: GroupCounts) -> dict[str, float]:
    """Return a row's rewards under TRL's metric names."""
    parts = {f"rewards/{name}": float(value) for name, value in trajectory.components.items()}
    return {"reward": row.reward, "reward_std": counts.reward_std, **parts}


def _completion(row: TrainingRow | None, eos_id: int) -> dict[str, Any]:
    """Return a row as a completion of `GRPOTrainer`; without a row, a completion without trained tokens."""
    if row is None:
        return {
            "prompt_ids": [eos_id],
            "completion_ids": [eos_id],
            "logprobs": [0.0],
            "env_mask": [0],
            "agentloop_reward": None,
        }
    return {
        "prompt_ids": row.input_ids[: row.num_prompt].tolist(),
        "completion_ids": row.input_ids[row.num_prompt :].tolist(),
        "logprobs": row.logprobs[row.num_prompt :].tolist(),
        "env_mask": row.mask[row.num_prompt :].astype(int).tolist(),
        "agentloop_reward": row.reward,
    }


def _check(tasks: Sequence[RolloutTask]) -> None:
    if not tasks:
        raise InvalidRequest("tasks is empty: give at least one task", param="tasks")
    if len({task.task_id for task in tasks}) < len(tasks):
        raise InvalidRequest("a task id occurs twice: the ids of tasks must be unique", param="tasks")
    if len({task.temperature for task in tasks}) > 1:
        raise InvalidRequest(
            "the tasks have different temperatures, but TRL divides all logits by one temperature: use equal ones",
            param="temperature",
        )


def _passes(tasks: Sequence[RolloutTask], seed: int) -> Iterator[RolloutTask]:
    """Yield the tasks in infinitely many passes, each in a new random order."""
    order, chance = list(tasks), random.Random(seed)
    while True:
        chance.shuffle(order)
        yield from order


def _dataset(tasks: Sequence[RolloutTask]) -> Any:
    from datasets import Dataset  # comes with TRL

    return Dataset.from_list([{"prompt": _prompt(task)} for task in tasks])


def _prompt(task: RolloutTask) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in task.messages]


def _prompt_key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


def _messages(messages: Sequence[Message]) -> dict[str, list[dict[str, str]]]:
    """Split a conversation for TRL's traces: the messages before the policy's first one, and the others."""
    plain = [{"role": message.role, "content": message.content} for message in messages]
    first = next((index for index, message in enumerate(plain) if message["role"] == "assistant"), len(plain))
    return {"prompt": plain[:first], "completion": plain[first:]}


def _failure(trajectory: Trajectory) -> str:
    reason = trajectory.error or trajectory.reward_error or "it has no reward"
    return f"{trajectory.stop_reason.value}: {reason}"
