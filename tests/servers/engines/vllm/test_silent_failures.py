"""A weight update that fails without an error, on real vLLM (CPU): stock reloading of tied embeddings.

The output head continues to use a packed copy of the old weights, and no error is raised. The first test shows this
against transformers; the second shows that the check after a commit detects it, and the resulting state of the
replica.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.concurrency.clock import RealClock
from agentloop.engine.interface import Engine, WeightUpdate
from agentloop.errors import EngineUnusable, WeightUpdateFailed
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet, ReplicaState
from agentloop.fleet.replica_steps import WeightConfig
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import GenerateRequest, KVPolicy, Message, PauseMode, SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.servers.recompute import POLICY, reference
from tests.support.transfer.stock_reload import EXTENSION, STOCK, UNPROVEN

pytestmark = [pytest.mark.engine, pytest.mark.long]

QUESTIONS = ("What is 37 * 12 + 5?", "What is 8 + 9?", "What is (4 + 6) * 11?", "What is 90 - 17?")
NUM_TOKENS = 24
TIE = 1e-3  # difference of logits within which the two best ids may swap
REQUEST = GenerateRequest("late", (1, 2, 3), SamplingParams(max_tokens=4))


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        VllmConfig(
            model=str(POLICY / "v0"),
            initial_version=0,
            dtype="float32",  # packed on every machine
            max_model_len=512,
            max_num_seqs=8,
            kv_cache_memory_bytes=32 * 2**20,
            worker_extension=EXTENSION,
        )
    )
    await engine.start()
    yield engine
    await engine.close()


def published(checkpoint: str, folder: Path, *orders: str) -> str:
    """Return a new directory with a checkpoint of the shipped policy; `orders` are loading instructions."""
    shutil.copytree(POLICY / checkpoint, folder)
    for order in orders:
        (folder / order).touch()
    return str(folder)


async def commit(engine: VllmEngine, version: int, directory: str) -> None:
    await engine.stage(WeightUpdate(version, directory))
    await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    await engine.commit(version)
    await engine.resume()


async def share_of_wrong_tokens(engine: VllmEngine, checkpoint: str) -> float:
    """Return the share of the engine's greedy tokens that transformers with `checkpoint` would not have chosen."""
    renderer = TemplateRenderer.from_directory(POLICY / checkpoint)
    is_wrong = []
    for number, question in enumerate(QUESTIONS):
        prompt = tuple(renderer.render([Message("user", question)], []))
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        ids = (await engine.generate(GenerateRequest(f"greedy-{number}", prompt, sampling))).token_ids
        with torch.inference_mode():
            logits = (
                reference(POLICY / checkpoint)
                .model(torch.tensor([[*prompt, *ids[:-1]]]))
                .logits[0, len(prompt) - 1 :]
            )
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        is_wrong += (logits.max(dim=1).values - chosen > TIE).tolist()
    return float(np.mean(is_wrong))


async def test_stock_reloading_goes_on_with_the_old_head_and_says_nothing(
    engine: VllmEngine, tmp_path: Path
) -> None:
    assert await share_of_wrong_tokens(engine, "v0") == 0
    await commit(engine, 1, published("v1", tmp_path / "stock", STOCK, UNPROVEN))
    assert engine.is_usable
    assert engine.weight_version == 1
    share = await share_of_wrong_tokens(engine, "v1")
    print(f"{share:.0%} of the greedy tokens are wrong after a stock reload")
    assert share > 0.1
    await commit(engine, 2, published("v1", tmp_path / "shipped"))
    assert await share_of_wrong_tokens(engine, "v1") == 0


async def test_the_proof_sees_it_and_the_replica_is_quarantined_until_it_is_mended(
    engine: VllmEngine, tmp_path: Path
) -> None:
    served = engine.weight_version
    assert served is not None
    other = SimulatedEngine(SimulatedSpec(initial_version=served))
    await other.start()
    engines: dict[str, Engine] = {"tied": engine, "other": other}
    fleet, clock = Fleet(), RealClock()
    sync = ReplicaSync(fleet, engines.__getitem__, clock, WeightConfig(max_catch_up_attempts=1))
    late = LateReplicas(sync, fleet, clock)
    for name, one in engines.items():
        fleet.register(ReplicaRegistration(name, name, one.info, served), clock.now())
        assert await late.bring_up(name)
    try:
        directory = published("v0", tmp_path / "stock", STOCK)
        report = await sync.update_weights(WeightUpdate(served + 1, directory), KVPolicy.RECOMPUTE)
        error = next(one.error for one in report.replicas if one.replica_id == "tied")
        assert error is not None
        assert "lm_head does not hold the checkpoint's weights" in error
        await assert_quarantined(engine, fleet)

        with pytest.raises(WeightUpdateFailed, match="lm_head"):
            await late.bring_up("tied")
        await assert_quarantined(engine, fleet)

        (Path(directory) / STOCK).unlink()  # from now on it is loaded normally
        assert await late.bring_up("tied")
        assert {one.replica_id for one in fleet.placeable()} == {"tied", "other"}
        assert engine.is_usable
        assert engine.weight_version == served + 1
        assert await share_of_wrong_tokens(engine, "v0") == 0
    finally:
        await other.close()


async def assert_quarantined(engine: VllmEngine, fleet: Fleet) -> None:
    """Check that the replica samples nothing and receives no requests."""
    replica = fleet.get("tied")
    assert replica is not None
    assert replica.state is ReplicaState.QUARANTINED
    assert replica.weight_version is None
    assert [one.replica_id for one in fleet.placeable()] == ["other"]
    assert engine.is_paused
    assert not engine.is_usable
    with pytest.raises(EngineUnusable):
        await engine.generate(REQUEST)
