"""The SGLang engine behind the Engine port."""

from __future__ import annotations

from agentloop_servers.engines.sglang.config import SglangConfig
from agentloop_servers.engines.sglang.engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]
