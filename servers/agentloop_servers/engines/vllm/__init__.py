"""The vLLM engine behind the Engine port."""

from __future__ import annotations

from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.engines.vllm.parsers import VLLM_PARSERS, vllm_parser

__all__ = ["VLLM_PARSERS", "VllmConfig", "VllmEngine", "vllm_parser"]
