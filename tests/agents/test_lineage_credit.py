"""Agents that compact their history or start sub-agents: every sampled token gets the trajectory's reward once."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import openai
import pytest

from agentloop.agents.program import AgentProgram
from agentloop.agents.runner import run_agents
from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.types import Credit, Message, RolloutTask, Trajectory
from agentloop_servers.endpoint.calls import MAX_AGENT_CHARS
from tests.support.endpoint.chat_service import ChatService, chat_service
from tests.support.engine.policies import ScriptedPolicy
from tests.support.engine.scripted import RENDERER, ids

REPLIES = {
    "work": "I work on it.",
    "note": "I added the first two numbers of the list: together they are 40.",
    "found": "The sub-agent added all numbers of the list, and found that they are 42.",
    "done": "The answer is 42",
    "title": "Adding numbers",
}
TASK = RolloutTask("t", (Message("user", "Add the list. [work]"),), reward="exact_match", reference="42")
rollouts = count()


def script(prompt: Sequence[int]) -> Sequence[int]:
    """Return the reply that the last `[name]` of the prompt names."""
    return ids(REPLIES[re.findall(r"\[(\w+)\]", RENDERER.decode(prompt))[-1]])


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    async with chat_service(tmp_path_factory.mktemp("service"), policy=ScriptedPolicy(script)) as running:
        yield running


class Talk:
    """One conversation of an agent."""

    def __init__(self, base_url: str, api_key: str, *messages: dict[str, str], **headers: str) -> None:
        self._options: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "default_headers": headers}
        self.messages: list[Any] = list(messages)

    async def say(self, *texts: str) -> str:
        async with openai.AsyncOpenAI(**self._options, max_retries=0) as client:
            for text in texts:
                self.messages.append({"role": "user", "content": text})
                self.answer = await client.chat.completions.create(model="m", messages=self.messages)
                self.messages.append({"role": "assistant", "content": self.answer.choices[0].message.content})
        return self.messages[-1]["content"]

    @property
    def turn_id(self) -> str:
        return self.answer.session["turn_ids"][0]  # type: ignore[attr-defined]


async def record_of(service: ChatService, agent: Any, task: RolloutTask = TASK) -> Trajectory:
    rollout_id = f"r{next(rollouts)}"
    async with RolloutClient(service.url, retry_timeout_s=5.0) as client:
        with AgentProgram.of(agent) as program:
            await run_agents(client, program, [task], rollout_id=rollout_id)
    [record] = service.coordinator.finished[rollout_id]
    assert record.is_complete, record.error
    return record


def credited_tokens(record: Trajectory) -> tuple[int, int]:
    """Return the number of tokens with the trajectory's reward in a mask, and of all sampled tokens."""
    pairs = zip(record.paths, record.path_rewards, strict=True)
    credited = sum(int(path.response_mask.sum()) for path, reward in pairs if reward == record.reward)
    return credited, sum(len(path.turns[-1:]) and path.num_own_sampled_tokens for path in record.paths)


@pytest.mark.parametrize(("num_before", "num_after"), [(3, 2), (2, 6)])
@pytest.mark.parametrize("keeps_task", [True, False])
async def test_compaction(service: ChatService, num_before: int, num_after: int, keeps_task: bool) -> None:
    async def agent(task: RolloutTask, base_url: str, api_key: str) -> None:
        talk = Talk(base_url, api_key)
        first = task.messages[0].content
        await talk.say(first, *["[work]"] * (num_before - 2))
        summary = await talk.say("Summarize. [note]")
        kept = [{"role": "user", "content": first}, {"role": "assistant", "content": "Yes."}] if keeps_task else []
        await Talk(base_url, api_key, *kept).say(
            f"So far: {summary} [work]", *["[work]"] * (num_after - 2), "[done]"
        )

    record = await record_of(service, agent)
    assert record.reward == 1.0  # the reward function received the final answer, not the summary
    assert [path.lineage and path.lineage.kind for path in record.paths] == [None, "compacts"]
    credited, sampled = credited_tokens(record)
    assert credited == sampled == record.num_sampled_tokens
    assert sum(len(path.own_turns) for path in record.paths) == num_before + num_after


async def delegates(task: RolloutTask, base_url: str, api_key: str) -> None:
    talk = Talk(base_url, api_key)
    await talk.say(task.messages[0].content)
    found = await Talk(base_url, api_key).say("agent: [work]", *["[work]"] * 7, "[found]")
    await talk.say(f"The agent: {found} [done]")


