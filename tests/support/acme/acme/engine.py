"""A kind of engine: the simulated one, under its own name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from agentloop.engine.interface import Engine, EngineInfo
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop_servers.config.engines import EngineConfig


@dataclass(frozen=True, slots=True)
class AcmeSpec(SimulatedSpec):
    @property
    def info(self) -> EngineInfo:
        return replace(SimulatedSpec.info.fget(self), name="acme")


class Acme:
    class Settings(BaseModel, extra="forbid"):
        max_running: int = 256

    @staticmethod
    def check(entry: EngineConfig) -> None:
        if entry.tensor_parallel_size > 1:
            raise ValueError("acme runs on one device")

    @staticmethod
    def build(entry: EngineConfig, fields: dict[str, Any], settings: Settings) -> Engine:
        spec = AcmeSpec(
            vocab_size=1024, max_context_tokens=fields["max_model_len"], max_running=settings.max_running
        )
        return SimulatedEngine(replace(spec, initial_version=fields["initial_version"]))
