"""SGLang as a kind of engine that a service's config may name. Importing this module does not import SGLang."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from agentloop.engine.interface import Engine
from agentloop_servers.config.engines import EngineConfig
from agentloop_sglang.config import SglangConfig


class Sglang:
    """The registered kind: `check` reads an entry of the config, `build` makes the engine of a replica."""

    class Settings(BaseModel, extra="forbid", frozen=True):
        """`settings` of an entry."""

        attention_backend: str | None = None
        """SGLang's attention backend, by SGLang's name; left out: its default."""

    @staticmethod
    def check(entry: EngineConfig) -> None:
        """Raise ValueError for settings that SGLang or this adapter does not take."""
        if entry.device == "cuda" and entry.dtype == "float32":
            raise ValueError("dtype on cuda: SGLang's kernels take bfloat16 or float16, no float32")
        if entry.lora_rank is not None:
            raise ValueError("lora_rank: adapters are served by vLLM only")
        if entry.max_loras is not None:
            raise ValueError("max_loras: adapters by name are served by vLLM only")
        if entry.data_parallel_size > 1:
            raise ValueError("SGLang takes no data_parallel_size: more replicas serve as well")

    @staticmethod
    def build(entry: EngineConfig, fields: dict[str, Any], settings: Sglang.Settings) -> Engine:
        """Return the engine, not started. `fields` are those of `ProcessEngineConfig`."""
        from agentloop_sglang.engine import SglangEngine

        return SglangEngine(config_of(fields, settings))


def config_of(fields: dict[str, Any], settings: Sglang.Settings) -> SglangConfig:
    """Return the configuration of an engine process."""
    return SglangConfig(**fields, **settings.model_dump())
