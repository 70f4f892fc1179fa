"""The parts of engines that are the same for vLLM and SGLang."""

from __future__ import annotations

from agentloop_servers.engines.common.adapters import AdapterFolder
from agentloop_servers.engines.common.weights import EngineWeights, ServedAdapter, WeightSettings, Workers, no_label

__all__ = ["AdapterFolder", "EngineWeights", "ServedAdapter", "WeightSettings", "Workers", "no_label"]
