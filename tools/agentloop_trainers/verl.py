"""verl 0.9's V1 trainer on the service: rollouts into its TransferQueue, and weights from its actor workers.

Three classes, for three places of verl's own, named by its config (`docs/guides/trainers.md` has the lines):

- `AgentLoopManager`, by `actor_rollout_ref.rollout.agent.agent_loop_manager_class`: rolls prompts out;
- `ServiceCheckpointEngine`, registered as the backend `agentloop` by `checkpoint_engine.custom_backend_module`: in
  every actor worker, whose ranks gather together and whose first pushes;
- `AgentLoopTrainer`, registered as the trainer mode `agentloop` by VERL_USE_EXTERNAL_MODULES: verl's asynchronous
  trainer without rollout replicas on the training GPUs.

A weight version of the service is verl's `global_steps`. Formats are those of verl 0.9.1: `AgentLoopOutput.as_dict`
makes the fields, `verl/trainer/ppo/v1/agent_loop_tq.py` says which keys and tags the trainer's replay buffer reads.
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
"""The name of the checkpoint backend, of the trainer mode, and of our section in verl's config."""

_RUNNING, _FINISHED, _FAILURE = "running", "finished", "failure"  # verl's words for a group
_VALIDATION_PRIORITY = 1  # an evaluation overtakes training

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Our section of verl's config: `actor_rollout_ref.rollout.custom.agentloop`.

    `tools`, `loop` and `reward` hold for rows that name none in their `extra_info.agentloop`.
    """

    url: str
    tools: tuple[str, ...] = ()
    loop: str = "tool_loop"
    reward: str | None = None
    max_staleness: int | None = None
    on_stale: OnStale = OnStale.MASK
    limits: Mapping[str, Any] = field(default_factory=dict)  # of `Limits`

    @classmethod
    def of(cls, config: Any) -> RolloutSettings:
        """Read them from verl's whole config. Raises InvalidRequest for what is missing or unknown."""
        custom = config.actor_rollout_ref.rollout.get("custom") or {}
        section = custom.get(NAME) or {}
        known = {name: section[name] for name in section if name in cls.__dataclass_fields__}
        if unknown := set(section) - set(known):
            raise InvalidRequest(f"rollout.custom.{NAME} has no field {min(unknown)!r}", param=min(unknown))
        if "url" not in known:
            raise InvalidRequest(f"rollout.custom.{NAME}.url is the service's URL", param="url")
        if "on_stale" in known:
            known["on_stale"] = OnStale(known["on_stale"])
        return cls(**{**known, "tools": tuple(known.get("tools", ())), "limits": dict(known.get("limits") or {})})


class AgentLoopManager:
    """The way of verl's prompts through the service: each a group of samples, whose rows go into the TransferQueue.

    One object in the trainer's process; `generate_sequences` returns at once. The keys of the service are those of
    the environment (AGENTLOOP_KEY), because verl prints its config.
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
        """Make one, as verl's task runner does. The service samples and rewards; verl's servers are not used."""
        if teacher_client:
            raise InvalidRequest("the service has no teacher's logprobs", param="teacher_client")
        return cls(config)

    def generate_sequences(self, prompts: Any) -> None:
        """Begin to roll out a TensorDict of prompts, each `rollout.n` times. Its status is in the queue's tags."""
        is_validation = bool(_plain(prompts["validate"], 0)) if "validate" in prompts else False
        for place in range(len(prompts)):
            row = {name: _plain(prompts.get(name), place) for name in prompts.keys()}  # noqa: SIM118 - a TensorDict
            row.pop("validate", None)
            group = self._link.start(self._group_runner(row, is_validation))
            self._groups.add(group)
            group.add_done_callback(self._ended)

    def close(self) -> None:
        """Cancel what runs, and let go of the connection. Idempotent."""
        self._link.close()

    def _group_runner(self, row: dict[str, Any], is_validation: bool) -> Callable[[RolloutClient], Any]:
        return lambda client: self._run_group(client, row, is_validation)

    def _ended(self, group: concurrent.futures.Future[None]) -> None:
        self._groups.discard(group)
        if not group.cancelled() and (error := group.exception()) is not None:
            _log.error("group_not_recorded", error=error_line(error))  # the queue itself failed: nobody can be told

    async def _run_group(self, client: RolloutClient, row: dict[str, Any], is_validation: bool) -> None:
        uid, partition = str(row["uid"]), "val" if is_validation else "train"
        await asyncio.to_thread(_put_status, uid, partition, _RUNNING)
        status = _FAILURE
        try:
            group = await self._roll_out(client, row, is_validation)
            rows = group_rows(group)
            if rows:
                await asyncio.to_thread(_put_rows, uid, partition, samples(group, rows, row))
            has_all = {one.sample_index for one in rows} == {trajectory.sample_index for trajectory in group}
            status = _FINISHED if has_all else _FAILURE
            for trajectory in group:
                if not is_scored(trajectory):
                    reason = trajectory.error or trajectory.reward_error
                    _log.warning("sample_failed", uid=uid, stop=trajectory.stop_reason.value, reason=reason)
        except (AgentLoopError, KeyError, TypeError, ValueError) as error:  # of the service, or of the row
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
    """Make a task of a row of verl's dataset: `raw_prompt`, the ground truth of `reward_model`, our part of its
    `extra_info`. Sampled as the config says: `sampled` is `rollout`, or its `val_kwargs`."""
    if row.get("multi_modal_data"):
        raise InvalidRequest("rows with images are not rolled out", param="multi_modal_data")
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
        messages=tuple(Message(str(one["role"]), str(one["content"])) for one in row["raw_prompt"]),
        tools=tuple(own.get("tools", settings.tools)),
        loop=str(own.get("loop", settings.loop)),
        reward=own.get("reward", settings.reward),
        reference=(row.get("reward_model") or {}).get("ground_truth"),
        limits=Limits(**limits),
        temperature=0.0 if is_greedy else float(sampled.temperature),
        top_p=1.0 if is_greedy else float(sampled.top_p),
        top_k=0 if is_greedy else max(int(sampled.top_k), 0),  # verl: -1 is no limit
    )


