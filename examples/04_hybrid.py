"""A trainer that shares its GPU with the engines, turn about. First: agentloop serve --config servers/hybrid.yaml

python examples/04_hybrid.py http://127.0.0.1:8000 examples/tiny_policy/v0
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from agentloop.client import RolloutClient, load_tasks
from agentloop.types import Trajectory


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Trajectory]) -> float:
    """One step of REINFORCE with the group's mean reward as the baseline."""
    groups = defaultdict(list)
    for trajectory in batch:
        groups[trajectory.group_id].append(trajectory.reward or 0.0)
    optimizer.zero_grad()
    total = 0.0
    for trajectory in batch:
        rewards, path = groups[trajectory.group_id], trajectory.path
        advantage = (trajectory.reward or 0.0) - sum(rewards) / len(rewards)
        ids = torch.tensor([[*path.prompt_ids, *path.response_ids]], device=model.device).long()
        logits = model(ids).logits[0, len(path.prompt_ids) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[0, len(path.prompt_ids) :, None])[:, 0]
        loss = -advantage * logprobs[torch.tensor(path.response_mask)].sum() / len(batch)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


async def main(url: str, model_path: str, num_steps: int = 2, num_tasks: int = 8) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tasks = load_tasks("examples/data/tasks.jsonl")[:num_tasks]
    async with RolloutClient(url) as client:
        first = (await client.status()).weight_version or 0
        for version in range(first + 1, first + 1 + num_steps):
            batch = [trajectory async for trajectory in await client.submit(tasks, num_samples=4)]
            await client.sleep(level=2)  # the engines' memory is ours; their weights are about to be replaced
            loss = await asyncio.to_thread(train_step, model, optimizer, batch)
            report = await client.update_weights(model.named_parameters(), version=version)  # wakes them
            print(f"version {report.version}: loss {loss:.4f}, awake after {report.total_ms:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
