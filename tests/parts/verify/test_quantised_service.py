"""A service whose engine quantizes pushed weights (vLLM on CPU): its records, compared with fresh engines.

On a CPU without `amx_fp16`, oneDNN multiplies FP8 matrices in its reference code: 1.3 s per step of this policy.
Answers are therefore short, and the file is one of the long tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree

import pytest
from safetensors.torch import load_file

from agentloop.api.coordinator import ServiceStatus
from agentloop.client.client import RolloutClient
from agentloop.client.rollout import load_tasks
from agentloop.engine.interface import WeightUpdate
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.types import GenerateRequest, Generation, Limits, PauseMode, SamplingParams, Trajectory
from agentloop_servers.config.service import CHECKOUT, ServiceConfig
from agentloop_servers.local import running_service
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_verify.check_logprobs import check_logprobs, engine_references, plain_references
from tests.support.transfer.adapters import POLICY, write_adapter

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

QUANTIZATION = "fp8_per_channel"
ENGINE = {"device": "cpu", "quantization": QUANTIZATION, "kv_cache_mib": 64}
PROMPT = (1, 5, 9, 20, 33, 40, 41, 42)
GREEDY = {"max_tokens": 16, "temperature": 0.0}


@dataclass(frozen=True)
class Rolled:
    """The records and reports of a service whose weights were pushed over dummy weights."""

    run_dir: Path
    status: ServiceStatus
    records: list[Trajectory]
    greedy: Generation


@pytest.fixture(scope="module")
async def rolled(tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    run_dir = tmp_path_factory.mktemp("run")
    engine = {**ENGINE, "load_format": "dummy", "num_cpus": 0.5}
    config = ServiceConfig.model_validate({"model": str(POLICY), "engine": engine, "port": 0})
    limits = Limits(max_tokens_per_turn=16)
    tasks = [replace(one, limits=limits) for one in load_tasks(CHECKOUT / "examples" / "data" / "tasks.jsonl")[:2]]
    async with running_service(config, run_dir, waits_for_weights=True) as url, RolloutClient(url) as client:
        await client.update_weights(load_file(POLICY / "model.safetensors").items(), version=1)
        rollout = await client.submit(tasks, num_samples=4)
        records = [record async for record in rollout]
        greedy, status = await client.generate(PROMPT, **GREEDY), await client.status()
    return Rolled(run_dir, status, records, greedy)


def test_the_record_says_how_the_engine_was_quantised(rolled: Rolled) -> None:
    assert [one.quantization for one in rolled.status.replicas] == [QUANTIZATION]
    turns = [turn for record in rolled.records for path in record.paths for turn in path.turns]
    assert len(turns) >= 8
    assert {(turn.engine, turn.quantization) for turn in turns} == {("vllm", QUANTIZATION)}
    assert rolled.greedy.quantization == QUANTIZATION


def test_the_recorded_logprobs_are_those_of_an_engine_of_the_same_kind(rolled: Rolled, tmp_path: Path) -> None:
    model = copytree(POLICY, tmp_path / "model")  # for a context whose KV is larger than the engine's cache
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 10**6}))
    found = {}
    for name, references in (
        ("engine", engine_references("cpu", "bfloat16")),
        ("checkpoint", plain_references("cpu", "bfloat16")),
    ):
        check = check_logprobs(rolled.run_dir / STORE_NAME, model, {}, references, max_trajectories=100)
        assert not check.left_out
        found[name] = check.rows[0].distance
    assert found["engine"].num_tokens > 100
    assert found["engine"].k3_kl < 1e-6
    assert found["checkpoint"].k3_kl > 1e-5


async def test_a_fresh_engine_goes_on_the_same_and_serves_adapters(rolled: Rolled, tmp_path: Path) -> None:
    config = ServiceConfig.model_validate(
        {"model": str(POLICY), "model_version": 1, "engine": {**ENGINE, "lora_rank": 8}}
    )
    engine = build_engine(config)
    asked = GenerateRequest("greedy", PROMPT, SamplingParams(**GREEDY))
    try:
        await engine.start()
        fresh = await engine.generate(asked)
        assert fresh.token_ids == rolled.greedy.token_ids
        update = WeightUpdate(2, adapter=str(write_adapter(tmp_path / "adapter", rank=8)))
        await engine.stage(update)
        await engine.pause(PauseMode.KEEP)
        report = await engine.commit(2)
        await engine.resume()
        assert report.num_verified == 56
        adapted = await engine.generate(replace(asked, request_id="adapted"))
        assert adapted.logprobs != fresh.logprobs
    finally:
        await engine.close()
