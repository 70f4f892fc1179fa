"""The part that adapters of engines share: the gate, pauses, weight updates, constraints, the event feed."""

from __future__ import annotations

from agentloop_servers.engines.common.adapters import AdapterFolder
from agentloop_servers.engines.common.calls import Call, Calls, EngineRequests
from agentloop_servers.engines.common.config import ProcessEngineConfig
from agentloop_servers.engines.common.constraints import ConstraintTrials, structural_tag
from agentloop_servers.engines.common.engine import ProcessEngine
from agentloop_servers.engines.common.kv_feed import (
    KVBatch,
    KVEventFeed,
    kv_endpoint,
    kv_endpoints,
    replay_endpoint,
)
from agentloop_servers.engines.common.process import EngineProcess, EngineStats, engine_call, one_line
from agentloop_servers.engines.common.weights import EngineWeights, ServedAdapter, Workers, no_label

__all__ = [
    "AdapterFolder",
    "Call",
    "Calls",
    "ConstraintTrials",
    "EngineProcess",
    "EngineRequests",
    "EngineStats",
    "EngineWeights",
    "KVBatch",
    "KVEventFeed",
    "ProcessEngine",
    "ProcessEngineConfig",
    "ServedAdapter",
    "Workers",
    "engine_call",
    "kv_endpoint",
    "kv_endpoints",
    "no_label",
    "one_line",
    "replay_endpoint",
    "structural_tag",
]
