"""Adapter for verl 0.9's V1 trainer: rollouts into its TransferQueue, and weight pushes from its actor workers.

verl's config selects three classes (see `docs/guides/trainers.md`):

- `AgentLoopManager`, by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`, rolls out prompts.
- `ServiceCheckpointEngine`, the backend `agentloop`, runs in every actor worker; all ranks gather the weights, and
  the first one pushes them.
- `AgentLoopTrainer`, the trainer mode `agentloop`, is verl's asynchronous trainer without rollout replicas on the
  training GPUs.

verl imports this module by the entry point `verl.plugins`, which registers the last two.

The service's weight versions are verl's `global_steps`. Data formats are those of verl 0.9.1:
`AgentLoopOutput.as_dict` for the fields, and `verl/trainer/ppo/v1/agent_loop_tq.py` for the keys and tags that the
replay buffer reads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import structlog
import transfer_queue
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError, InvalidRequest, error_line
from agentloop.types import Limits, Message, OnStale, RolloutTask, Trajectory
from agentloop_trainers.batches import TrainingRow, group_rows, is_scored
from agentloop_trainers.service_link import ServiceLink

NAME = "agentloop"
"""The name of the checkpoint backend, the trainer mode and our section in verl's config."""

_RUNNING, _FINISHED, _FAILURE = "running", "finished", "failure"  # verl's states of a group
_VALIDATION_PRIORITY = 1  # an evaluation overtakes training

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Our section of verl's config: `actor_rollout_ref.rollout.custom.agentloop`.

    `tools`, `loop` and `reward` are defaults for rows that do not set them in `extra_info.agentloop`.
    """

    url: str
    tools: tuple[str, ...] = ()
    loop: str = "tool_loop"
    reward: str | None = None
    max_staleness: int | None = None
    on_stale: OnStale = OnStale.MASK
    limits: Mapping[str, Any] = field(default_factory=dict)  # fields of `Limits`

    @classmethod
    def of(cls, config: Any) -> RolloutSettings:
        """Read the settings from verl's config. Raises InvalidRequest for missing or unknown fields."""
        custom = config.actor_rollout_ref.rollout.get("custom") or {}
        section = custom.get(NAME) or {}
        known = {name: section[name] for name in section if name in cls.__dataclass_fields__}
        if unknown := set(section) - set(known):
            raise InvalidRequest(
                f"unknown field {min(unknown)!r} in rollout.custom.{NAME}: expected "
                f"{', '.join(cls.__dataclass_fields__)}",
                param=min(unknown),
            )
        if "url" not in known:
            raise InvalidRequest(f"rollout.custom.{NAME}.url is missing: set it to the service's URL", param="url")
        if "on_stale" in known:
            known["on_stale"] = OnStale(known["on_stale"])
        return cls(**{**known, "tools": tuple(known.get("tools", ())), "limits": dict(known.get("limits") or {})})


