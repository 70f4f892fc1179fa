"""TRL's trainers on the service: `AsyncRollouts` for `AsyncGRPOTrainer`, `SyncRollouts` for `GRPOTrainer`.

    rollouts = AsyncRollouts(url, tasks, num_generations=8, max_staleness=4)
    trainer = AsyncGRPOTrainer(
        model=DIR, args=AsyncGRPOConfig(max_staleness=4, token_budget=8192), train_dataset=rollouts.dataset(),
        rollout_worker=rollouts, weight_transfer=rollouts,
    )

TRL 1.16 declares the two seams as `RolloutWorkerProtocol` and `WeightTransferProtocol` in
`trl/experimental/async_grpo/async_grpo_trainer.py`; its `GRPOTrainer` has `rollout_func`. TRL itself is not
imported. The service samples, rolls out, rewards and bounds the staleness; TRL computes the loss.

Sampling must be at the temperature that TRL divides its logits by (`args.temperature`), and without top_p, top_k
and min_p: `docs/guides/distribution.md`.
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
"""Called with each finished group, before its rows are handed on: to keep them, or to watch them."""

Metric: TypeAlias = float | tuple[float, float]
"""A value as TRL's log takes it: a number, or a rate as numerator and denominator."""

_BUFFER_ROWS = 1024
_METRICS = 4096  # groups between two of TRL's logs; the oldest leave
_POLL_S = 0.05
_LANES = 4  # rollouts in flight at a time: a new one begins while the slowest groups of another end
_CANCEL_TIMEOUT_S = 20.0
_MIN_FAILED = 16  # trajectories in a row without one that ends well: the run is stopped then

_log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True, eq=False)
class BufferedRow:
    """A row with the fields of TRL 1.16's `RolloutSample`, whose import takes seconds. Arrays have one length."""

    prompt: list[dict[str, str]]
    completion: list[dict[str, str]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: FloatArray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None  # unix time


class AsyncRollouts:
    """Groups of trajectories as `AsyncGRPOTrainer` drains them, and the way its weights take to the service.

    Pass it both as `rollout_worker` and as `weight_transfer`. `tasks` are rolled out in passes, each in another
    order (`seed`), `num_generations` samples a task. At most `groups_in_flight` groups are unfinished, and
    `_BUFFER_ROWS` rows wait for the trainer; beyond that the service is asked for nothing.

    No trajectory falls more than `max_staleness` versions behind the fleet while it runs, or `on_stale` says what
    becomes of it; give TRL's config the same `max_staleness`, which drops rows that aged in the buffer. A row's
    `model_version` is that of its oldest trained token. Submits carry `run_id`, so that a trainer that starts again
    under the same one shares the service's staleness budget with what still runs of it.

    `divides_by_std` is TRL's own choice of advantage. Errors of the service, and what hangs, come up in
    `check_health`.
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
        """Raises InvalidRequest for no tasks, tasks of several temperatures, and groups of one."""
        _check(tasks)
        if num_generations < 2 or groups_in_flight < 1:
            raise InvalidRequest("a group has at least two samples, and at least one is in flight")
        self.rollout_buffer: queue.Queue[BufferedRow] = queue.Queue(
            _BUFFER_ROWS
        )  # the rollout waits for the trainer
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
        self._version_offset = 0  # the service's version less TRL's
        self._num_groups = 0  # emitted so far: TRL numbers its groups from 0
        self._num_failed = 0  # trajectories since the last that ended well
        self._work: concurrent.futures.Future[None] | None = None
        self._running: asyncio.Task[None] | None = None  # the same, on the link's loop
        self._rollouts: dict[int, Rollout] = {}  # in flight, by lane
        self._row_at = 0.0  # monotonic: when a row last came
        self._last_failure = ""

    @property
    def run_id(self) -> str:
        """The name under which the service counts this run's staleness budget."""
        return str(self._submit_options["run_id"])

    @property
    def version(self) -> int | None:
        """The service's number of the weights that were pushed last; None before the first push."""
        return self._link.version

    def dataset(self) -> Any:
        """Return TRL's `train_dataset`: its length is an epoch. The prompts in it are not sampled from."""
        return _dataset(self._tasks)

    # --- RolloutWorkerProtocol

    def start(self) -> None:
        """Begin, or begin again, to roll out. TRL calls it once the first weights are in place."""
        if self._work is None:
            self._link.open()
            self._num_failed, self._row_at = 0, time.monotonic()
            self._work = self._link.start(self._roll_out)

    def stop(self) -> None:
        """Cancel what runs and forget the rows that nobody took. Idempotent; `start` begins again."""
        work, self._work = self._work, None
        if work is None:
            return
        work.cancel()
        try:
            self._link.call(self._cancel_rollouts, _CANCEL_TIMEOUT_S)
        except AgentLoopError as error:  # they end by themselves; nobody reads them
            _log.warning("rollouts_not_cancelled", url=self._link.url, error=error_line(error))
        with contextlib.suppress(queue.Empty):
            while True:
                self.rollout_buffer.get_nowait()

    def update_model_version(self, model_version: int) -> None:
        """Learn TRL's number of the weights that were pushed last."""
        if self._link.version is not None:
            self._version_offset = self._link.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the rollout, or DeadlineExceeded, naming what hangs, if no row came for that long."""
        work = self._work
        if work is None:
            raise InvalidRequest("the rollout is not started")
        if work.done():
            failure = None if work.cancelled() else work.exception()
            error = None if failure is None else first_cause(failure)
            if isinstance(error, AgentLoopError):
                raise error
            raise AgentLoopError(f"the rollout has ended: {error_line(error) if error else 'cancelled'}") from error
        age_s = time.monotonic() - self._row_at
        if age_s > stale_after_s:
            failed = f"; {self._num_failed} trajectories failed, the last: {self._last_failure}"
            raise DeadlineExceeded(
                f"no row for {age_s:.0f} s from {self._link.url}: {self._link.standstill()}"
                + (failed if self._num_failed else "")
            )

    # --- WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Connect."""
        self._link.open()

    def pause(self) -> None:
        """Do nothing: an update stages beside decoding, and stops the engines itself for the switch."""

    def send_weights(self, iterator: Iterable[tuple[str, object]]) -> None:
        """Push the tensors as the service's next version. Raises WeightUpdateFailed and others, naming replicas."""
        report = self._link.push(iterator)
        self._log({"weights/stall_s": report.stall_ms / 1000, "weights/update_s": report.total_ms / 1000})

    def resume(self) -> None:
        """Do nothing: `pause` did nothing."""

    def destroy(self) -> None:
        """Stop, and let go of the connection. Idempotent."""
        self.stop()
        self._link.close()

    # --- on the link's loop

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
            await rollout.acknowledge()
            del self._rollouts[lane]

    async def _cancel_rollouts(self, client: RolloutClient) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])  # it is being cancelled; what it put into the buffer is there
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
        """Count failures in a row. Raises AgentLoopError once nothing ends well: waiting would not help."""
        for trajectory in group:
            if is_scored(trajectory):
                self._num_failed = 0
            elif trajectory.failure is not FailureClass.STALE:  # waiting helps against a slow trainer's own updates
                self._num_failed += 1
                self._last_failure = _failure(trajectory)
        if self._num_failed >= max(_MIN_FAILED, 2 * self._num_generations):
            raise AgentLoopError(
                f"{self._num_failed} trajectories in a row failed, the last, of task {group[-1].task_id!r}: "
                f"{self._last_failure}"
            )

    def _log(self, metrics: dict[str, Metric]) -> None:
        if self.metrics_queue.full():
            with contextlib.suppress(queue.Empty):
                self.metrics_queue.get_nowait()
        with contextlib.suppress(queue.Full):
            self.metrics_queue.put_nowait(metrics)