@pytest.mark.parametrize(("credit", "rewards"), [
    (Credit.LINEAGE, [1.0, 1.0]), (Credit.MAIN, [None, 1.0]), (Credit.TRAJECTORY, [1.0, 1.0])
])  # fmt: skip
async def test_sub_agents(service: ChatService, credit: Credit, rewards: list[float | None]) -> None:
    record = await record_of(service, delegates, RolloutTask(
        "t", TASK.messages, reward="exact_match", reference="42", credit=credit
    ))  # fmt: skip
    assert (record.credit, record.reward) == (credit, 1.0)
    assert [path.lineage and path.lineage.kind for path in record.paths] == ["delegates", None]
    assert list(record.path_rewards) == rewards
    credited, sampled = credited_tokens(record)
    assert (credited == sampled) is (credit is not Credit.MAIN)


async def test_calls_for_a_title_and_a_commit_message_change_neither_credit_nor_reward(
    service: ChatService,
) -> None:
    async def agent(task: RolloutTask, base_url: str, api_key: str) -> None:
        await Talk(base_url, api_key).say("Name this: add the list. [title]")
        talk = Talk(base_url, api_key)
        answer = await talk.say(task.messages[0].content, "[note]", "[done]")
        await Talk(base_url, api_key).say(f"Commit message for: {answer} {REPLIES['note']} [work]")

    record = await record_of(service, agent)
    assert record.reward == 1.0
    assert [path.lineage and path.lineage.kind for path in record.paths] == ["unrelated", None, "unrelated"]
    assert record.path_rewards == (None, 1.0, None)


async def test_declared_parents(service: ChatService) -> None:
    async def agent(task: RolloutTask, base_url: str, api_key: str) -> None:
        talk = Talk(base_url, api_key)
        await talk.say(task.messages[0].content)
        await Talk(base_url, api_key, **{"x-claude-code-agent-id": "a1"}).say("agent: [work]")
        inner = {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
        await Talk(base_url, api_key, **inner).say("inner agent: [work]")
        await talk.say("[work]")
        await Talk(base_url, api_key, **{"x-parent-turn": talk.turn_id}).say("continue: [work]", "[done]")

    record = await record_of(service, agent)
    links = [path.lineage for path in record.paths]
    assert [link and (link.kind.value, link.parent) for link in links] == [
        ("delegates", 2),
        ("delegates", 0),
        None,
        ("compacts", 2),
    ]
    assert all(link is None or link.is_declared for link in links)
    assert (record.reward, record.path_rewards) == (1.0, (1.0,) * 4)


async def test_the_threads_of_codex_and_the_sessions_of_dynamo_are_agents(service: ChatService) -> None:
    clients = (
        ("x-codex-window-id", "x-codex-parent-thread-id"),
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    )
    for own, parent in clients:

        async def agent(
            task: RolloutTask, base_url: str, api_key: str, own: str = own, parent: str = parent
        ) -> None:
            talk = Talk(base_url, api_key, **{own: "m:0"})
            await talk.say(task.messages[0].content)
            started_by = "m" if own == "x-codex-window-id" else "m:0"
            await Talk(base_url, api_key, **{own: "s:1", parent: started_by}).say("agent: [work]")
            await talk.say("[done]")

        record = await record_of(service, agent)
        assert [path.lineage and path.lineage.kind for path in record.paths] == ["delegates", None]
        assert record.reward == 1.0


async def test_a_declaration_that_cannot_be_right_is_refused_by_its_header(service: ChatService) -> None:
    _, other, _ = await service.call("POST", "/sessions", json={})
    async with openai.AsyncOpenAI(base_url=other["base_url"], api_key=other["api_key"], max_retries=0) as client:
        message = {"role": "user", "content": "[work]"}
        answer = await client.chat.completions.create(model="m", messages=[message])
    of_another_session = answer.session["turn_ids"][0]  # type: ignore[attr-defined]
    _, made, _ = await service.call("POST", "/sessions", json={})
    session_id = made["session_id"]
    claude, parent = "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
    await Talk(made["base_url"], made["api_key"], **{claude: "b", parent: "a"}).say("b [work]")
    for headers, param in (
        ({"x-parent-turn": "nobody"}, "x-parent-turn"),
        ({"x-parent-turn": of_another_session}, "x-parent-turn"),
        ({claude: "a", parent: "a"}, parent),
        ({claude: "a", parent: "b"}, parent),
        ({claude: "x" * (MAX_AGENT_CHARS + 1)}, claude),
        ({"x-parent-kind": "unrelated", "x-parent-turn": "t"}, "x-parent-kind"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await Talk(made["base_url"], made["api_key"], **headers).say("[work]")
        assert refused.value.param == param
    _, session, _ = await service.call("GET", f"/sessions/{session_id}")
    assert session["num_turns"] == 1


async def test_an_unknown_credit_is_refused(service: ChatService) -> None:
    async with RolloutClient(service.url) as client:
        with pytest.raises(InvalidRequest, match="credit"):
            client.session(credit="all")  # type: ignore[arg-type]