class AgentLoopManager:
    """Rolls out verl's prompts with the service. Each prompt is a group, whose rows are put into the TransferQueue.

    There is one object, in the trainer's process. The API key is read from the environment (AGENTLOOP_KEY), because
    verl prints its config.
    """

    def __init__(self, config: Any) -> None:
        self._rollout = config.actor_rollout_ref.rollout
        self._settings = RolloutSettings.of(config)
        self._link = ServiceLink(self._settings.url, api_key=os.environ.get("AGENTLOOP_KEY"))
        self._link.open()
        self._groups: set[concurrent.futures.Future[None]] = set()

    @classmethod
    def create(
        cls, config: Any, llm_client: Any = None, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> AgentLoopManager:
        """Create the manager, for verl's task runner. verl's own servers and reward workers are not used."""
        if teacher_client:
            raise InvalidRequest(
                "a teacher_client is not supported: the service does not compute teacher logprobs for verl",
                param="teacher_client",
            )
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """Start the rollout of a TensorDict of prompts, each `rollout.n` times. Returns immediately.

        The tags in the TransferQueue have the status of each group.
        """
        is_validation = bool(_plain(prompts["validate"], 0)) if "validate" in prompts else False
        for index in range(len(prompts)):
            row = {name: _plain(prompts.get(name), index) for name in prompts.keys()}  # noqa: SIM118 - a TensorDict
            row.pop("validate", None)
            group = self._link.start(self._group_runner(row, is_validation))
            self._groups.add(group)
            group.add_done_callback(self._ended)

    def close(self) -> None:
        """Cancel running rollouts and close the connection. Idempotent."""
        self._link.close()

    def _group_runner(self, row: dict[str, Any], is_validation: bool) -> Callable[[RolloutClient], Any]:
        return lambda client: self._run_group(client, row, is_validation)

    def _ended(self, group: concurrent.futures.Future[None]) -> None:
        self._groups.discard(group)
        if not group.cancelled() and (error := group.exception()) is not None:
            # The TransferQueue itself failed, so that the failure cannot be reported there.
            _log.error("group_not_recorded", error=error_line(error))

    async def _run_group(self, client: RolloutClient, row: dict[str, Any], is_validation: bool) -> None:
        uid, partition = str(row["uid"]), "val" if is_validation else "train"
        await asyncio.to_thread(_put_status, uid, partition, _RUNNING)
        status = _FAILURE
        try:
            group = await self._roll_out(client, row, is_validation)
            rows = group_rows(group)
            if rows:
                await asyncio.to_thread(_put_rows, uid, partition, samples(group, rows, row))
            has_all = {each.sample_index for each in rows} == {trajectory.sample_index for trajectory in group}
            status = _FINISHED if has_all else _FAILURE
            for trajectory in group:
                if not is_scored(trajectory):
                    reason = trajectory.error or trajectory.reward_error
                    _log.warning("sample_failed", uid=uid, stop=trajectory.stop_reason.value, reason=reason)
        except (AgentLoopError, KeyError, TypeError, ValueError) as error:  # from the service, or an invalid row
            _log.error("group_failed", uid=uid, error=error_line(error))
        await asyncio.to_thread(_put_status, uid, partition, status)

    async def _roll_out(
        self, client: RolloutClient, row: Mapping[str, Any], is_validation: bool
    ) -> list[Trajectory]:
        config, settings = self._rollout, self._settings
        sampled = config.val_kwargs if is_validation else config
        task = task_of(row, settings, sampled, config.prompt_length, config.response_length)
        rollout = await client.submit(
            [task],
            num_samples=int(row.get("__rollout_n__", sampled.n)),
            max_staleness=None if is_validation else settings.max_staleness,
            on_stale=settings.on_stale,
            priority=_VALIDATION_PRIORITY if is_validation else 0,
        )
        return [trajectory async for trajectory in rollout]


def task_of(
    row: Mapping[str, Any], settings: RolloutSettings, sampled: Any, prompt_length: int, response_length: int
) -> RolloutTask:
    """Create a task from a row of verl's dataset.

    It uses `raw_prompt`, the ground truth of `reward_model`, and `extra_info.agentloop`. `sampled` has the sampling
    parameters: `rollout`, or its `val_kwargs`.
    """
    if row.get("multi_modal_data"):
        raise InvalidRequest(
            f"row {row['uid']!r} has multi_modal_data: images are not supported with verl", param="multi_modal_data"
        )
    own = dict((row.get("extra_info") or {}).get(NAME) or {})
    limits = {
        "max_tokens_per_turn": response_length,
        "max_sampled_tokens": response_length,
        "max_context_tokens": prompt_length + response_length,
        **settings.limits,
    }
    is_greedy = not row.get("__do_sample__", True)
    return RolloutTask(
        task_id=str(row["uid"]),
        messages=tuple(Message(str(turn["role"]), str(turn["content"])) for turn in row["raw_prompt"]),
        tools=tuple(own.get("tools", settings.tools)),
        loop=str(own.get("loop", settings.loop)),
        reward=own.get("reward", settings.reward),
        reference=(row.get("reward_model") or {}).get("ground_truth"),
        limits=Limits(**limits),
        temperature=0.0 if is_greedy else float(sampled.temperature),
        top_p=1.0 if is_greedy else float(sampled.top_p),
        top_k=0 if is_greedy else max(int(sampled.top_k), 0),  # -1 in verl: no limit
    )


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One row of the TransferQueue: its key, without the group's uid, its fields and its tag."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def samples(
    group: Sequence[Trajectory], rows: Sequence[TrainingRow], given: Mapping[str, Any]
) -> list[QueueSample]:
    """Return verl's samples for the rows of a group. `given` are the fields of the prompt, repeated in each sample.

    A tag has the oldest and newest version of the trained tokens, and `weight_versions`, a list of [version, start,
    end] for the spans of the response. The key has the index of the row in its trajectory; verl's validation
    reports the last row.
    """
    by_sample = {trajectory.sample_index: trajectory for trajectory in group}
    num_before: dict[int, int] = {}
    queue_samples = []
    for row in rows:
        index = num_before.setdefault(row.sample_index, 0)
        num_before[row.sample_index] += 1
        trajectory = by_sample[row.sample_index]
        path = trajectory.paths[row.place]
        spans = [[span.version, span.start, span.end] for span in path.weight_versions]
        versions = {"min_global_steps": row.oldest_version, "max_global_steps": row.newest_version}
        output = AgentLoopOutput(
            prompt_ids=path.prompt_ids.tolist(),
            response_ids=path.response_ids.tolist(),
            response_mask=path.response_mask.astype(int).tolist(),
            response_logprobs=path.logprobs.tolist(),
            reward_score=row.reward,
            num_turns=len(path.messages),
            metrics=AgentLoopMetrics(
                generate_sequences=trajectory.timings.generate_s,
                tool_calls=trajectory.timings.tool_s,
                compute_score=trajectory.timings.reward_s,
            ),
            extra_fields={"reward_extra_info": dict(trajectory.components), **versions, "weight_versions": spans},
        ).as_dict()
        num_prompt, num_response = len(path.prompt_ids), len(path.response_ids)
        ids = output["prompts"].new_tensor(row.input_ids.tolist())
        output |= {name: value for name, value in given.items() if not name.startswith("__")}
        output |= {
            "session_id": row.sample_index,
            "loss_mask": output["response_mask"],
            "input_ids": ids,
            "position_ids": ids.new_tensor(range(len(ids))),
            "multi_modal_inputs": {},
        }
        tag = {
            "status": "success",
            "prompt_len": num_prompt,
            "response_len": num_response,
            "seq_len": num_prompt + num_response,
            "global_steps": given["global_steps"],
            **versions,
            "weight_versions": spans,
        }
        queue_samples.append(QueueSample(f"{row.sample_index}_{index}", output, tag))
    return queue_samples


