"""Rollouts for TRL, without TRL: rows arrive, hangs and failures are reported by name, a stop leaves nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentloop.api.coordinator import QueueStatus, ServiceStatus, UpdateProgress
from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.errors import AgentLoopError, DeadlineExceeded, InvalidRequest
from agentloop.types import Message, RolloutTask, Trajectory
from agentloop_trainers.service_link import ServiceLink, describe_unavailability
from agentloop_trainers.trl import AsyncRollouts, SyncRollouts
from tests.support.service.trainer_programs import ROOT
from tests.support.service.whole_service import simulated_config, whole_service

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
async def url(tmp_path_factory):
    async with whole_service(simulated_config(), tmp_path_factory.mktemp("run")) as found:
        yield found


def tasks() -> list[RolloutTask]:
    return load_tasks(ROOT / "examples" / "data" / "tasks.jsonl")[:4]


def watched(rollouts: AsyncRollouts, stale_after_s: float, num_rows: int) -> str:
    """Return the error of `check_health`, polled as the trainer does; empty once `num_rows` rows have arrived."""
    rollouts.start()
    deadline_at = time.monotonic() + PATIENCE_S
    while rollouts.rollout_buffer.qsize() < num_rows and time.monotonic() < deadline_at:
        try:
            rollouts.check_health(stale_after_s)
        except AgentLoopError as error:
            return f"{type(error).__name__}: {error.message}"
        time.sleep(0.05)
    return ""


@pytest.mark.slow
async def test_rows_have_one_group_and_an_advantage_of_their_own_and_a_stop_forgets_them(url: str) -> None:
    groups: list[Sequence[Trajectory]] = []
    rollouts = AsyncRollouts(
        url,
        tasks(),
        num_generations=2,
        groups_in_flight=4,
        run_id="run",
        on_group=lambda group, _: groups.append(group),
    )
    assert await asyncio.to_thread(watched, rollouts, PATIENCE_S, 16) == ""
    taken = [rollouts.rollout_buffer.get_nowait() for _ in range(16)]
    for row in taken:
        assert len(row.input_ids) == len(row.completion_mask) == len(row.old_log_probs)
        assert row.completion_mask[0] == 0
        assert (row.old_log_probs[row.completion_mask == 0] == 0).all()
        assert row.model_version == 0
        assert row.prompt[0]["role"] == "user"
        assert row.completion[0]["role"] == "assistant"
    whole = [[row for row in taken if row.group_id == group] for group in {row.group_id for row in taken}]
    assert all(np.isclose(sum(row.advantage for row in rows), 0) for rows in whole if len(rows) == 2)
    assert all(len(group) == 2 for group in groups)
    metrics = rollouts.metrics_queue.get_nowait()
    assert metrics["rollout/staleness"] == (0, 2)
    assert metrics["rollout/failed_share"] == (0, 2)
    await asyncio.to_thread(rollouts.stop)
    assert rollouts.rollout_buffer.empty()
    with pytest.raises(InvalidRequest, match="not started"):
        rollouts.check_health(1.0)
    assert await asyncio.to_thread(watched, rollouts, PATIENCE_S, 1) == ""  # restarted
    assert rollouts.run_id == "run"
    await asyncio.to_thread(rollouts.destroy)
    await asyncio.to_thread(rollouts.destroy)
    assert rollouts.rollout_buffer.empty()
    await gone("agentloop-trainer")
    async with RolloutClient(url) as client:
        async with asyncio.timeout(PATIENCE_S):
            while (await client.status()).queue.num_queued or any(
                one.num_running for one in (await client.status()).rollouts
            ):
                await asyncio.sleep(0.05)


async def gone(name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(one.name == name for one in threading.enumerate()):
            await asyncio.sleep(0.02)


async def test_a_pause_that_holds_is_named_with_its_reason(url: str) -> None:
    rollouts = AsyncRollouts(url, tasks(), num_generations=2, groups_in_flight=2)
    async with RolloutClient(url) as client:
        await client.pause(reason="a disk is changed")
        try:
            said = await asyncio.to_thread(watched, rollouts, 0.2, 1)
        finally:
            await client.resume()
            await asyncio.to_thread(rollouts.destroy)
    assert said.startswith("DeadlineExceeded: no row for")
    assert "paused for" in said
    assert "a disk is changed" in said


async def test_tasks_that_the_service_refuses_end_the_rollout_with_its_words(url: str) -> None:
    unknown = [RolloutTask("t", (Message("user", "Hello"),), tools=("no_such_tool",))]
    rollouts = AsyncRollouts(url, unknown, num_generations=2)
    said = await asyncio.to_thread(watched, rollouts, PATIENCE_S, 1)
    await asyncio.to_thread(rollouts.destroy)
    assert "no_such_tool" in said
    assert not said.startswith("DeadlineExceeded")


async def test_a_rollout_whose_every_trajectory_fails_says_so_instead_of_waiting(url: str) -> None:
    failing = [RolloutTask("t", (Message("user", "Hello"),), loop="tests.parts.trainers.no_such_module:Loop")]
    rollouts = AsyncRollouts(url, failing, num_generations=2)
    said = await asyncio.to_thread(watched, rollouts, PATIENCE_S, 1)
    await asyncio.to_thread(rollouts.destroy)
    assert "no_such_module" in said
    assert not said.startswith("DeadlineExceeded")


class Trainer:
    """The attributes of a GRPOTrainer that a rollout reads."""

    temperature = 1.0

    class processing_class:
        eos_token_id = 2

    class model:
        training = True

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {"train": Lists()}


class Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


async def test_prompts_come_back_in_their_order_each_with_one_completion(url: str) -> None:
    first, second = tasks()[:2]
    rollouts = SyncRollouts(url, [first, second])
    prompts = [[{"role": m.role, "content": m.content} for m in task.messages] for task in (second, first)]
    trainer = Trainer()
    rollouts.attach(trainer)
    repeated = [prompts[0]] * 3 + [prompts[1]] * 3
    columns = await asyncio.to_thread(rollouts, repeated, trainer)
    assert set(columns) == {"prompt_ids", "completion_ids", "logprobs", "env_mask", "agentloop_reward"}
    for ids, logprobs, mask in zip(
        columns["completion_ids"], columns["logprobs"], columns["env_mask"], strict=True
    ):
        assert len(ids) == len(logprobs) == len(mask)
        assert all(logprob <= 0 for logprob in logprobs)
        assert 1 in mask
    assert len({tuple(ids) for ids in columns["prompt_ids"]}) == 2
    assert columns["prompt_ids"][0] == columns["prompt_ids"][2] != columns["prompt_ids"][3]
    assert (
        rollouts.reward(completions=[], agentloop_reward=columns["agentloop_reward"]) == columns["agentloop_reward"]
    )
    with pytest.raises(InvalidRequest, match="no task has this prompt"):
        await asyncio.to_thread(rollouts, [[{"role": "user", "content": "another"}]], trainer)
    trainer.temperature = 0.7
    with pytest.raises(InvalidRequest, match=r"divides logits by 0\.7"):
        rollouts.attach(trainer)
    await asyncio.to_thread(rollouts.close)


def test_tasks_that_a_trainer_cannot_tell_apart_are_refused() -> None:
    task = tasks()[0]
    with pytest.raises(InvalidRequest, match="twice"):
        AsyncRollouts("http://h", [task, task])
    with pytest.raises(InvalidRequest, match="tasks is empty"):
        AsyncRollouts("http://h", [])
    with pytest.raises(InvalidRequest, match="num_generations must be at least 2"):
        AsyncRollouts("http://h", [task], num_generations=1)
    with pytest.raises(InvalidRequest, match="same messages"):
        SyncRollouts("http://h", [task, RolloutTask("other", task.messages)])


def test_a_link_that_is_not_open_says_so() -> None:
    link = ServiceLink("http://h")
    with pytest.raises(InvalidRequest, match="not open"):
        link.push([])
    link.close()


def test_what_holds_an_update_up_is_named() -> None:
    status = ServiceStatus(
        is_ready=False,
        is_paused=False,
        weight_version=3,
        replicas=(),
        num_workers=0,
        rollouts=(),
        updates=(),
        update=UpdateProgress(4, "staging", 2, ("vllm-1: its receiver is dead",)),
        queue=QueueStatus(7, 0, 0, 0, "no replica takes traffic"),
        degraded=tuple(f"replica vllm-{number} is suspect" for number in range(8)),
    )
    said = describe_unavailability(status)
    for part in (
        "version 4 is staging",
        "its receiver is dead",
        "replica vllm-5 is suspect; 2 more",
        "7 are queued",
    ):
        assert part in said
    assert "no replica takes traffic" in said


async def test_a_service_that_does_not_answer_is_a_deadline() -> None:
    link = ServiceLink("http://127.0.0.1:9")
    await asyncio.to_thread(link.open)

    async def hang(_: RolloutClient) -> None:
        await asyncio.sleep(PATIENCE_S)

    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(link.call, hang, 0.05)
    await asyncio.to_thread(link.close)
