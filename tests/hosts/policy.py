"""A trainer and its prompts on a host: the shipped policy's greedy answers, before and after an update.

    python -m tests.hosts.policy URL [directory|push VERSION]

An even VERSION has the weights of the folder v0, an odd one those of v1. Calls run during the update. Prints JSON.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
from safetensors.torch import load_file
from tokenizers import Tokenizer

from agentloop.client.client import RolloutClient
from agentloop.types import Generation
from tests.hosts.cluster import ADMIN_KEY, KEY

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"
ANSWER_TOKENS = 40
QUESTIONS = ["What is 23 x 17?", "First multiply 19 by 200, then divide the result by 2.", "Reverse 'seldom'."]


class Said(msgspec.Struct):
    """The answers of the service."""

    answers: list[list[int]]
    replica_id: str
    transports: list[str] = []  # transports of an update
    versions: list[int] = []  # versions under which calls sampled during the update


def prompts() -> list[list[int]]:
    """Return the prompts as token ids."""
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    texts = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


async def main(url: str, how: str = "", version: int = 0) -> None:
    async with RolloutClient(url, api_key=KEY, admin_key=ADMIN_KEY) as client:
        said = Said([], "")
        if how:
            await update(client, how, version, said)
        for prompt in prompts():
            generation = await client.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0)
            said.answers.append(list(generation.token_ids))
            said.replica_id = generation.replica_id
        print(msgspec.json.encode(said).decode())


async def update(client: RolloutClient, how: str, version: int, said: Said) -> None:
    """Update the weights while calls run."""
    folder, generations = POLICY / f"v{version % 2}", list[Generation]()

    async def ask(prompt: list[int]) -> None:
        while True:
            generations.append(await client.generate(prompt, max_tokens=4))

    asking = [asyncio.create_task(ask(prompt)) for prompt in prompts()]

    async def until_more() -> None:
        num_before = len(generations)
        while len(generations) < num_before + 2 * len(asking):
            await asyncio.sleep(0.1)

    await until_more()
    weights = folder if how == "directory" else load_file(folder / "model.safetensors")
    report = await client.update_weights(weights, version=version)
    await until_more()
    for task in asking:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert [one.error for one in report.replicas] == [None]
    said.transports = [str(one.transport) for one in report.replicas]
    said.versions = sorted({span.version for one in generations for span in one.weight_versions})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *sys.argv[2:3], *map(int, sys.argv[3:])))
