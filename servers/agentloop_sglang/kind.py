"""The registration of SGLang as an engine kind. Importing this module does not import SGLang."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from agentloop.engine.interface import Engine
from agentloop_servers.config.engines import EngineConfig
from agentloop_sglang.config import SglangConfig


class Sglang:
    """The registered engine kind: `check` validates an engine's configuration, `build` makes the engine of a
    replica."""

    class Settings(BaseModel, extra="forbid", frozen=True):
        """The `settings` of an engine."""

        attention_backend: str | None = None
        """SGLang's name of the attention backend. Default: SGLang's default."""

    @staticmethod
    def check(entry: EngineConfig) -> None:
        """Raise ValueError for settings that SGLang or this adapter does not support."""
        if entry.device == "cuda" and entry.dtype == "float32":
            raise ValueError("dtype float32 is not supported by SGLang on cuda: use bfloat16 or float16")
        if entry.lora_rank is not None:
            raise ValueError("lora_rank is not supported by SGLang: adapters are served by vLLM only")
        if entry.max_loras is not None:
            raise ValueError("max_loras is not supported by SGLang: adapters by name are served by vLLM only")
        if entry.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size {entry.data_parallel_size} is not supported by SGLang: configure more replicas"
                " instead"
            )

    @staticmethod
    def build(entry: EngineConfig, fields: dict[str, Any], settings: Sglang.Settings) -> Engine:
        """Construct the engine without starting it. `fields` are the fields of `ProcessEngineConfig`."""
        from agentloop_sglang.engine import SglangEngine

        return SglangEngine(config_of(fields, settings))


def config_of(fields: dict[str, Any], settings: Sglang.Settings) -> SglangConfig:
    """Return the configuration of an engine process."""
    return SglangConfig(**fields, **settings.model_dump())
