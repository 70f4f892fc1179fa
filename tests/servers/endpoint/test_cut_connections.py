"""Agents with retries talk to the endpoint while connections are cut at random; a checker tests the histories.

It compares the answers that the agents received with the turns that their sessions recorded: no turn is doubled or
lost, and every answer matches token for token. Each attempt samples other tokens, so an answer that differs from
the recorded one is detected.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from agentloop.trajectory.node import ModelCallState
from tests.support.endpoint.chat_service import MODEL, ChatService, chat_service
from tests.support.endpoint.cutting_proxy import Cut, CuttingProxy, cutting

NUM_TURNS = 9  # per session; in every third turn a sub-agent calls too
CALLS_PER_SESSION = NUM_TURNS + NUM_TURNS // 3
MAX_TOKENS = 12
CUT_RATE = 0.05
MAX_TRIES = 8

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of a prompt, and those that were sampled from it."""


@dataclass
class History:
    """The view of one agent on its session."""

    answers: list[Turn] = field(default_factory=list)
    turn_ids: list[str] = field(default_factory=list)

    def note(self, prompt_ids: list[int], token_ids: list[int], session: dict[str, Any]) -> None:
        self.turn_ids += session["turn_ids"]
        self.answers.append((tuple(prompt_ids), tuple(token_ids)))


class Agent:
    """Calls one session, with a new connection per call.

    The SDK repeats calls that fail before an answer begins. If a stream breaks later, the agent repeats the call,
    with the count that marks a retry.
    """

    def __init__(self, client: openai.AsyncOpenAI, session_id: str, *, is_streaming: bool) -> None:
        self.session_id = session_id
        self.history = History()
        self._is_streaming = is_streaming
        self._client = client.with_options(base_url=f"{str(client.base_url).rstrip('/')}/sessions/{session_id}/v1")

    async def run(self) -> None:
        messages: list[Any] = [{"role": "system", "content": f"agent {self.session_id}"}]
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"step {turn}"})
            sub_agents = [[{"role": "user", "content": f"task {turn}"}]] if turn % 3 == 0 else []
            reply, *_ = await asyncio.gather(*map(self._ask, [messages, *sub_agents]))
            messages.append(reply)

    async def _ask(self, messages: list[Any]) -> dict[str, Any]:
        if not self._is_streaming:
            return await self._call(messages)
        for count in range(MAX_TRIES):
            try:
                return await self._stream(messages, {"x-stainless-retry-count": str(count)} if count else {})
            except openai.APIConnectionError:
                continue
        raise AssertionError("every try was cut")

    async def _call(self, messages: list[Any]) -> dict[str, Any]:
        answer = await self._client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=MAX_TOKENS, extra_body={"return_token_ids": True}
        )
        [choice], extras = answer.choices, answer.model_extra
        assert choice.model_extra
        assert extras
        self.history.note(extras["prompt_token_ids"], choice.model_extra["token_ids"], extras["session"])
        return {"role": "assistant", "content": choice.message.content}

    async def _stream(self, messages: list[Any], headers: dict[str, str]) -> dict[str, Any]:
        """Run one attempt. Raises APIConnectionError if the answer ends before its finish."""
        # The SDK would repeat the request with this agent's retry count, which only another client could send.
        chunks = await self._client.with_options(max_retries=0).chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=MAX_TOKENS,
            stream=True,
            extra_body={"return_token_ids": True},
            extra_headers=headers,
        )
        content, token_ids, last = "", [], {}
        async with chunks:
            async for chunk in chunks:
                [choice] = chunk.choices
                content += choice.delta.content or ""
                token_ids += (choice.model_extra or {}).get("token_ids") or []
                if choice.finish_reason is not None:
                    last = chunk.model_extra or {}
        if not last:
            raise openai.APIConnectionError(request=chunks.response.request)
        self.history.note(last["prompt_token_ids"], token_ids, last["session"])
        return {"role": "assistant", "content": content}


