"""Policy failures in agent sessions are recorded as data, through the real endpoint over a simulated engine."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import openai
import pytest

from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import AgentRecord, run_agents
from agentloop.client.client import RolloutClient
from agentloop.score import PathScore, Score
from agentloop.types import FinishReason, Message, RolloutTask, StopReason, Trajectory
from tests.support.endpoint.chat_service import SPEC, ChatService, chat_service
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import call, turns
from tests.support.records.samples import counted

CONTEXT = 400
SMALL = replace(SPEC, max_context_tokens=CONTEXT)
GOOD = call("calculator", expression="2 + 3")
UNREADABLE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": 2 +}}\n</tool_call>'
NAMELESS = '<tool_call>\n{"title": 5}\n</tool_call>'
LONG = "many words " * CONTEXT
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
ANTHROPIC_TOOL = {"name": "calculator", "input_schema": {"type": "object"}}
TASK = RolloutTask("t", (Message("user", "What is 2 + 3?"),), reward="exact_match", reference="5")

Agent = Callable[[RolloutTask, str, str], Awaitable[Any]]


numbers = count()


class AgentSite:
    """The service of this module. Each test sets the replies of its engine."""

    def __init__(self) -> None:
        self.script = turns("")
        self.policy = ScriptedPolicy(lambda ids: self.script(ids))
        self.service: ChatService

    @asynccontextmanager
    async def saying(self, *replies: str) -> AsyncIterator[RolloutClient]:
        self.script = turns(*replies)
        async with RolloutClient(self.service.url, retry_timeout_s=5.0) as client:
            yield client

    async def run(
        self, agent: Agent, *replies: str, task: RolloutTask = TASK, **options: Any
    ) -> tuple[AgentRecord, Trajectory]:
        """One agent run and the record that the service stores for it."""
        records: list[AgentRecord] = []
        rollout_id = f"r{next(numbers)}"
        async with self.saying(*replies) as client:
            with AgentProgram.of(agent) as program:
                await run_agents(
                    client, program, [task], rollout_id=rollout_id, on_record=records.append, **options
                )
        [kept] = self.service.coordinator.finished[rollout_id]
        [record] = records
        assert record.trajectory is not None
        assert record.trajectory.stop_reason == kept.stop_reason
        return record, kept


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AgentSite]:
    site = AgentSite()
    async with chat_service(tmp_path_factory.mktemp("service"), spec=SMALL, policy=site.policy) as site.service:
        yield site


async def asked(base_url: str, api_key: str, messages: list[Any], **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0]


def anthropic_client(base_url: str, api_key: str) -> Any:
    """A client of the Anthropic SDK, imported only in the process of these tests: this takes over a second."""
    sdk = importlib.import_module("anthropic")
    return sdk.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)


# Full context


async def calls_with_a_long_result(task: RolloutTask, base_url: str, api_key: str) -> None:
    """An agent whose tool returns more than the context holds. It stops when a reply contains no call."""
    messages: list[Any] = [QUESTION]
    while (choice := await asked(base_url, api_key, messages, tools=[TOOL])).message.tool_calls:
        messages.append(choice.message)
        messages += [{"role": "tool", "tool_call_id": one.id, "content": LONG} for one in choice.message.tool_calls]
    assert (choice.finish_reason, choice.message.content) == ("length", "")


async def test_a_session_that_overflows_is_complete_and_rewarded(site: AgentSite) -> None:
    record, kept = await site.run(calls_with_a_long_result, GOOD)
    assert (record.error, record.reward_error) == (None, None)
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.MAX_CONTEXT, True, 0.0)
    assert (kept.is_truncated, len(kept.paths), len(kept.path.turns)) == (True, 1, 1)
    assert kept.path.is_trainable
    assert kept.path.response_mask.all()  # the prompt that did not fit is not part of any path


async def test_an_agent_that_asked_for_the_error_and_died_of_it_is_rewarded_too(site: AgentSite) -> None:
    record, kept = await site.run(calls_with_a_long_result, GOOD, on_overflow="error")
    assert record.error is not None
    assert "BadRequestError" in record.error
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.MAX_CONTEXT, True, 0.0)
    assert kept.error == record.error


async def test_every_dialect_says_that_a_limit_cut_it(site: AgentSite) -> None:
    async with site.saying("Perhaps 4.") as client, client.session() as session:
        key, url = session.api_key, session.base_url
        assert (await asked(url, key, [QUESTION])).finish_reason == "stop"
        messages: list[Any] = [QUESTION, {"role": "assistant", "content": "Perhaps 4."}]
        messages.append({"role": "user", "content": LONG})
        choice = await asked(url, key, messages, n=2)
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model="m", messages=messages, stream=True)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason == "length"
            assert not any(chunk.choices[0].delta.content for chunk in chunks)
            assert chunks[-1].model_extra["session"]["is_overflow"]
            response = await sdk.responses.create(model="m", input=messages)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            raw = await sdk.completions.with_raw_response.create(model="m", prompt="the text before")
            assert raw.status_code == 200
            with pytest.raises(openai.BadRequestError):
                await sdk.completions.create(model="m", prompt=LONG)
        async with anthropic_client(url, key) as sdk:
            message = await sdk.messages.create(model="m", messages=messages, max_tokens=9)
            assert message.stop_reason == "max_tokens"
            assert message.usage.output_tokens == 0


async def test_an_agent_that_goes_on_with_less_was_not_ended_by_it(site: AgentSite) -> None:
    rollout_id = f"r{next(numbers)}"
    async with site.saying("Perhaps 4.") as client:
        async with client.session(rollout_id=rollout_id) as session:
            await asked(session.base_url, session.api_key, [QUESTION])
            await asked(session.base_url, session.api_key, [QUESTION, {"role": "user", "content": LONG}])
            assert (await session.status()).policy_failure == "max_context"
            await asked(session.base_url, session.api_key, [QUESTION])
            assert (await session.status()).policy_failure is None
        [kept] = site.service.coordinator.finished[rollout_id]
    assert (kept.stop_reason, kept.is_complete) == (StopReason.COMPLETED, True)


async def test_a_first_prompt_that_is_too_long_is_refused(site: AgentSite) -> None:
    async with site.saying("Perhaps 4.") as client, client.session() as session:
        with pytest.raises(openai.BadRequestError, match="leaves no room"):
            await asked(session.base_url, session.api_key, [{"role": "user", "content": LONG}])
        assert (await session.status()).policy_failure is None


# Unreadable calls


async def runs_its_tools(task: RolloutTask, base_url: str, api_key: str) -> str | None:
    """An agent that raises on an unknown tool, as agent frameworks do."""
    messages: list[Any] = [QUESTION]
    while (choice := await asked(base_url, api_key, messages, tools=[TOOL])).message.tool_calls:
        messages.append(choice.message)
        for one in choice.message.tool_calls:
            if one.function.name != "calculator":
                raise LookupError(f"tool {one.function.name!r} not found")
            messages.append({"role": "tool", "tool_call_id": one.id, "content": "5"})
    return None


@pytest.mark.parametrize("written", [UNREADABLE, NAMELESS], ids=["arguments", "name"])
async def test_an_unreadable_call_is_content_and_the_session_says_so(site: AgentSite, written: str) -> None:
    record, kept = await site.run(runs_its_tools, GOOD, written)
    assert record.error is None
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.MALFORMED_CALL, True, 0.0)
    assert (len(kept.paths), kept.num_tool_calls, kept.is_truncated) == (1, 2, False)
    assert kept.messages[-1] == Message("assistant", written)
    assert counted(site.service.sessions.parts.tally)["malformed_calls_total", ("",)] >= 1


async def test_a_framework_that_dies_of_an_unreadable_call_loses_no_reward(site: AgentSite) -> None:
    record, kept = await site.run(runs_its_tools, GOOD, NAMELESS, on_malformed_call="tool_call")
    assert record.error == "LookupError: tool '' not found"
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.MALFORMED_CALL, True, 0.0)
    assert (kept.error, kept.path.is_trainable) == (record.error, True)
    assert kept.messages[-1].tool_calls[0].text == NAMELESS


async def test_an_agent_that_fails_by_itself_is_incomplete_as_before(site: AgentSite) -> None:
    async def fails(task: RolloutTask, base_url: str, api_key: str) -> None:
        await asked(base_url, api_key, [QUESTION])
        raise OSError("the disk is full")

    record, kept = await site.run(fails, "Perhaps 4.")
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.LOOP_FAILED, False, None)
    assert not kept.path.is_trainable
    assert record.error == kept.error == "OSError: the disk is full"


async def test_an_agent_that_fails_at_a_turn_that_was_cut_is_data(site: AgentSite) -> None:
    async def wants_an_end(task: RolloutTask, base_url: str, api_key: str) -> None:
        choice = await asked(base_url, api_key, [QUESTION], max_tokens=2)
        assert choice.finish_reason == "stop"

    _, kept = await site.run(wants_an_end, "Perhaps 4.")
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.MAX_TOKENS_PER_TURN, True, 0.0)
    assert (kept.is_truncated, kept.path.turns[0].finish_reason) == (True, FinishReason.LENGTH)


async def test_an_agent_that_its_deadline_ends_is_data(site: AgentSite) -> None:
    async def never_ends(task: RolloutTask, base_url: str, api_key: str) -> None:
        await asked(base_url, api_key, [QUESTION])
        await asyncio.Event().wait()

    in_no_time = replace(TASK, limits=replace(TASK.limits, timeout_s=1.5))
    record, kept = await site.run(never_ends, "The answer is 5.", task=in_no_time)
    assert record.error == "the agent did not finish within 1.5 s (limits.timeout_s)"
    assert (kept.stop_reason, kept.is_complete, kept.reward) == (StopReason.DEADLINE, True, 1.0)
    assert (kept.is_truncated, kept.path.is_trainable) == (True, True)


@pytest.mark.parametrize("rewards", [(0.5,), (1.0, 2.0)], ids=["right", "wrong"])
async def test_an_agent_may_return_a_score(site: AgentSite, rewards: tuple[float, ...]) -> None:
    async def scores_itself(task: RolloutTask, base_url: str, api_key: str) -> Score:
        await asked(base_url, api_key, [QUESTION])
        return Score(0.25, {"form": 1.0}, main=PathScore(turns=rewards))

    record, kept = await site.run(scores_itself, "The answer is 5.")
    if len(rewards) == 1:
        assert (kept.reward, kept.components, kept.path.turns[0].reward) == (0.25, {"form": 1.0}, 0.5)
        return
    assert (kept.reward, kept.is_complete, record.error) == (None, True, None)
    assert kept.reward_error == record.reward_error
    assert record.reward_error == (
        "the agent's score: path 0 has 1 turns, but its score has 2 turn rewards: give one per turn"
    )


async def test_the_policy_may_recover(site: AgentSite) -> None:
    async def shows_the_error(task: RolloutTask, base_url: str, api_key: str) -> None:
        messages: list[Any] = [QUESTION]
        choice = await asked(base_url, api_key, messages, tools=[TOOL])
        assert (choice.message.content, choice.message.tool_calls) == (f"So.\n{UNREADABLE}", None)
        messages += [choice.message, {"role": "user", "content": "That is no call."}]
        assert (await asked(base_url, api_key, messages, tools=[TOOL])).message.content == "The answer is 5."

    _, kept = await site.run(shows_the_error, f"So.\n{UNREADABLE}", "The answer is 5.")
    assert (kept.stop_reason, kept.reward, len(kept.paths)) == (StopReason.COMPLETED, 1.0, 1)


async def test_a_stream_shows_an_unreadable_call_as_the_whole_answer_does(site: AgentSite) -> None:
    text = f"First.\n{GOOD}\n{UNREADABLE}\n{GOOD}"
    async with site.saying(text) as client, client.session() as session:
        choice = await asked(session.base_url, session.api_key, [QUESTION], tools=[TOOL])
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL], stream=True)
            content, calls = "", dict[int, list[str]]()
            async for chunk in stream:
                delta = chunk.choices[0].delta
                content += delta.content or ""
                for one in delta.tool_calls or ():
                    calls.setdefault(one.index, []).append(one.function.arguments)
        async with anthropic_client(session.base_url, session.api_key) as sdk:
            said = await sdk.messages.create(model="m", messages=[QUESTION], max_tokens=200, tools=[ANTHROPIC_TOOL])
    assert content == choice.message.content == f"First.\n{UNREADABLE}"
    wanted = [one.function.arguments for one in choice.message.tool_calls]
    assert ["".join(parts) for parts in calls.values()] == wanted
    assert len(wanted) == 2
    assert [block.type for block in said.content] == ["text", "tool_use", "tool_use"]


# Side conversations


async def test_a_side_conversation_leaves_the_reward_to_the_main_one(site: AgentSite) -> None:
    async def with_a_title(task: RolloutTask, base_url: str, api_key: str) -> None:
        await runs_its_tools(task, base_url, api_key)
        system = {"role": "system", "content": "Name this conversation."}
        await asked(base_url, api_key, [system, {"role": "user", "content": "A sum."}])

    _, kept = await site.run(with_a_title, GOOD, "The answer is 5.")
    assert (kept.stop_reason, kept.reward, len(kept.paths)) == (StopReason.COMPLETED, 1.0, 2)
    assert kept.messages[-1].content == "The answer is 5."
    assert [kept.reward_of(place) for place in range(2)] == [1.0, None]


async def test_a_longer_side_conversation_does_not_take_the_place_of_the_tasks_own(site: AgentSite) -> None:
    async def with_a_helper(task: RolloutTask, base_url: str, api_key: str) -> None:
        helper: list[Any] = [{"role": "user", "content": "Look for numbers."}]
        said = await asked(base_url, api_key, helper)
        helper += [{"role": "assistant", "content": said.message.content}, {"role": "user", "content": "More."}]
        await asked(base_url, api_key, helper)
        await asked(base_url, api_key, [{"role": "system", "content": "You add."}, QUESTION])

    _, kept = await site.run(with_a_helper, "The answer is 5.", "There are none.")
    assert [len(path.turns) for path in kept.paths] == [2, 1]
    assert (kept.main_conversation, kept.reward) == ((1,), 1.0)
    assert kept.messages[0].content == "You add."
