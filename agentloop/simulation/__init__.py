"""The simulated engine: a seeded policy, KV cache and scheduler in virtual or real time."""

from __future__ import annotations

from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.simulation.weights import WeightSource

__all__ = ["LatencyModel", "SimulatedEngine", "SimulatedSpec", "WeightSource"]
