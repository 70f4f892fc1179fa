"""The balancer on a real service: two vLLM replicas on CPU, with KV for a few dozen contexts each.

All tests of this file share one service and run in order; the last one kills a replica.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from agentloop.api.coordinator import ServiceStatus
from agentloop.client.client import RolloutClient
from agentloop.client.rollout import Rollout, load_tasks
from agentloop.errors import WeightVersionNotServed
from agentloop.types import Generation, KVPolicy, RolloutTask, Trajectory, VersionDemand
from agentloop_servers.config.service import MetricsSettings, ServiceConfig, TracingSettings
from agentloop_servers.local import running_service
from tests.parts.contracts.test_sglang_dialect import Sample, SlimeLikeTrainer
from tests.parts.traces.test_spans import attributes_of
from tests.parts.traces.test_tracing import Receiver, receiving
from tests.servers.processes import deployed
from tests.servers.recompute import POLICY, logprobs

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_GROUPS, NUM_SAMPLES = 24, 8
KV_MIB = 8  # 4,096 tokens of the tiny policy


def tasks(count: int, prefix: str) -> list[RolloutTask]:
    """Return tasks of two calculator calls each, so of three turns."""
    shipped = [one for one in load_tasks(ROOT / "examples" / "data" / "tasks.jsonl") if "two_calls" in one.task_id]
    return [replace(shipped[n % len(shipped)], task_id=f"{prefix}{n}") for n in range(count)]


@pytest.fixture(scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as one:
        yield one


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> AsyncIterator[str]:
    config = ServiceConfig.load(ROOT / "servers" / "cpu.yaml")
    engine = config.engine.model_copy(update={"kv_cache_mib": KV_MIB})
    model = str(ROOT / "examples" / "tiny_policy" / "v1")
    shown, tracing = MetricsSettings(engine=True), TracingSettings(endpoint=receiver.url, sample=1.0, engine=True)
    update = {"port": 0, "engine": engine, "model": model, "metrics": shown, "tracing": tracing}
    config = config.model_copy(update=update)
    async with running_service(config, tmp_path_factory.mktemp("run")) as base:
        yield base


@pytest.fixture
async def client(url: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(url) as connected:
        yield connected


@dataclass
class Watched:
    """A rollout's records, and the service's statuses while it ran."""

    records: list[Trajectory] = field(default_factory=list)
    statuses: list[ServiceStatus] = field(default_factory=list)


async def watched(client: RolloutClient, rollout: Rollout) -> Watched:
    found = Watched()

    async def look() -> None:
        while True:
            found.statuses.append(await client.status())
            await asyncio.sleep(0.3)

    looking = asyncio.create_task(look())
    try:
        async with asyncio.timeout(150):
            async for record in rollout:
                found.records.append(record)
    finally:
        looking.cancel()
    found.statuses.append(await client.status())
    return found


def replicas_of(record: Trajectory) -> set[str]:
    return {turn.replica_id for path in record.paths for turn in path.turns}


def assert_complete(run: Watched, num_groups: int, num_samples: int) -> None:
    names = {(one.task_id, one.sample_index) for one in run.records}
    assert len(run.records) == len(names) == num_groups * num_samples
    assert all(one.is_complete for one in run.records)


async def test_the_engines_own_metrics_are_shown_by_replica(client: RolloutClient, url: str) -> None:
    replicas = {one.replica_id for one in (await client.status()).replicas}
    rollout = await client.submit(tasks(4, "shown"))
    async for _ in rollout:
        pass
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        seen: dict[str, float] = {}
        while set(seen) != replicas or not sum(seen.values()):
            await asyncio.sleep(1.0)
            async with http.get(f"{url}/metrics") as answer:
                families = text_string_to_metric_families(await answer.text())
            samples = [one for family in families for one in family.samples]
            seen = {
                one.labels["replica"]: one.value for one in samples if one.name == "vllm:generation_tokens_total"
            }


async def test_the_engines_own_spans_are_within_those_of_the_turns(client: RolloutClient, receiver: Receiver):
    records = [record async for record in await client.submit(tasks(4, "traced"))]

    def spans(name: str) -> list[Span]:
        return [span for span in receiver.spans if span.name.startswith(name)]

    async with asyncio.timeout(60):
        while True:
            turns, own = spans("chat "), [span for span in spans("llm_request") if span.parent_span_id]
            if len(turns) == len(own) >= sum(len(record.path.turns) for record in records):
                break
            await asyncio.sleep(0.5)
    within = {span.parent_span_id: span for span in own}
    for turn in turns:
        told, counted = attributes_of(turn), attributes_of(within[turn.span_id])
        assert within[turn.span_id].trace_id == turn.trace_id
        assert counted["gen_ai.usage.completion_tokens"] == told["gen_ai.usage.output_tokens"]
        assert counted["gen_ai.usage.prompt_tokens"] == told["gen_ai.usage.input_tokens"]


async def test_more_begin_than_were_expected_to_fit_and_find_their_kv(client):
    """Contexts are first expected to grow by 256 tokens; they grow by about 90, and the balancer adapts."""
    run = await watched(client, await client.submit(tasks(NUM_GROUPS, "t"), num_samples=NUM_SAMPLES))
    assert_complete(run, NUM_GROUPS, NUM_SAMPLES)
    queues = [one.queue for one in run.statuses]
    assert any(queue.num_queued and queue.reason.startswith("no KV capacity") for queue in queues)
    most = Counter[str]()
    for status in run.statuses:
        most |= Counter({one.replica_id: one.num_leases for one in status.replicas})
    assert len(most) == 2
    assert min(most.values()) >= 25, most
    rates = [one.kv_hit_rate for one in run.statuses[-1].replicas]
    print(f"\nmost at a time {most}, hit rates {rates}")
    assert all(rate is not None and rate >= 0.9 for rate in rates)


async def test_a_demanded_version_is_the_one_that_samples(client: RolloutClient) -> None:
    """Version n has the weights of v0 or v1 for even or odd n; a wrong version differs by far more than 0.02."""
    num_callers, num_calls, num_updates = 25, 80, 20
    first = (await client.status()).weight_version
    assert first is not None
    last, refused, answers = first + num_updates, Counter[str](), list[tuple[tuple[int, ...], Generation]]()

    async def train() -> None:
        for version in range(first + 1, last + 1):
            await asyncio.sleep(0.5)
            folder = POLICY / f"v{version % 2}"
            await client.update_weights(folder, version=version, kv_policy=KVPolicy.RECOMPUTE)

    wrongly = 0

    async def call(rng: Random) -> None:
        nonlocal wrongly
        for _ in range(num_calls):
            served = (await client.status()).weight_version or first
            version, wait_s = max(0, served + rng.choice((-1, 0, 0, 0, 1))), rng.choice((0.0, 2.0))
            demand = rng.choice((VersionDemand(version, None, wait_s), VersionDemand(None, version, wait_s)))
            prompt, num_tokens = tuple(rng.choices(range(64), k=12)), rng.randint(4, 48)
            try:
                answer = await client.generate(prompt, max_tokens=num_tokens, weight_version=demand)
            except WeightVersionNotServed as error:
                refused[f"after {wait_s:g} s"] += 1
                wrongly += any(map(demand.accepts, (error.details or {})["served"]))
                continue
            assert all(demand.accepts(span.version) for span in answer.weight_versions), demand
            answers.append((prompt, answer))

    callers = [asyncio.create_task(call(Random(number))) for number in range(num_callers)]
    await asyncio.gather(train(), *callers)
    worst = 0.0
    for prompt, answer in answers:
        for span in answer.weight_versions:
            folder = POLICY / ("v1" if span.version == first else f"v{span.version % 2}")  # it started with v1
            named = logprobs([*prompt, *answer.token_ids], folder)[len(prompt) :]
            recorded = answer.logprobs[span.start : span.end]
            worst = max(worst, np.abs(named[span.start : span.end] - recorded).max())
    mixed = sum(len(answer.weight_versions) > 1 for _, answer in answers)
    print(f"\n{len(answers)} answered, {mixed} over updates, refused {dict(refused)}, worst difference {worst:.5f}")
    assert len(answers) + refused.total() == num_callers * num_calls
    assert worst <= 0.02
    assert (refused.total() > 0, wrongly) == (True, 0)


async def test_scores_are_those_of_transformers_in_every_dialect(client: RolloutClient, url: str) -> None:
    """For text that the policy sampled and text that it would never sample; all dialects give the same numbers."""
    shipped, random = POLICY / "v1", Random(3)
    said = await client.generate(range(5, 45), max_tokens=64, seed=1)
    batch = [[*range(5, 45), *said.token_ids]]
    batch += [[random.randrange(1024) for _ in range(size)] for size in (2, 256, 257, 600, 1023)]
    scores = await client.score(batch, top_k=2)
    for ids, found in zip(batch, scores, strict=True):
        assert list(found.token_ids) == ids[1:]
        assert np.abs(np.array(found.logprobs) - logprobs(ids, shipped)[1:]).max() < 0.02
    assert np.abs(np.subtract(scores[0].logprobs[39:], said.logprobs)).max() < 0.02
    async with aiohttp.ClientSession(url) as http:

        async def posted(path: str, body: dict[str, Any]) -> Any:
            async with http.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        for ids, found in zip(batch, scores, strict=True):
            sglang = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
            of_sglang = await posted("/generate", {**sglang, "sampling_params": {"max_new_tokens": 0}})
            sampling = {"max_tokens": 1, "prompt_logprobs": 0}
            of_vllm = await posted("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
            text = {"model": "default", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
            of_openai = await posted("/v1/completions", text)
            told = [
                [one[0] for one in of_sglang["meta_info"]["input_token_logprobs"]],
                [one and one[str(ids[at])]["logprob"] for at, one in enumerate(of_vllm["prompt_logprobs"])],
                of_openai["choices"][0]["logprobs"]["token_logprobs"],
            ]
            for one in told:
                assert one[0] is None
                assert np.abs(np.subtract(one[1:], found.logprobs)).max() < 1e-4  # in another batch


async def test_a_trainer_of_sglangs_dialect(client: RolloutClient, url: str) -> None:
    """Partial samples are resumed, with an update in between: logprobs match the weights of each span's version."""
    served = (await client.status()).weight_version
    assert served is not None
    folders = {str(served + 1): POLICY / "v1", str(served + 2): POLICY / "v0"}
    async with aiohttp.ClientSession() as http:
        trainer = SlimeLikeTrainer(http, url)
        assert await trainer.attach() == 2

        async def update(version: str) -> None:
            await trainer.control("/pause_generation", mode="in_place")
            folder = str(folders[version])
            await trainer.control("/update_weights_from_disk", model_path=folder, weight_version=version)
            await trainer.control("/continue_generation")

        async def half_way(samples: list[Sample], num_tokens: int) -> list[asyncio.Task[Sample]]:
            running = [asyncio.create_task(trainer.generate(sample, num_tokens)) for sample in samples]
            await asyncio.sleep(1.5)
            assert not any(one.done() for one in running)
            return running

        await update(str(served + 1))
        samples = [Sample(f"s-{number}", [number + 5, *range(20, 31)]) for number in range(6)]
        running = await half_way(samples, 1500)
        await trainer.abort_until_idle()
        await asyncio.gather(*running)
        assert all(sample.status == "aborted" and len(sample.response) > 0 for sample in samples)
        partial = [list(sample.response) for sample in samples]
        running = await half_way(samples, 1500)
        await update(str(served + 2))
        await asyncio.sleep(1.0)
        await trainer.abort_until_idle()
        await asyncio.gather(*running)
    worst = 0.0
    for sample, before in zip(samples, partial, strict=True):
        assert sample.response[: len(before)] == before
        assert {version for version, _, _ in sample.spans} == {*folders}
        for version, start, end in sample.spans:
            whole = logprobs([*sample.prompt, *sample.response], folders[version])[len(sample.prompt) :]
            worst = max(worst, np.abs(whole[start:end] - np.array(sample.logprobs[start:end])).max())
    print(f"\n{sum(len(one.response) for one in samples)} tokens, worst difference {worst:.5f}")
    assert worst <= 0.02


