"""A verifiers taskset as rollouts: its harness is the agent, sessions of a running service are its model.

One process runs all samples. It lives in an environment of its own, with `uv` on the PATH to run harnesses:

    uv venv vf && uv pip install --python vf/bin/python verifiers==0.4.0 agentloop-rollouts
    vf/bin/python examples/12_verifiers.py my-taskset http://127.0.0.1:8600 8

Here 8 samples of each task; each is a session of my-taskset/INDEX, with the reward that verifiers gives it.
"""

import asyncio
import os
import sys
import uuid
from dataclasses import dataclass

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig

from agentloop.agents.program import AgentPlace, AgentProgram
from agentloop.agents.runner import AgentRecord, run_agents
from agentloop.client.client import RolloutClient
from agentloop.types import Message, RolloutTask


@dataclass
class HarnessRunner:
    """Runs tasks of one taskset on the event loop that serves it."""

    env: SingleAgentEnv

    async def run(self, place: AgentPlace) -> float:
        """Run one task in its harness, and return the reward that verifiers gives it."""
        (task,) = self.env.taskset.include(idx=[place.task.task_id.rpartition("/")[2]])
        variable = f"KEY_{uuid.uuid4().hex}"  # verifiers reads keys from the environment only
        os.environ[variable] = place.api_key
        try:
            client = vf.EvalClientConfig(base_url=place.base_url, api_key_var=variable)
            episode = await self.env.run_episode(task, vf.ModelContext(model="default", client=client))
        finally:
            del os.environ[variable]
        if problems := [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            raise RuntimeError(str(problems[0]))
        return float(episode.traces[0].reward)

    def close(self) -> None:
        """Hold nothing."""


async def main(taskset: str, url: str, samples: str) -> None:
    """Run every task of a taskset, and print the reward or the error of each sample."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    said = [(Message("user", str(one.data.prompt)),) for one in env.taskset]
    tasks = [RolloutTask(f"{taskset}/{place}", messages) for place, messages in enumerate(said)]
    program = AgentProgram(taskset, HarnessRunner(env))
    async with RolloutClient(url) as client, env.serving():
        run = await run_agents(client, program, tasks, num_samples=int(samples), on_record=show)
    print("rollout", run.rollout_id)


def show(record: AgentRecord) -> None:
    print(record.task_id, record.sample_index, record.error or record.trajectory.reward, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