def recorded(trajectory: dict[str, Any]) -> Iterator[Turn]:
    """Yield every turn of a trajectory once, after checking that its prompt is the path before it."""
    for path in trajectory["paths"]:
        ids = (*path["prompt_ids"], *path["response_ids"])
        num_prompt = len(path["prompt_ids"])
        for turn in path["turns"]:
            start, end = num_prompt + turn["start"], num_prompt + turn["end"]
            assert turn["prompt_len"] == start
            if end > path["num_shared"]:
                assert all(path["response_mask"][turn["start"] : turn["end"]])
                yield ids[:start], ids[start:end]


async def finished(service: ChatService, session_id: str) -> Any:
    """Finish a session with its control key."""
    control = {"authorization": f"Bearer {service.sessions.keys.control_key(session_id)}"}
    return await service.call("POST", f"/sessions/{session_id}/finish", json={}, headers=control)


async def check_history(service: ChatService, session_id: str, history: History) -> None:
    """Check that the session has exactly the turns that its agent received, each once."""
    facts = (await service.call("GET", f"/sessions/{session_id}"))[1]
    assert facts["is_complete"]
    assert facts["num_turns"] == len(history.answers) == len(set(history.turn_ids))
    [trajectory] = (await finished(service, session_id))[1]
    assert trajectory["is_complete"]
    assert Counter(recorded(trajectory)) == Counter(history.answers)


def check_schedule(proxy: CuttingProxy, num_calls: int) -> None:
    """Check that the run had cuts of every kind, about as many as requested."""
    assert proxy.num_connections >= num_calls
    assert set(proxy.cuts) == set(Cut)
    assert 0.5 < proxy.cuts.total() / proxy.num_connections / CUT_RATE < 1.5


@pytest.mark.parametrize(
    "num_sessions", [pytest.param(24, marks=pytest.mark.slow), pytest.param(168, marks=pytest.mark.long)]
)
async def test_no_turn_is_doubled_or_lost_when_connections_are_cut(tmp_path: Path, num_sessions: int) -> None:
    async with (
        chat_service(tmp_path, decode_s=0.001) as service,
        cutting(service.port, CUT_RATE, 4) as (url, proxy),
    ):
        client = openai.AsyncOpenAI(
            base_url=url,
            api_key="none",
            max_retries=MAX_TRIES,
            timeout=60.0,
            default_headers={"Connection": "close"},
        )
        agents = [Agent(client, f"agent-{i}", is_streaming=i % 2 == 0) for i in range(num_sessions)]
        for agent in agents:
            await service.call("POST", "/sessions", json={"session_id": agent.session_id})
        async with client, asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
        check_schedule(proxy, num_sessions * CALLS_PER_SESSION)
        num_failed = 0
        for agent in agents:
            session = await service.sessions.find(agent.session_id, None)
            num_failed += sum(call.state is ModelCallState.FAILED for call in session.calls)
            await check_history(service, agent.session_id, agent.history)
        assert num_failed > 0  # some calls were cancelled and repeated
        load = service.engine.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert len(service.coordinator.finished["sessions"]) == num_sessions


async def test_a_call_that_is_given_up_leaves_its_session_incomplete_until_it_is_made_good(tmp_path: Path) -> None:
    async with chat_service(tmp_path, decode_s=0.02) as service:
        for session_id in ("lost", "healed"):
            await service.call("POST", "/sessions", json={"session_id": session_id})
            path = f"/sessions/{session_id}/v1/chat/completions"
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "min_tokens": 50}
            body = {**asked, "max_tokens": 50, "return_token_ids": True}
            leaving = asyncio.create_task(service.call("POST", path, json=body))
            async with asyncio.timeout(60):
                while service.engine.load().num_running == 0:
                    await asyncio.sleep(0.005)
                leaving.cancel()
                while service.engine.load().num_running:
                    await asyncio.sleep(0.005)
            if session_id == "healed":
                again = await service.call("POST", path, json=body, headers={"x-stainless-retry-count": "1"})
        [lost] = (await finished(service, "lost"))[1]
        assert (lost["is_complete"], list(recorded(lost))) == (False, [])
        [healed] = (await finished(service, "healed"))[1]
        answer = again[1]
        turn = (tuple(answer["prompt_token_ids"]), tuple(answer["choices"][0]["token_ids"]))
        assert (healed["is_complete"], list(recorded(healed))) == (True, [turn])