@CheckpointEngineRegistry.register(NAME)
class ServiceCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """verl's sender of weights in an actor worker. All ranks gather the weights, and the master pushes them.

    `url`, `push_timeout_s` and `listen_host` come from `checkpoint_engine.engine_kwargs.agentloop`, the admin key
    from the environment (AGENTLOOP_ADMIN_KEY). There is no receiver and no process group, because the service's
    engines fetch the weights from this process.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        url: str,
        push_timeout_s: float = 900.0,
        listen_host: str | None = None,
    ) -> None:
        self._link = None
        if is_master:
            self._link = ServiceLink(
                url,
                admin_key=os.environ.get("AGENTLOOP_ADMIN_KEY"),
                listen_host=listen_host,
                push_timeout_s=push_timeout_s,
            )

    def prepare(self) -> dict[str, Any]:
        """Return no metadata, because there is no topology."""
        return {}

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Raise InvalidRequest, because the service's engines are not a worker group of verl."""
        raise InvalidRequest(
            "the checkpoint backend 'agentloop' requires the trainer mode 'agentloop'", param="trainer_mode"
        )

    def init_process_group(self, **_: Any) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing: the connection stays open."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """On the master, push the weights as version `global_steps`. Returns metrics for verl's log.

        Raises the errors of `ServiceLink.push`.
        """
        if self._link is None:
            for _ in weights:  # the other ranks must iterate too, because each gather is a collective
                pass
            return {}
        self._link.open()
        report = await asyncio.to_thread(self._link.push, weights, version=global_steps)
        return {"agentloop/stall_s": report.stall_ms / 1000, "agentloop/update_s": report.total_ms / 1000}

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Raise InvalidRequest, because no process of verl receives weights."""
        raise InvalidRequest("the checkpoint backend 'agentloop' only sends weights: it cannot receive them")


class ServiceWeights:
    """The methods of verl's `CheckpointEngineManager` that the trainer calls, for the service's fleet.

    The service manages memory and pauses: it stages an update while it decodes, so no replica has to sleep and no
    request is aborted.
    """

    def __init__(self, actor_workers: Any) -> None:
        self._actor_workers = actor_workers
        self._pushed: int | None = None

    def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Make the actor workers push their weights. Blocks. Does nothing if `global_steps` has not changed."""
        if global_steps is None or global_steps == self._pushed:
            return {}
        results = ray.get(self._actor_workers.update_weights(global_steps=global_steps, mode=NAME))
        self._pushed = global_steps
        return {name: value for result in results if result for name, value in result.items()}

    def sleep_replicas(self) -> None:
        """Do nothing."""

    def wake_up_replicas(self) -> None:
        """Do nothing."""

    def abort_replicas(self, reject_request: bool = False) -> None:
        """Do nothing."""

    def resume_generation_replicas(self) -> None:
        """Do nothing."""


@register_trainer(NAME)
class AgentLoopTrainer(PPOTrainerColocateAsync):  # type: ignore[misc]
    """verl's asynchronous trainer without rollout replicas on the training GPUs. The service's engines sample."""

    _enable_hybrid_replicas = False

    def _setup(self) -> None:
        super()._setup()
        self.checkpoint_manager = ServiceWeights(self.actor_rollout_wg)

    def on_train_begin(self) -> None:
        """Start the first `trainer.v1.agentloop.num_warmup_batches` batches (default 1) in advance."""
        section = self.config.trainer.v1.get(NAME) or {}
        self._add_async_warmup_batches(section.get("num_warmup_batches", 1))


def _plain(column: Any, index: int) -> Any:
    """Return one value of a TensorDict's column: a tensor's row, or the data of a NonTensorStack or -Data."""
    name = type(column).__name__
    if name == "NonTensorData":
        return column.data
    value = column[index]
    return getattr(value, "data", value) if name == "NonTensorStack" else value


def _put_status(uid: str, partition: str, status: str) -> None:
    transfer_queue.kv_put(key=uid, partition_id=partition, tag={"status": status})


def _put_rows(uid: str, partition: str, rows: Sequence[QueueSample]) -> None:
    transfer_queue.kv_batch_put(
        keys=[f"{uid}_{sample.key}" for sample in rows],
        fields=list_of_dict_to_tensordict([sample.fields for sample in rows]),
        tags=[sample.tag for sample in rows],
        partition_id=partition,
    )
