"""`play`: one episode in one process, by a script, an external model, or a run's recorded messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest
from agentloop.rollout import Environment, call
from agentloop.rollout.models import ModelCall
from agentloop.testing import play
from agentloop.testing.openai_policy import OpenAIPolicy
from agentloop.types import Message, RolloutTask, StopReason, Trajectory
from tests.support.endpoint.dialect_app import MODEL, dialect_service
from tests.support.engine.scripted import call as written_call
from tests.support.fleet.calculator import calculator
from tests.testing.test_validation import Safe

TASK = next(iter(Safe.tasks()))


def said(record: Trajectory) -> list[tuple[str, str]]:
    return [(one.role, one.content or one.tool_calls[0].name) for one in record.messages]


COURSE = [
    ("user", "Open the safe."),
    ("assistant", "read_note"),
    ("tool", "12"),
    ("assistant", "enter"),
    ("tool", "1 tried"),
    ("assistant", "It is open."),
]


async def test_the_gold_solution_is_played_by_default_and_each_message_is_told_once():
    told: list[Message] = []
    record = await play(Safe, on_message=told.append)
    assert (record.stop_reason, record.reward, said(record)) == (StopReason.COMPLETED, 1.0, COURSE)
    assert tuple(told) == record.messages
    assert (record.path.turns[0].engine, record.is_trained) == ("scripted", True)
    with pytest.raises(InvalidRequest, match="no gold solution"):
        await play(Environment, TASK)


async def test_an_outside_model_gives_the_same_record_without_ids(tmp_path: Path):
    replies = (written_call("read_note"), written_call("enter", code="12"), "It is open.")
    async with dialect_service(tmp_path, *replies) as service:
        policy = OpenAIPolicy(f"{service.url}/v1", MODEL)
        record = await play(Safe, TASK, policy)
        with pytest.raises(InvalidRequest, match="other"):
            await policy.chat(ModelCall("other", (Message("user", "Hi"),)))
        lost = await play(Safe, TASK, OpenAIPolicy(f"{service.url}/v1", "other"))
    assert (record.stop_reason, record.reward, said(record)) == (StopReason.COMPLETED, 1.0, COURSE)
    assert {turn.engine for turn in record.path.turns} == {f"openai:{MODEL}"}
    assert (len(record.path.own_turns), len(record.path.response_ids), record.is_trained) == (3, 0, False)
    assert (lost.stop_reason, lost.is_complete) == (StopReason.LOOP_FAILED, False)
    assert "openai:other" in (lost.error or "")


class Sums(Environment):
    """An environment without tools. Its user asks twice."""

    def open(self, task: RolloutTask) -> None:
        self.num_asked = 0

    def react(self, messages: tuple[Message, ...]) -> str | None:
        self.num_asked += 1
        return "Sure?" if self.num_asked == 1 else None


async def test_a_task_may_name_tools_of_the_service_beside():
    task = RolloutTask(
        "sum", (Message("user", "2 + 3?"),), tools=("calculator",), reference="5", reward="exact_match"
    )
    record = await play(Sums, task, [call("calculator", expression="2 + 3"), "6", "5"], tools=[calculator])
    assert (record.reward, [content for _, content in said(record)[2:]]) == (1.0, ["5", "6", "Sure?", "5"])
