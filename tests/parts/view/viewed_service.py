"""A service with everything that the viewer shows: groups, tools, forks, failures, updates, and hostile texts.

`python -m tests.parts.view.viewed_service DIR` keeps one running for inspection.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentloop.client.client import RolloutClient
from agentloop.engine.interface import Engine
from agentloop.rollout.context import LoopContext
from agentloop.simulation.engine import SimulatedEngine
from agentloop.simulation.policy import LatencyModel
from agentloop.types import Limits, Message, RolloutTask, Trajectory
from agentloop_servers.config.service import ServiceConfig
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import POLICY, RENDERER, SPEC, call, ids
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

HOSTILE = "<img src=x onerror=alert(1)> <script>alert(2)</script> <a href=javascript:alert(3)>x</a> \x1b[31m"
_PROMPT = RENDERER.render([Message("user", "?")], [])[-3:]  # the ids at the start of an assistant's turn


class Replies:
    """Replies to a prompt: first a call of the calculator, then a right or wrong answer."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def __call__(self, prompt: Sequence[int]) -> Sequence[int]:
        num_said = sum(list(prompt[at : at + 3]) == _PROMPT for at in range(len(prompt) - 2)) - 1
        chance = self._random.random()
        if num_said == 0:
            asked = call("calculator", expression="19 * 200") if chance < 0.8 else call("calculator", wrong="19")
            return ids(f"I will use the calculator for this, step by step.\n{asked}")
        if num_said == 1 and chance < 0.3:
            return ids(f"Now the other half of it.\n{call('calculator', expression='3800 / 2')}")
        if num_said == 1 and chance < 0.4:
            return ids(f"I do not know. {HOSTILE}")
        return ids(f"The result of it all is this. The answer is {1900 if chance < 0.8 else 1899}")


class Waits:
    """A loop that samples a turn, and then waits outside the engine."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=8)
        await asyncio.sleep(600)


@asynccontextmanager
async def viewed_service(run_dir: Path) -> AsyncIterator[ServiceSite]:
    """Start the service and fill it with data.

    Six groups of four roll out over two weight updates and the death of a replica; one session forks; two
    trajectories stay in progress.
    """
    question = "First multiply 19 by 200, then divide the result by 2."
    tasks = [
        RolloutTask(
            f"two_calls-{number:03}",
            (Message("user", f"{question} {HOSTILE}" if number == 5 else question),),
            ("calculator",),
            reward="exact_match",
            reference="1900",
            limits=Limits(max_tokens_per_turn=16 if number == 3 else 256, timeout_s=60),
        )
        for number in range(6)
    ]
    workers = {"allowed_imports": [__name__], "capacity": 8}
    config = simulated_config(model=str(POLICY), workers=workers, replicas=3)
    engines = list[SimulatedEngine]()

    def build(config: ServiceConfig) -> Engine:
        spec = replace(SPEC, latency=LatencyModel(prefill_s=0.02, decode_s=0.004), num_blocks=1024)
        engines.append(SimulatedEngine(spec, policy=ScriptedPolicy(Replies())))
        return engines[-1]

    async with (
        whole_site(config, run_dir, build, reports=True) as site,
        RolloutClient(site.urls[0]) as client,
    ):
        rollout = await client.submit(tasks, num_samples=4)
        read = list[Trajectory]()
        async for record in rollout:
            read.append(record)
            if len(read) in (4, 12):
                await client.update_weights(POLICY, version=config.model_version + len(read))
            if len(read) == 14:
                engines[0].kill("SIGKILL")
        await _annotate(client, read)
        await _fork(client)
        await _delegate(client)
        await client.submit(
            [RolloutTask("long", (Message("user", "Hi"),), loop=f"{__name__}:Waits")], num_samples=2
        )
        yield site


async def _annotate(client: RolloutClient, records: Sequence[Trajectory]) -> None:
    """Annotate each record with its return and each token with an advantage, like a trainer that has a critic."""
    scored = [(one, one.reward or 0.0) for one in records]
    await client.annotate_all("return", scored)
    spread = np.random.default_rng(7)
    by_token = [
        (one, [spread.normal(score - 0.5, 0.5, len(path.response_ids)) * path.response_mask for path in one.paths])
        for one, score in scored
    ]
    await client.annotate_all("advantage", by_token)


async def _fork(client: RolloutClient) -> None:
    said = [{"role": "user", "content": "What is 2 + 3? Think twice."}]
    async with client.session(task_id="forked") as session:
        for edit in ("", "Be short. ", "Be long. "):
            messages = [{**said[0], "content": edit + said[0]["content"]}, *said[1:]]
            answer = await session.openai.chat.completions.create(model="default", messages=messages, max_tokens=40)
            reply = answer.choices[0].message.content
            said = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]


async def _delegate(client: RolloutClient) -> None:
    """A session whose agent uses the result of a sub-agent, and then continues from a summary."""
    async with client.session(task_id="delegated", task_messages=[Message("user", "Find the sum.")]) as session:

        async def say(messages: list[dict[str, str]], text: str) -> str:
            messages.append({"role": "user", "content": text})
            answer = await session.openai.chat.completions.create(model="default", messages=messages, max_tokens=60)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            return messages[-1]["content"]

        agent: list[dict[str, str]] = []
        helper: list[dict[str, str]] = []
        await say(agent, "Find the sum.")
        await say(helper, "Add the first half.")
        found = await say(helper, "Go on.")
        summary = await say(agent, f"The helper found: {found}")
        compacted: list[dict[str, str]] = []
        await say(compacted, f"Continue from here: {summary}")
        await say(compacted, "Finish.")
        await say([], "Write a title.")
        await session.finish(reward=1.0)


async def _main(run_dir: Path) -> None:
    async with viewed_service(run_dir) as site:
        print(site.urls[0] + "/ui/", flush=True)
        await asyncio.sleep(1e6)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
