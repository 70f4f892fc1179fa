"""SGLang as a kind of engine that a service's config may name. Importing this module does not import SGLang."""

from __future__ import annotations

from typing import Any

from agentloop.engine.interface import Engine
from agentloop_servers.config.engines import EngineConfig
from agentloop_sglang.config import SglangConfig


class Sglang:
    """The registered kind: `check` reads the settings of the config, `build` makes the engine of a replica."""

    @staticmethod
    def check(settings: EngineConfig) -> None:
        """Raise ValueError for settings that SGLang or this adapter does not take."""
        if settings.device == "cuda" and settings.dtype == "float32":
            raise ValueError("dtype on cuda: SGLang's kernels take bfloat16 or float16, no float32")
        if settings.lora_rank is not None:
            raise ValueError("lora_rank: adapters are served by vLLM only")
        if settings.max_loras is not None:
            raise ValueError("max_loras: adapters by name are served by vLLM only")
        if settings.data_parallel_size > 1:
            raise ValueError("SGLang takes no data_parallel_size: more replicas serve as well")

    @staticmethod
    def build(settings: EngineConfig, fields: dict[str, Any]) -> Engine:
        """Return the engine, not started. `fields` are those of `ProcessEngineConfig`."""
        from agentloop_sglang.engine import SglangEngine

        return SglangEngine(config_of(settings, fields))


def config_of(settings: EngineConfig, fields: dict[str, Any]) -> SglangConfig:
    """Return the configuration of an engine process."""
    return SglangConfig(**fields, attention_backend=settings.attention_backend)
