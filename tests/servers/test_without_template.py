"""A whole service whose model has no chat template: it completes text and tokens, and refuses messages."""

from __future__ import annotations

import shutil
from pathlib import Path

import aiohttp
import openai
import pytest

from agentloop.client.client import RolloutClient
from agentloop.types import Message, RolloutTask
from tests.support.service.whole_service import simulated_config, whole_service

HINT = "set chat.template.file"
TEMPLATE = "examples/tiny_policy/v0/chat_template.jinja"


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """The shipped model without its template."""
    return Path(
        shutil.copytree(
            "examples/tiny_policy/v0", tmp_path / "base", ignore=shutil.ignore_patterns("chat_template.jinja")
        )
    )


async def test_a_base_model_completes_text_and_tokens_and_refuses_messages(
    base_model: Path, tmp_path: Path
) -> None:
    config = simulated_config(model=str(base_model))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    async with whole_service(config, run_dir) as url:
        async with aiohttp.ClientSession(url) as http:
            body = {"token_ids": [5, 6, 7], "sampling": {"max_tokens": 4}}
            async with http.post("/generate", json=body) as answer:
                assert (answer.status, len((await answer.json())["token_ids"])) == (200, 4)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            completion = await sdk.completions.create(model="base", prompt="One plus one is", max_tokens=4)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 4
            with pytest.raises(openai.BadRequestError, match=HINT):
                await sdk.chat.completions.create(
                    model="base", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
                )
        async with RolloutClient(url) as client:
            task = RolloutTask("t", (Message("user", "Hi"),), loop="single_turn")
            [record] = [trajectory async for trajectory in await client.submit([task])]
            assert record.error is not None
            assert HINT in record.error


async def test_the_hint_helps(base_model: Path, tmp_path: Path) -> None:
    config = simulated_config(model=str(base_model), chat={"template": {"file": TEMPLATE}})
    async with (
        whole_service(config, tmp_path) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk,
    ):
        asked = [{"role": "user", "content": "Hi"}]
        answer = await sdk.chat.completions.create(model="base", messages=asked, max_tokens=4)
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 4  # the simulated policy may sample its stop token
