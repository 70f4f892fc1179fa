"""A judge that shares its GPU: it sleeps until it is asked. First: agentloop serve --config servers/judge.yaml

python examples/05_judge.py http://127.0.0.1:8001 examples/tiny_policy/v0
"""

import asyncio
import sys
from collections.abc import Sequence

from agentloop.client import RolloutClient
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.types import Message

ANSWERS = [("What is 2 + 3?", "The answer is 5."), ("What is 2 + 3?", "The answer is 6.")]
QUESTION = "Question: {}\nAnswer: {}\nIs the answer right? Say yes or no."


async def scores(
    client: RolloutClient, renderer: TemplateRenderer, pairs: Sequence[tuple[str, str]]
) -> list[float]:
    """1 for every answer that the judge finds right, else 0."""
    prompts = [renderer.render([Message("user", QUESTION.format(*pair))], []) for pair in pairs]
    await client.wake()
    try:
        calls = (client.generate(prompt, max_tokens=8, temperature=0.0) for prompt in prompts)
        verdicts = [renderer.decode(verdict.token_ids) for verdict in await asyncio.gather(*calls)]
    finally:
        await client.sleep(level=1)  # its memory is somebody else's until the next call
    return [float("yes" in verdict.lower()) for verdict in verdicts]


async def main(url: str, model_path: str) -> None:
    renderer = TemplateRenderer.from_directory(model_path)
    async with RolloutClient(url) as client:
        await client.sleep(level=1)
        for (question, answer), score in zip(ANSWERS, await scores(client, renderer, ANSWERS), strict=True):
            print(f"{question} {answer}  {score:.0f}")
        print("asleep again:", *sorted((await client.status()).asleep))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
