"""The client of vLLM's token route in `renderers`: it renders, samples ids and checks the name of every logprob."""

import asyncio
from pathlib import Path

from openai import AsyncOpenAI
from renderers.base import create_renderer, load_tokenizer
from renderers.client import OverlongPromptError, generate
from support import QUESTION, Session, service_url

POLICY = Path(__file__).resolve().parents[3] / "examples" / "tiny_policy" / "v1"


async def main(url: str) -> None:
    """Run two turns in a session; the path names the session, so the client's own header has no effect."""
    session = Session(url, "renderers")
    tokenizer = load_tokenizer(str(POLICY))
    renderer = create_renderer(tokenizer)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        model = (await client.models.list()).data[0].id
        common = {"client": client, "renderer": renderer, "model": model, "cache_salt": "1"}
        sampling = {"max_tokens": 48, "temperature": 1.0}
        headers = {"X-Session-ID": "trace/1"}
        first = await generate(
            messages=[{"role": "user", "content": QUESTION}],
            sampling_params=sampling,
            extra_headers=headers,
            **common,
        )
        turns = [(first["prompt_ids"], first["completion_ids"])]
        more = tokenizer.encode(QUESTION, add_special_tokens=False)
        second = await generate(
            messages=[],
            prompt_ids=[*first["prompt_ids"], *first["completion_ids"], *more],
            sampling_params=sampling,
            extra_headers=headers,
            **common,
        )
        turns.append((second["prompt_ids"], second["completion_ids"]))
        for turn in (first, second):
            assert len(turn["completion_logprobs"]) == len(turn["completion_ids"]) > 0
            assert turn["finish_reason"] in ("stop", "length", "tool_calls")
        too_long = None
        try:
            await generate(messages=[], prompt_ids=[5] * 100_000, **common)
        except OverlongPromptError as error:
            too_long = error
        assert too_long is not None  # `GET /v1/models` reported the maximum length
    session.report(2, served=turns)


asyncio.run(main(service_url()))
