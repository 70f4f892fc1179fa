"""The vLLM engine behind the Engine port."""

from __future__ import annotations

from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine

__all__ = ["VllmConfig", "VllmEngine"]
