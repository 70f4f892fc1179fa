"""TRL's AsyncGRPOTrainer on the service: it trains while the engines sample, and pushes after every step.

First, in another terminal: agentloop serve --config servers/cpu_push.yaml, or with servers/standalone.yaml on a
GPU. Then, after `pip install -e '.[trl]'` in the checkout: python examples/10_trl.py http://127.0.0.1:8000
"""

import sys

import torch
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from agentloop.client import load_tasks
from agentloop_trainers.trl import AsyncRollouts


def main(url: str, num_steps: int = 4) -> None:
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        from trl_on_cpu import use_cpu  # noqa: PLC0415 - beside this file

        use_cpu()
    rollouts = AsyncRollouts(url, load_tasks("examples/data/tasks.jsonl"), num_generations=8, max_staleness=4)
    config = AsyncGRPOConfig(
        "runs/trl", max_steps=num_steps, max_staleness=4, learning_rate=1e-4, token_budget=8192, logging_steps=1,
        gradient_accumulation_steps=4, use_cpu=not has_gpu, bf16=has_gpu, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        "examples/tiny_policy/v0", args=config, train_dataset=rollouts.dataset(),
        rollout_worker=rollouts, weight_transfer=rollouts,
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
