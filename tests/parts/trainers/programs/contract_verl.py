"""verl's classes around our agent-loop manager and checkpoint engine, as far as verl runs without a GPU.

Starts a separate Ray for verl's TransferQueue. verl's replay buffer, config and batch function check the results.
verl's training loop and actor workers need CUDA.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import plugin_metadata  # noqa: F401 - before verl, which then finds our plugin
import ray
import torch
import transfer_queue as tq
import verl  # its plugins register our backend and our trainer
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from verbs import serve
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn

from agentloop.client.rollout import load_tasks

ROOT = Path(__file__).parents[4]
NUM_SAMPLES = 2


def make_config(url: str) -> Any:
    ours = [
        "++actor_rollout_ref.rollout.agent.agent_loop_manager_class=agentloop_trainers.verl.AgentLoopManager",
        f"++actor_rollout_ref.rollout.custom.agentloop.url={url}",
        "++actor_rollout_ref.rollout.custom.agentloop.tools=[calculator]",
        "++actor_rollout_ref.rollout.custom.agentloop.reward=exact_match",
        "++actor_rollout_ref.rollout.checkpoint_engine.backend=agentloop",
        f"++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.agentloop.url={url}",
        "++trainer.v1.trainer_mode=agentloop",
        "++actor_rollout_ref.rollout.name=vllm",
        f"++actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        "++actor_rollout_ref.rollout.prompt_length=512",
        "++actor_rollout_ref.rollout.response_length=256",
        "++algorithm.rollout_correction.bypass_mode=true",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",  # one CPU each; Ray waits for them
    ]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides=ours)


class Verl:
    """verl's config, queue and replay buffer, and our classes that the config names."""

    def __init__(self, url: str, _: list[list[int]]) -> None:
        self.config = make_config(url)
        # verl's own validation
        assert omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout).n == NUM_SAMPLES
        assert get_trainer_cls("agentloop").__name__ == "AgentLoopTrainer"
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
        tq.init(self.config.transfer_queue)
        manager_class = load_class_from_fqn(self.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
        self.manager = manager_class.create(
            config=self.config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None
        )
        self.num_prompts = 0

    def update(self, version: str) -> dict[str, float]:
        """Push as the first two ranks of an actor worker, through the engine that verl builds from its config."""
        section = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        options = section.engine_kwargs.get(section.backend, {})
        weights = load_file(ROOT / "examples" / "tiny_policy" / "v1" / "model.safetensors")
        ranks = [
            CheckpointEngineRegistry.new(section.backend, is_master=is_master, bucket_size=1 << 20, **options)
            for is_master in (True, False)
        ]
        gathered: list[str] = []

        def gather(rank: int) -> Any:
            for name, tensor in weights.items():
                gathered.append(f"{rank}:{name}")
                yield name, tensor.float()

        sends = [rank.send_weights(gather(at), global_steps=int(version)) for at, rank in enumerate(ranks)]
        first, second = map(asyncio.run, sends)
        assert len(gathered) == 2 * len(weights)
        assert (first["agentloop/update_s"] >= 0, second) == (True, {})
        return {}

    def rollouts(self) -> dict[str, Any]:
        """Roll out three groups, and one whose tool is unknown: a failure that verl evicts."""
        return self.rolled(3, num_failing=1)

    def killed(self) -> dict[str, Any]:
        return self.rolled(24)

    def rolled(self, num_prompts: int, num_failing: int = 0) -> dict[str, Any]:
        """Roll out groups and let verl sample them. Return each row's prompt and the tokens of its first turn."""
        num_all, first = num_prompts + num_failing, self.num_prompts
        self.num_prompts += num_all
        uids = [f"{at:08d}-0000" for at in range(first, first + num_all)]
        self.begin(uids, num_failing)
        buffer = ReplayBufferAsync(
            trainer_mode="agentloop",
            trainer_config=self.config.trainer.v1.get("agentloop", {}),
            max_off_policy_threshold=4,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            poll_interval=0.2,
            refill_fn=lambda _: None,
        )
        sampled, evicted = buffer.sample(global_steps=8, partition_id="train", batch_size=num_prompts)
        assert evicted.get("training/rollout_failure/evicted_samples", 0) == num_failing
        assert {key.rsplit("_", 2)[0] for key in sampled.keys} == set(uids[:num_prompts])
        assert {key.rsplit("_", 2)[1] for key in sampled.keys} == {str(one) for one in range(NUM_SAMPLES)}
        of_response = ["response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "responses"]
        names = [*of_response, "prompts", "input_ids", "position_ids"]
        data = tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=names)
        columns = {name: data[name].unbind() for name in names}
        served = []
        for place, tag in enumerate(sampled.tags):
            row = {name: column[place] for name, column in columns.items()}
            assert tag["status"] == "success"
            assert tag["min_global_steps"] <= tag["max_global_steps"]
            assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"] == len(row["input_ids"])
            assert {len(row[name]) for name in of_response} == {tag["response_len"]}
            assert torch.equal(row["input_ids"], torch.cat([row["prompts"], row["responses"]]))
            is_sampled = row["response_mask"].bool()
            assert float(row["rollout_log_probs"][is_sampled].max()) <= 0
            assert float(row["rm_scores"].sum()) in (0.0, 1.0)
            num_first = int(is_sampled.long().cumprod(0).sum())
            served.append((row["prompts"].tolist(), row["responses"][:num_first].tolist()))
        tq.kv_clear(keys=sampled.keys, partition_id="train")
        return {"served": served}

    def begin(self, uids: list[str], num_failing: int) -> None:
        """Submit a verl batch to the manager. The last prompts of the batch fail."""
        tasks = load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[: len(uids)]
        prompts = [[{"role": m.role, "content": f"verl: {m.content}"} for m in task.messages] for task in tasks]
        failing = [{"agentloop": {"tools": ["no_such_tool"]}}] * num_failing
        columns = {
            "uid": np.array(uids, dtype=object),
            "index": np.arange(len(uids)),
            "raw_prompt": _objects(prompts),
            "reward_model": _objects([{"ground_truth": task.reference} for task in tasks]),
            "data_source": _objects(["tiny"] * len(uids)),
            "extra_info": _objects([{}] * (len(uids) - num_failing) + failing),
            "dummy": torch.arange(len(uids)),
        }
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", 8)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 8} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        self.manager.generate_sequences(batch)


def _objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


serve(Verl)