@dataclass(frozen=True, slots=True)
class QueueSample:
    """One row as the TransferQueue holds it: its key after the group's uid, its fields and its tag."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def samples(
    group: Sequence[Trajectory], rows: Sequence[TrainingRow], given: Mapping[str, Any]
) -> list[QueueSample]:
    """Return verl's sample for each row of a group; `given` are the fields of its prompt, which each repeats.

    A tag has the oldest and newest version of the trained tokens, and in `weight_versions` [version, start, end] of
    every span of the response. The key counts a trajectory's rows from 0: its last one is the one verl's validation
    reports.
    """
    by_sample = {trajectory.sample_index: trajectory for trajectory in group}
    num_before: dict[int, int] = {}
    found = []
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
        found.append(QueueSample(f"{row.sample_index}_{index}", output, tag))
    return found


@CheckpointEngineRegistry.register(NAME)
class ServiceCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """verl's sender of weights in an actor worker: every rank gathers, the master pushes to the service.

    `url`, `push_timeout_s` and `listen_host` come from `checkpoint_engine.engine_kwargs.agentloop`, the admin key
    from the environment (AGENTLOOP_ADMIN_KEY). There is no receiving side and no process group: engines fetch from
    here.
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
        """Return nothing: there is no topology."""
        return {}

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Raises InvalidRequest: the service's engines are in no worker group of verl's."""
        raise InvalidRequest("the backend agentloop needs the trainer mode agentloop", param="trainer_mode")

    def init_process_group(self, **_: Any) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing: the connection is kept."""

    async def send_weights(
        self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Push as version `global_steps`, on the master. Returns metrics for verl's log; raises as a push."""
        if self._link is None:
            for _ in weights:  # collective: each is gathered over the ranks
                pass
            return {}
        self._link.open()
        report = await asyncio.to_thread(self._link.push, weights, version=global_steps)
        return {"agentloop/stall_s": report.stall_ms / 1000, "agentloop/update_s": report.total_ms / 1000}

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Raises InvalidRequest: nothing of verl's receives."""
        raise InvalidRequest("the backend agentloop only sends")


class ServiceWeights:
    """The part of verl's `CheckpointEngineManager` that its trainer calls, over a fleet that is not verl's.

    Memory and pauses are the service's own: an update stages beside decoding, so nothing sleeps and nothing is
    aborted.
    """

    def __init__(self, actor_workers: Any) -> None:
        self._actor_workers = actor_workers
        self._pushed: int | None = None

    def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Have the actor workers push; blocks. Without a new number nothing has changed: it does nothing."""
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
    """verl's asynchronous trainer, whose training GPUs hold no rollout replicas: the service's engines sample."""

    _enable_hybrid_replicas = False

    def _setup(self) -> None:
        super()._setup()
        self.checkpoint_manager = ServiceWeights(self.actor_rollout_wg)

    def on_train_begin(self) -> None:
        """Ask for the first batches ahead, as many as `trainer.v1.agentloop.num_warmup_batches` says (1)."""
        section = self.config.trainer.v1.get(NAME) or {}
        self._add_async_warmup_batches(section.get("num_warmup_batches", 1))


def _plain(column: Any, place: int) -> Any:
    """Return one value of a TensorDict's column: a tensor's row, or what NonTensorStack and NonTensorData hold."""
    name = type(column).__name__
    if name == "NonTensorData":
        return column.data
    value = column[place]
    return getattr(value, "data", value) if name == "NonTensorStack" else value


def _put_status(uid: str, partition: str, status: str) -> None:
    transfer_queue.kv_put(key=uid, partition_id=partition, tag={"status": status})


def _put_rows(uid: str, partition: str, found: Sequence[QueueSample]) -> None:
    transfer_queue.kv_batch_put(
        keys=[f"{uid}_{sample.key}" for sample in found],
        fields=list_of_dict_to_tensordict([sample.fields for sample in found]),
        tags=[sample.tag for sample in found],
        partition_id=partition,
    )
