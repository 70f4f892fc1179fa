"""Trains the shipped policy with TRL's GRPOTrainer on a service; prints its observations as one JSON line.

python trl_sync.py URL NUM_STEPS
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

from agentloop.client.rollout import load_tasks
from agentloop.errors import InvalidRequest
from agentloop_trainers.batches import TrainingRow
from agentloop_trainers.trl import SyncRollouts

ROOT = Path(__file__).parents[4]


def main(url: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    versions: list[list[int]] = []

    def keep(_: object, rows: list[TrainingRow]) -> None:
        versions.extend([row.oldest_version, row.newest_version] for row in rows)

    rollouts = SyncRollouts(url, load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[:8], on_group=keep)

    def make_trainer(temperature: float) -> GRPOTrainer:
        config = GRPOConfig(
            tempfile.mkdtemp(),
            max_steps=num_steps,
            learning_rate=1e-4,
            temperature=temperature,
            num_generations=4,
            per_device_train_batch_size=16,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        return GRPOTrainer(
            str(ROOT / "examples" / "tiny_policy" / "v0"),
            args=config,
            train_dataset=rollouts.dataset(),
            rollout_func=rollouts,
            reward_funcs=rollouts.reward,
        )

    refusal = ""
    try:
        rollouts.attach(make_trainer(0.7))
    except InvalidRequest as error:
        refusal = error.message
    trainer = make_trainer(1.0)
    rollouts.attach(trainer)
    trainer.train()
    rollouts.close()
    print(json.dumps({"history": trainer.state.log_history, "versions": versions, "refusal": refusal}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