class SyncRollouts:
    """`rollout_func` of `GRPOTrainer`: trajectories of the service, sampled under the weights of that very step.

        rollouts = SyncRollouts(url, tasks)
        trainer = GRPOTrainer(model=DIR, args=GRPOConfig(...), train_dataset=rollouts.dataset(),
                              rollout_func=rollouts, reward_funcs=rollouts.reward)
        rollouts.attach(trainer)
        trainer.train()

    `attach` is needed: without it TRL ignores the logprobs that a `rollout_func` returns (it takes every ratio as
    1) and never pushes weights. TRL wants one completion for a prompt: of a trajectory whose history forked it
    gets the latest path of the main conversation, and the other paths count as wasted tokens. Only `AsyncRollouts`
    trains all.
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
        """`timeout_s` bounds one step's rollout. Raises InvalidRequest if two tasks have the same messages."""
        _check(tasks)
        self._link = ServiceLink(url, api_key=api_key, admin_key=admin_key, listen_host=listen_host)
        self._tasks = {_prompt_key(_prompt(task)): task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise InvalidRequest("two tasks have the same messages: TRL hands on prompts, not tasks", param="tasks")
        self._timeout_s = timeout_s
        self._on_group = on_group

    def dataset(self) -> Any:
        """Return TRL's `train_dataset`: a prompt for each task."""
        return _dataset(tuple(self._tasks.values()))

    def attach(self, trainer: Any) -> None:
        """Have TRL use the recorded logprobs and push before each rollout; between construction and `train`.

        What TRL calls `use_vllm` says where its logprobs and weights come from and go to; constructed with it, a
        trainer would connect to a vLLM server. Raises InvalidRequest for a trainer that samples otherwise than the
        tasks, or that trains an adapter.
        """
        temperature = next(iter(self._tasks.values())).temperature
        if trainer.temperature != temperature:
            raise InvalidRequest(
                f"TRL divides logits by {trainer.temperature:g}, the tasks are sampled at {temperature:g}",
                param="temperature",
            )
        if hasattr(trainer.model, "peft_config"):
            raise InvalidRequest(
                "adapters are pushed as directories: RolloutClient.update_adapter", param="trainer"
            )
        self._link.open()
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: self._push(trainer))

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Roll out each prompt once; equal prompts are the samples of one group. Blocks.

        Returns lists in the order of `prompts`: prompt_ids, completion_ids, logprobs, env_mask and
        agentloop_reward, which is None for a trajectory that failed: TRL leaves it out of the baseline.
        """
        places: dict[str, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            places[_prompt_key(prompt)].append(place)
        if unknown := places.keys() - self._tasks.keys():
            raise InvalidRequest(f"no task has this prompt: {min(unknown)[:200]}", param="prompts")

        async def roll_out(client: RolloutClient) -> list[tuple[str, Sequence[Trajectory]]]:
            return [group async for group in self._groups(client, places)]

        try:
            groups = self._link.call(roll_out, self._timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error.message}: {self._link.standstill()}") from error
        eos_id = int(trainer.processing_class.eos_token_id)
        rows = {place: row for key, group in groups for place, row in self._placed(places[key], group, trainer)}
        columns = [_completion(rows.get(place), eos_id) for place in range(len(prompts))]
        return {name: [column[name] for column in columns] for name in columns[0]}

    def reward(self, completions: Sequence[Any], agentloop_reward: Sequence[float | None], **_: Any) -> list[Any]:
        """Return the rewards of the trajectories: TRL's `reward_funcs`."""
        return list(agentloop_reward)

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        self._link.close()

    async def _groups(
        self, client: RolloutClient, places: Mapping[str, Sequence[int]]
    ) -> AsyncIterator[tuple[str, Sequence[Trajectory]]]:
        keys_of: dict[int, list[str]] = defaultdict(list)  # by the size of their groups: one submit has one
        for key, at in places.items():
            keys_of[len(at)].append(key)
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
        self, places: Sequence[int], group: Sequence[Trajectory], trainer: Any
    ) -> Iterator[tuple[int, TrainingRow]]:
        """Yield the row of each sample that has one, with the place of its prompt."""
        last = {trajectory.sample_index: trajectory.main_conversation[-1:] for trajectory in group}
        rows = [row for row in group_rows(group) if (row.place,) == last[row.sample_index]]
        if self._on_group is not None:
            self._on_group(group, rows)
        log = trainer._metrics["train" if trainer.model.training else "eval"]
        for name, value in group_metrics(count_group(group, rows)).items():
            if not isinstance(value, tuple):
                log[name].append(float(value))
            elif value[1]:
                log[name].append(value[0] / value[1])
        for row in rows:
            yield places[row.sample_index], row

    def _push(self, trainer: Any) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        whole = [
            (name, own.full_tensor() if hasattr(own, "full_tensor") else own.detach())  # collective: on every rank
            for name, own in model.named_parameters()
        ]
        if trainer.accelerator.is_main_process:
            report = self._link.push(whole)
            trainer._metrics["train"]["weights/stall_s"].append(report.stall_ms / 1000)
            trainer._metrics["train"]["weights/update_s"].append(report.total_ms / 1000)
        trainer.accelerator.wait_for_everyone()


