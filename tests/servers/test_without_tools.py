"""A whole service whose model has no parser: plain chat and tasks are served, tools are refused on entry."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import UnsupportedParameter
from agentloop.types import Limits, Message, RolloutTask
from tests.support.service.whole_service import simulated_config, whole_service

TASK = RolloutTask(
    "t", (Message("user", "What is 2 + 3?"),), loop="single_turn", limits=Limits(max_tokens_per_turn=8)
)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


async def test_a_service_without_tools_serves_plain_chat_and_refuses_tools(tmp_path: Path) -> None:
    config = simulated_config(chat={"parser": "none"})
    async with whole_service(config, tmp_path) as url, RolloutClient(url) as client:
        [record] = [trajectory async for trajectory in await client.submit([TASK])]
        assert record.is_complete
        with pytest.raises(UnsupportedParameter, match="no parser reads its calls") as refused:
            await client.submit([TASK, RolloutTask("u", TASK.messages, tools=("calculator",))])
        assert refused.value.param == "tasks.1.tools"
        asked = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as sdk:
            assert (await sdk.chat.completions.create(**asked)).choices[0].message.content is not None
            for choice in ("auto", "none", "required"):
                with pytest.raises(openai.BadRequestError, match="tool"):
                    await sdk.chat.completions.create(**asked, tools=[TOOL], tool_choice=choice)
