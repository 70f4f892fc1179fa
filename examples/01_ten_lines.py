"""The ten lines a trainer needs. First, in another terminal: agentloop serve --config servers/cpu.yaml

python examples/01_ten_lines.py http://127.0.0.1:8000
"""

import asyncio
import sys

from agentloop.client import RolloutClient, load_tasks


async def main(url: str, version: int = 1) -> None:
    tasks = load_tasks("examples/data/tasks.jsonl")[:16]
    async with RolloutClient(url) as client:
        rollout = await client.submit(tasks, num_samples=2)
        async for trajectory in rollout:
            path = trajectory.path  # prompt_ids, response_ids, response_mask, logprobs, weight_versions
            print(trajectory.task_id, trajectory.reward, len(path.response_ids), trajectory.versions)
        report = await client.update_weights("examples/tiny_policy/v1", version=version)
        print(f"now at version {report.version}; generation paused for {report.stall_ms:.0f} ms")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