def group_metrics(counts: GroupCounts) -> dict[str, Metric]:
    """Return a group's counts as TRL logs them: rates as pairs, which it sums over its window before it divides."""
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
    """Return TRL's own names for a row's rewards."""
    parts = {f"rewards/{name}": float(value) for name, value in trajectory.components.items()}
    return {"reward": row.reward, "reward_std": counts.reward_std, **parts}


def _completion(row: TrainingRow | None, eos_id: int) -> dict[str, Any]:
    """Return one row as `GRPOTrainer` wants it; without one a completion that trains nothing."""
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
        raise InvalidRequest("there is no task", param="tasks")
    if len({task.task_id for task in tasks}) < len(tasks):
        raise InvalidRequest("a task id occurs twice", param="tasks")
    if len({task.temperature for task in tasks}) > 1:
        raise InvalidRequest("tasks have several temperatures; TRL divides logits by one", param="temperature")


def _passes(tasks: Sequence[RolloutTask], seed: int) -> Iterator[RolloutTask]:
    """Yield the tasks pass after pass, for ever, each pass in an order of its own."""
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
    """Return a conversation for TRL's traces: up to the policy's first message, and from there."""
    plain = [{"role": message.role, "content": message.content} for message in messages]
    first = next((at for at, message in enumerate(plain) if message["role"] == "assistant"), len(plain))
    return {"prompt": plain[:first], "completion": plain[first:]}


def _failure(trajectory: Trajectory) -> str:
    reason = trajectory.error or trajectory.reward_error or "it has no reward"
    return f"{trajectory.stop_reason.value}: {reason}"
