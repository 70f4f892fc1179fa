"""Sessions through the client's session object, over the session routes on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest

import agentloop.client.session
from agentloop.client.client import RolloutClient
from agentloop.client.session import AgentSession, _may_bypass
from agentloop.errors import AgentLoopError, InvalidRequest, RewardError
from agentloop.score import PathScore, Score
from agentloop.types import StopReason, Trajectory
from tests.support.endpoint.fake_sessions import FakeSessions, session_service

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture
async def service() -> AsyncIterator[FakeSessions]:
    fake = FakeSessions()
    async with session_service(fake):
        yield fake


@pytest.fixture
async def client(service: FakeSessions) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(service.url, retry_timeout_s=20.0) as client:
        yield client


async def ask(session: AgentSession) -> str:
    completion = await session.openai.chat.completions.create(model="default", messages=QUESTION)
    return completion.choices[0].message.content


async def test_a_session_records_what_its_openai_client_does(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session(task_id="t", group_id="g", sample_index=3) as session:
        assert await ask(session) == "The answer is 5."
        await session.reward(1)
        [seen] = await session.trajectories()
        assert [message.role for message in seen.messages] == ["user", "assistant"]
        status = await session.status()
        assert (status.state, status.num_turns, status.reward) == ("open", 1, 1.0)
    [record] = service.records
    key = (record.rollout_id, record.group_id, record.task_id, record.sample_index)
    assert key == ("sessions", "g", "t", 3)
    assert (record.reward, record.is_complete, record.stop_reason) == (1.0, True, StopReason.COMPLETED)
    assert session.openai.is_closed()


async def test_a_score_travels_by_the_ids_of_its_turns(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session() as session:
        await ask(session)
        await session.reward(Score(metrics={"n": 1}, turn_rewards={"0": 0.5}))
        await session.finish(reward=Score(1, main=PathScore(turns=(None, 2.0), tokens=np.ones(8, np.float32))))
    [record] = service.records
    assert (record.reward, record.metrics, record.reward_error) == (1.0, {"n": 1.0}, None)
    assert [turn.reward for turn in record.path.turns] == [0.5, 2.0]
    assert record.path.token_rewards.tolist() == [1.0] * 8


async def test_a_score_that_does_not_fit_is_told(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session() as session:
        with pytest.raises(RewardError, match="path 0 has 2 turns, but its score has 1"):
            await session.reward(Score(main=PathScore(turns=(1.0,))))
        with pytest.raises(RewardError, match="the reward must be finite"):
            await session.reward(Score(float("inf")))


@pytest.mark.parametrize(
    ("raised", "reason", "text"),
    [
        (ValueError("no\nway"), StopReason.LOOP_FAILED, "ValueError: no"),
        (TimeoutError(), StopReason.DEADLINE, "TimeoutError"),
        (asyncio.CancelledError(), StopReason.CANCELLED, "CancelledError"),
        (SystemExit(3), StopReason.LOOP_FAILED, "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_exception_makes_it_incomplete(service, client, raised, reason, text) -> None:
    with pytest.raises(type(raised)):
        async with client.session():
            raise raised
    [record] = service.records
    assert (record.is_complete, record.stop_reason, record.error) == (False, reason, text)


async def test_a_cancelled_task_finishes_its_session(service: FakeSessions, client: RolloutClient) -> None:
    opened = asyncio.Event()

    async def use() -> None:
        async with client.session():
            opened.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    async with asyncio.timeout(20):
        await opened.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert service.records[0].stop_reason is StopReason.CANCELLED


async def test_finish_gives_the_record_and_repeats(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session(rollout_id="r-1") as session:
        record = await session.finish(reward=0.5)
        assert (await session.finish(reward=0.9)).reward == 0.5
        with pytest.raises(openai.ConflictError):
            await ask(session)
    assert [one.rollout_id for one in service.records] == ["r-1"]
    assert isinstance(record, Trajectory)


async def test_lost_answers_make_no_second_session(service: FakeSessions, client: RolloutClient) -> None:
    service.lost_answers = 1
    async with client.session() as session:
        service.lost_answers = 1
        await session.finish()
    assert (len(service.sessions), len(service.records)) == (1, 1)


async def test_a_cancelled_opening_finishes_the_session_that_the_service_opened(
    service: FakeSessions, client: RolloutClient
) -> None:
    service.may_answer = asyncio.Event()
    opening = asyncio.create_task(client.session().__aenter__())
    while not service.sessions:
        await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.sleep(0)  # the cancellation arrives before the answer
    service.may_answer.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert [record.stop_reason for record in service.records] == [StopReason.CANCELLED]


async def test_the_first_error_is_the_one_that_is_seen(service: FakeSessions) -> None:
    async with RolloutClient(service.url, retry_timeout_s=0.3) as client:

        async def fail() -> None:
            async with client.session():
                service.is_down = True
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        with pytest.raises(AgentLoopError, match="no response"):
            await client.session().__aenter__()


async def test_the_direct_way_is_for_this_host_alone(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session() as session:
        assert session.base_url == f"{service.url}/sessions/{session.session_id}/v1"
    service.direct_url = "http://127.0.0.1:9/sessions/x/v1"
    async with client.session() as session:
        assert session.base_url == service.direct_url


@pytest.mark.parametrize(
    ("own", "direct", "may"),
    [
        ("http://127.0.0.1:8", "http://127.0.0.1:9", True),
        ("http://localhost:8", "http://10.0.0.2:8", True),  # on one node of several
        ("http://10.0.0.1:8", "http://10.0.0.2:8", True),
        ("http://10.0.0.1:8", "http://127.0.0.1:9", False),  # a service on another host
        ("https://rollouts.example", "http://10.0.0.2:8", False),  # possibly a proxy
    ],
)
def test_a_session_is_called_past_no_proxy(own: str, direct: str, may: bool) -> None:
    assert _may_bypass(own, direct) is may


async def test_retries_and_timeout_reach_the_openai_client(service: FakeSessions, client: RolloutClient) -> None:
    async with client.session(max_retries=7, timeout_s=12.5) as session:
        assert (session.openai.max_retries, session.openai.timeout) == (7, 12.5)
        assert session.openai is session.openai
        assert session.openai.api_key == session.api_key == f"sk-{session.session_id}"


async def test_the_control_key_is_used_unseen(service: FakeSessions, client: RolloutClient) -> None:
    """The service refuses rewards and ends without the control key; the agent receives a different key."""
    async with client.session() as session:
        assert session.control_key == f"ck-{session.session_id}" != session.api_key
        await session.reward(0.5)
        await session.revoke()
        assert service.revoked == {session.session_id}
    assert [record.reward for record in service.records] == [0.5]


async def test_wrong_use_is_told_at_once(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequest, match="async with"):
        _ = client.session().base_url
    for wrong in ({"session_id": "no/slash"}, {"sample_index": -1}, {"ttl_s": 0}, {"rollout_id": ""}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            client.session(**wrong)
    async with client.session() as session:
        with pytest.raises(InvalidRequest, match="reward"):
            await session.reward(float("nan"))


async def test_a_trainer_follows_finished_sessions(service: FakeSessions, client: RolloutClient) -> None:
    """The trainer may start before any session exists, and sees each record once."""

    async def play() -> None:
        for _ in range(3):
            await asyncio.sleep(0.1)
            async with client.session(rollout_id="r-2"):
                pass

    async def read() -> list[str]:
        return [record.group_id async for record in client.finished_sessions("r-2", idle_s=1.0)]

    async with asyncio.timeout(60):
        seen, _ = await asyncio.gather(read(), play())
    assert seen == [record.group_id for record in service.records]
    assert len(seen) == 3
    rest = [record.group_id async for record in client.finished_sessions("r-2", after=2, idle_s=0.0)]
    assert rest == seen[2:]


def test_no_http_library_of_openai_is_named() -> None:
    """openai 2 depends on httpx and openai 3 on another library, so our code may name neither."""
    assert "httpx" not in Path(agentloop.client.session.__file__).read_text()
