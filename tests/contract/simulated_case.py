"""The simulated engine's case: real time, a step of half a millisecond."""

from __future__ import annotations

import json
from pathlib import Path

from agentloop.engine.interface import Engine, WeightUpdate
from agentloop.engine.request_watch import ReportPace
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.values.sampling import LogprobsMode
from tests.contract.cases import EngineCase


def write_checkpoint(directory: Path) -> str:
    """Write a folder that has the form of a readable checkpoint: one safetensors file with one tensor."""
    directory.mkdir(parents=True)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return str(directory)


def _spec(version: int, max_loras: int | None = None) -> SimulatedSpec:
    latency = LatencyModel(prefill_s=0.0005, decode_s=0.0005)
    return SimulatedSpec(
        max_context_tokens=1024,
        num_blocks=1024,
        latency=latency,
        initial_version=version,
        logprobs_mode=LogprobsMode.BOTH,
        pace=ReportPace(interval_s=0.01),
        scheduling_policy="priority",
        max_loras=max_loras,
    )


async def start_simulated_case(directory: Path, max_loras: int | None = None) -> EngineCase:
    engine = SimulatedEngine(_spec(0, max_loras))
    await engine.start()
    checkpoints = (write_checkpoint(directory / "a"), write_checkpoint(directory / "b"))

    def failing_checkpoint() -> str:
        engine.faults.num_failed_commits += 1
        return checkpoints[0]

    async def fresh(update: WeightUpdate) -> Engine:
        other = SimulatedEngine(_spec(update.version))
        await other.start()
        return other

    return EngineCase(
        "simulated",
        engine,
        checkpoints,
        failing_checkpoint,
        fresh=fresh,
        long_tokens=128,
        adapter=lambda seed: checkpoints[seed % 2],  # only its version makes it a different adapter
        unfit_adapters={"not a folder": str(directory / "missing")},
    )
