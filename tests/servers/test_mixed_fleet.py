"""A service with two kinds of replicas: placement by capability, common updates, and every record recomputed.

The engines are simulated: `wide` has the longer context and no seeds, `narrow` supports seeds. One test runs all in
one process; another runs a Ray whose `narrow` replicas use another Python environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import openai
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop.simulation.policy import HashPolicy
from agentloop.types import GenerateRequest, Limits, Message, RolloutTask, SamplingParams, TokenPath, Trajectory
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.local import running_service
from tests.servers.processes import deployed
from tests.servers.test_engine_config import second_environment
from tests.support.service.whole_service import whole_site

ROOT = Path(__file__).parents[2]
V0, V1 = ROOT / "examples" / "tiny_policy" / "v0", ROOT / "examples" / "tiny_policy" / "v1"
NARROW_TOKENS = 256


def mixed_config(environment: dict[str, object] | None = None) -> ServiceConfig:
    shared = {"kind": "simulated", "device": "cpu", "num_cpus": 0.1}
    narrow = {**shared, "name": "narrow", "max_context_tokens": NARROW_TOKENS, "block_size": 16}
    return ServiceConfig.model_validate(
        {
            "model": str(V0),
            "kv_policy": "recompute",
            "port": 0,
            "engines": [
                {**shared, "name": "wide", "withheld": ["seed"]},
                {**narrow, "withheld": ["logit_bias"], "environment": environment},
            ],
        }
    )


def tasks(count: int, prefix: str, seed: int | None = None, max_tokens: int = 64) -> list[RolloutTask]:
    limits = Limits(max_tokens_per_turn=max_tokens, timeout_s=120)
    question = (Message("user", "What is 2 + 3?"),)
    return [
        RolloutTask(f"{prefix}{number}", question, limits=limits, seed=None if seed is None else seed + number)
        for number in range(count)
    ]


def recomputed(path: TokenPath, vocab_size: int) -> None:
    """Check that each recorded logprob is the simulated policy's, under the version of its span.

    Under RECOMPUTE, the context of each token is entirely from the token's version.
    """
    ids = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
    stream = HashPolicy(vocab_size).open(GenerateRequest("again", tuple(ids), SamplingParams(1)))
    num_prompt, num_checked = len(path.prompt_ids), 0
    for span in path.weight_versions:
        for place in range(span.start, span.end):
            state = stream.advance(0, ids[: num_prompt + place], span.version)
            expected = stream.raw_logprob(state, span.version, ids[num_prompt + place])
            assert path.logprobs[place] == pytest.approx(expected, abs=1e-5)
            num_checked += 1
    assert num_checked == int(path.response_mask.sum()) > 0
    assert np.isfinite(path.logprobs).all()


def entries_of(records: Sequence[Trajectory]) -> set[str]:
    turns = [turn for record in records for path in record.paths for turn in path.turns]
    assert turns
    assert {turn.engine for turn in turns} == {"simulated"}
    return {turn.replica_id.partition("-")[0] for turn in turns}


async def collect(client: RolloutClient, given: list[RolloutTask], num_samples: int = 1) -> list[Trajectory]:
    rollout = await client.submit(given, num_samples=num_samples)
    async with asyncio.timeout(60):
        return [record async for record in rollout]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[RolloutClient]:
    async with whole_site(mixed_config(), tmp_path) as site, RolloutClient(site.urls[0]) as connected:
        yield connected


async def test_each_task_runs_where_it_can(client: RolloutClient) -> None:
    seeded = await collect(client, tasks(4, "seeded", seed=7), 2)
    free = await collect(client, tasks(8, "free"), 2)
    assert entries_of(seeded) == {"narrow"}
    assert entries_of(free) == {"wide", "narrow"}
    long = await collect(client, tasks(4, "long", max_tokens=NARROW_TOKENS))
    assert entries_of(long) == {"wide"}
    status = await client.status()
    assert {(one.replica_id.partition("-")[0], one.engine) for one in status.replicas} == {
        ("wide", "simulated"),
        ("narrow", "simulated"),
    }
    by_entry = {one.replica_id.partition("-")[0]: one for one in status.replicas}
    assert by_entry["narrow"].max_context_tokens == NARROW_TOKENS
    assert "seed" not in by_entry["wide"].features
    assert "seed" in by_entry["narrow"].features


async def test_what_no_engine_can_do_is_refused_by_the_name_of_its_field(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(list(range(1, 300)), max_tokens=8, seed=1)
    assert caught.value.param == "seed"
    assert "narrow" in caught.value.message
    async with client.session() as session:
        with pytest.raises(openai.BadRequestError) as refused:
            await session.openai.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "Hi"}], seed=1, logit_bias={"5": 1}
            )
    assert "logit_bias (logit_bias): wide" in refused.value.message
    assert "seed (seed): narrow" in refused.value.message


async def test_a_session_moves_when_a_call_needs_what_its_engine_has_not(client: RolloutClient) -> None:
    async with client.session() as session:
        create, messages = session.openai.chat.completions.create, [{"role": "user", "content": "Hi"}]
        for options in ({"seed": 3}, {"logit_bias": {"5": 1.0}}, {"seed": 4}):
            await create(model="default", messages=messages, max_tokens=8, **options)
        record = await session.finish()
    turns = [turn for path in record.paths for turn in path.turns]
    assert [turn.replica_id.partition("-")[0] for turn in turns] == ["narrow", "wide", "narrow"]


async def test_one_update_reaches_all_and_every_record_recomputes(client: RolloutClient) -> None:
    vocab_size = model_sizes(mixed_config()).vocab_size
    rollout = await client.submit(tasks(24, "t", max_tokens=160), num_samples=2)
    records, updating = [], None
    async with asyncio.timeout(90), asyncio.TaskGroup() as group:
        async for record in rollout:
            records.append(record)
            if updating is None:
                updating = group.create_task(client.update_weights(str(V1), version=1))
    assert updating is not None
    assert {one.replica_id.partition("-")[0]: one.error for one in updating.result().replicas} == {
        "wide": None,
        "narrow": None,
    }
    records += await collect(client, tasks(4, "after"))
    assert {version for record in records for version in record.versions} == {0, 1}
    assert entries_of(records) == {"wide", "narrow"}
    for record in records:
        assert record.is_complete
        for path in record.paths:
            recomputed(path, vocab_size)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_on_a_ray_with_two_environments(tmp_path: Path) -> None:
    """`narrow` starts through a script with another environment's Python; its processes carry the script's mark."""
    python, script = second_environment(tmp_path / "second"), tmp_path / "python"
    script.write_text(f'#!/bin/sh\nAGENTLOOP_TEST_ENVIRONMENT=second exec {python} "$@"\n')
    script.chmod(0o755)
    config = mixed_config({"py_executable": str(script)})
    async with running_service(config, tmp_path / "run") as url, RolloutClient(url) as client:
        async with asyncio.timeout(120):
            while len((await client.status()).replicas) < 2:
                await asyncio.sleep(0.2)
        marks = {
            name: [
                b"AGENTLOOP_TEST_ENVIRONMENT=second" in _environment(pid)
                for pid in deployed(f"EngineReplica-{name}")
            ]
            for name in ("wide", "narrow")
        }
        assert marks == {"wide": [False], "narrow": [True]}
        rollout = await client.submit(tasks(16, "t", max_tokens=160), num_samples=2)
        records: list[Trajectory] = []
        async with asyncio.timeout(180), asyncio.TaskGroup() as group:
            async for record in rollout:
                if not records:
                    group.create_task(client.update_weights(str(V1), version=1))
                records.append(record)
        records += await collect(client, tasks(4, "seeded", seed=1))
    assert entries_of(records) == {"wide", "narrow"}
    vocab_size = model_sizes(config).vocab_size
    for record in records:
        assert record.is_complete
        recomputed(record.path, vocab_size)


def _environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()
