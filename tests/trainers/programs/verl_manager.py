"""Rolls verl's prompts out through our agent-loop manager into a real TransferQueue; prints what verl reads of it.

python verl_manager.py URL PUSH_URL: of the service that samples, and of the one that takes weights. Starts a Ray of
its own for the queue. verl's replay buffer, its config and its own function for batches are the judges.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VERL_USE_EXTERNAL_MODULES"] = "agentloop.trainers.verl"

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl  # registers our backend and our trainer
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn

from agentloop.client.rollout import load_tasks

ROOT = Path(__file__).parents[3]
NUM_PROMPTS, NUM_SAMPLES = 4, 2


def make_config(url: str, push_url: str) -> Any:
    ours = [
        "++actor_rollout_ref.rollout.agent.agent_loop_manager_class=agentloop.trainers.verl.AgentLoopManager",
        f"++actor_rollout_ref.rollout.custom.agentloop.url={url}",
        "++actor_rollout_ref.rollout.custom.agentloop.tools=[calculator]",
        "++actor_rollout_ref.rollout.custom.agentloop.reward=exact_match",
        "++actor_rollout_ref.rollout.checkpoint_engine.backend=agentloop",
        "++actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=agentloop.trainers.verl",
        f"++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.agentloop.url={push_url}",
        "++trainer.v1.trainer_mode=agentloop",
        "++actor_rollout_ref.rollout.name=vllm",
        f"++actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        "++actor_rollout_ref.rollout.prompt_length=512",
        "++actor_rollout_ref.rollout.response_length=256",
        "++algorithm.rollout_correction.bypass_mode=true",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",  # one CPU each, which Ray waits for
    ]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides=ours)


def push(config: Any) -> dict[str, float]:
    """Push as an actor worker's first and second rank do, through the engine that verl makes of its config."""
    section = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
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

    reports = [asyncio.run(rank.send_weights(gather(at), global_steps=7)) for at, rank in enumerate(ranks)]
    assert len(gathered) == 2 * len(weights)
    return {**reports[0], "num_of_others": len(reports[1])}


def main(url: str, push_url: str) -> None:
    config = make_config(url, push_url)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # verl's own check of the section
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    tq.init(config.transfer_queue)
    pushed = push(config)
    tasks = load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[:NUM_PROMPTS]
    columns = {
        "uid": np.array([f"{at:08d}-0000" for at in range(NUM_PROMPTS)], dtype=object),
        "index": np.arange(NUM_PROMPTS),
        "raw_prompt": _objects([[{"role": m.role, "content": m.content} for m in task.messages] for task in tasks]),
        "reward_model": _objects([{"ground_truth": task.reference} for task in tasks]),
        "data_source": _objects(["tiny"] * NUM_PROMPTS),
        "extra_info": _objects([{}, {}, {}, {"agentloop": {"tools": ["no_such_tool"]}}]),
        "dummy": torch.arange(NUM_PROMPTS),
    }
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor_data(batch, "global_steps", 8)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 8} for _ in range(NUM_PROMPTS)]
    tq.kv_batch_put(keys=list(columns["uid"]), partition_id="train", tags=tags)
    manager_class = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class)
    manager = manager_class.create(
        config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None
    )
    manager.generate_sequences(batch)
    buffer = ReplayBufferAsync(
        trainer_mode="agentloop",
        trainer_config=config.trainer.v1.get("agentloop", {}),
        max_off_policy_threshold=4,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        poll_interval=0.2,
        refill_fn=lambda _: None,
    )
    sampled, evicted = buffer.sample(global_steps=8, partition_id="train", batch_size=NUM_PROMPTS - 1)
    names = ["prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs"]
    data = tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=[*names, "rm_scores"])
    lengths = {name: [len(one) for one in data[name].unbind()] for name in [*names, "rm_scores"]}
    rewards = [float(one.sum()) for one in data["rm_scores"].unbind()]
    logprobs = [
        float(one[mask.bool()].max())
        for one, mask in zip(data["rollout_log_probs"].unbind(), data["response_mask"].unbind(), strict=True)
    ]
    joined = all(
        torch.equal(ids, torch.cat([prompt, response]))
        for ids, prompt, response in zip(
            data["input_ids"].unbind(), data["prompts"].unbind(), data["responses"].unbind(), strict=True
        )
    )
    manager.close()
    tq.close()
    ray.shutdown()
    print(
        json.dumps(
            {
                "trainer": get_trainer_cls("agentloop").__name__,
                "n": rollout.n,
                "pushed": pushed,
                "keys": list(sampled.keys),
                "tags": list(sampled.tags),
                "evicted": {name: value for name, value in evicted.items() if isinstance(value, int | float)},
                "lengths": lengths,
                "rewards": rewards,
                "max_logprobs": logprobs,
                "is_joined": joined,
            }
        )
    )


def _objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


if __name__ == "__main__":
    main(*sys.argv[1:3])
