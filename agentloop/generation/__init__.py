"""One engine path: a turn sampled under a lease, continued, split, and read."""

from __future__ import annotations

from agentloop.generation.leased_engine import Connect, LeasedEngine, NewestVersion, retrying
from agentloop.generation.turn_reader import TurnReader
from agentloop.generation.turn_sampler import SampleOrder, SessionEngine, sample_reply, stream_reply

__all__ = [
    "Connect",
    "LeasedEngine",
    "NewestVersion",
    "SampleOrder",
    "SessionEngine",
    "TurnReader",
    "retrying",
    "sample_reply",
    "stream_reply",
]
