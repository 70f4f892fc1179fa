"""Engines that begin with random weights: no traffic, a push, noise; and after a trained policy's push, sense.

First, in another terminal: agentloop serve --config examples/13_sense.yaml
Then: python examples/13_sense.py http://127.0.0.1:8000, and with --native by vLLM's own verbs and trainer helper
in the place of our client's push (examples/native_trainer.py).
"""

import asyncio
import sys
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentloop.client import RolloutClient, load_tasks
from agentloop.types import Limits

POLICY = "examples/tiny_policy/v1"


async def answer(client: RolloutClient, num_tasks: int) -> float:
    """Have the policy answer tasks. Returns their mean reward."""
    tasks = load_tasks("examples/data/tasks.jsonl")[:num_tasks]
    short = [replace(task, limits=Limits(max_turns=4, max_tokens_per_turn=64)) for task in tasks]
    records = [record async for record in await client.submit(short, num_samples=4)]
    reward = sum(record.reward or 0.0 for record in records) / len(records)
    messages = min(records, key=lambda record: record.task_id).messages
    question, reply = messages[0], messages[-1]
    version = (await client.status()).weight_version
    print(f"version {version}: {question.content!r}\n  -> {reply.content[:100]!r}\n  mean reward {reward:.2f}")
    return reward


async def main(url: str, is_native: bool = False, num_tasks: int = 8) -> tuple[float, float]:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(POLICY), dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    async with RolloutClient(url) as client:
        while not (status := await client.status()).replicas:  # noqa: ASYNC110 - the engine loads
            await asyncio.sleep(1.0)
        print(f"ready: {status.is_ready}, version: {status.weight_version}")
        print(f"  {(await client.why())[0].text}")
        if is_native:
            from native_trainer import native_trainer, send_weights  # noqa: PLC0415 - beside this file

            tensors = {name: one.detach() for name, one in model.named_parameters()}
            trainer = await asyncio.to_thread(native_trainer, url, tensors)

        async def push(version: int) -> None:
            if is_native:  # which counts for itself
                await asyncio.to_thread(send_weights, trainer, tensors)
            else:
                await client.update_weights(model.named_parameters(), version=version)

        first = 0 if status.weight_version is None else status.weight_version + 1
        await push(first)
        noise = await answer(client, num_tasks)
        model.load_state_dict(trained.state_dict())  # as if it had learned
        await push(first + 1)
        return noise, await answer(client, num_tasks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], "--native" in sys.argv))
