"""A kind of engine: the simulated one, under its own name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from agentloop.engine.interface import Engine, EngineInfo
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop_servers.config.engines import EngineConfig


@dataclass(frozen=True, slots=True)
class AcmeSpec(SimulatedSpec):
    @property
    def info(self) -> EngineInfo:
        return replace(SimulatedSpec.info.fget(self), name="acme")


class Acme:
    @staticmethod
    def check(settings: EngineConfig) -> None:
        if settings.tensor_parallel_size > 1:
            raise ValueError("acme runs on one device")

    @staticmethod
    def build(settings: EngineConfig, fields: dict[str, Any]) -> Engine:
        spec = AcmeSpec(vocab_size=1024, max_context_tokens=fields["max_model_len"])
        return SimulatedEngine(replace(spec, initial_version=fields["initial_version"]))