async def test_a_killed_replicas_trajectories_go_on_elsewhere_and_nothing_is_lost(client):
    rollout = await client.submit(tasks(NUM_GROUPS, "k"), num_samples=NUM_SAMPLES)
    running = asyncio.create_task(watched(client, rollout))
    async with asyncio.timeout(60):
        while not _is_under_way(await client.status(), rollout.rollout_ids[0]):
            await asyncio.sleep(0.1)
    os.kill(deployed("EngineReplica")[0], signal.SIGKILL)
    run = await running
    assert_complete(run, NUM_GROUPS, NUM_SAMPLES)
    assert {one.attempt for one in run.records} == {0}, "none was begun again"
    num_leases: dict[str, int] = {}  # the leases of each replica at the last status that showed it as ready
    for status in run.statuses:
        num_leases.update({one.replica_id: one.num_leases for one in status.replicas if one.state == "ready"})
    ready = {one.replica_id for one in run.statuses[-1].replicas if one.state == "ready"}
    gone = num_leases.keys() - ready
    moved = sum(num_leases[name] for name in gone)
    num_both = sum(len(replicas_of(one)) == 2 for one in run.records)
    print(f"\nleases of the lost replica: {moved}, records with turns on both: {num_both}")
    assert len(gone) == 1
    assert moved >= 5
    (lost,) = gone
    assert sum(one.num_leases for one in run.statuses[-1].replicas if one.replica_id == lost) == 0


def _is_under_way(status: ServiceStatus, rollout_id: str) -> bool:
    """Return True if some trajectories have ended and both replicas have others."""
    (rollout,) = (one for one in status.rollouts if one.rollout_id == rollout_id)
    return rollout.num_finished >= NUM_SAMPLES and min(one.num_leases for one in status.replicas) >= NUM_SAMPLES
