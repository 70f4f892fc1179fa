"""A verifiers taskset as rollouts: its harness is the agent, and a session of ours its model.

verifiers lives in an environment of its own, with `uv` on the PATH, which its harnesses are run by:

    uv venv vf && uv pip install --python vf/bin/python verifiers==0.4.0
    agentloop rollout --tasks tasks.jsonl --agent-command "vf/bin/python examples/12_verifiers.py"

A task names one of a taskset by its id, TASKSET/INDEX (`my-taskset/17`); verifiers' own reward is the session's.
"""

import asyncio
import json
import os
import urllib.request

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig


async def reward_of(task_id: str, base_url: str) -> float:
    """Run one task of a taskset in its harness, and return the reward that verifiers gives it."""
    taskset, _, index = task_id.rpartition("/")
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")  # it reads keys from there only
    model = vf.ModelContext(model="default", client=client)
    async with env.serving():
        (task,) = env.taskset.include(idx=[index])
        episode = await env.run_episode(task, model)
    if problems := [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
        raise RuntimeError(f"{task_id}: {problems[0]}")
    return float(episode.traces[0].reward)


def main() -> None:
    """Run the task that `agentloop rollout` put into the environment, and post its reward to its session."""
    task_id = json.loads(os.environ["AGENTLOOP_TASK"])["task_id"]
    found = asyncio.run(reward_of(task_id, os.environ["OPENAI_BASE_URL"]))
    headers = {"authorization": f"Bearer {os.environ['AGENTLOOP_SESSION_KEY']}", "content-type": "application/json"}
    body = json.dumps({"reward": found}).encode()
    url = f"{os.environ['AGENTLOOP_SESSION_URL']}/reward"
    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30).close()


if __name__ == "__main__":
    main()
