"""One engine path: a turn sampled under a lease, continued, split, and read."""

from __future__ import annotations

from agentloop.generation.deadline import Deadline
from agentloop.generation.image_prompts import ImageAsker, ImagePlacer
from agentloop.generation.lease_reporter import LeaseHolder, LeaseReporter, ReportConfig
from agentloop.generation.leased_engine import TURN_GRACE_S, Connect, LeasedEngine, NewestVersion
from agentloop.generation.leases import AssignedLease, LeaseConfig, SessionLeases
from agentloop.generation.self_test import SelfTest, parsers_that_fit, self_test, without_calls
from agentloop.generation.turn_piece import CallDelta, TurnFinish, TurnPiece, arguments_text, finish_of, joined
from agentloop.generation.turn_reader import TurnReader
from agentloop.generation.turn_sampler import TurnRequest, sample_turn, stream_turn

__all__ = [
    "TURN_GRACE_S",
    "AssignedLease",
    "CallDelta",
    "Connect",
    "Deadline",
    "ImageAsker",
    "ImagePlacer",
    "LeaseConfig",
    "LeaseHolder",
    "LeaseReporter",
    "LeasedEngine",
    "NewestVersion",
    "ReportConfig",
    "SelfTest",
    "SessionLeases",
    "TurnFinish",
    "TurnPiece",
    "TurnReader",
    "TurnRequest",
    "arguments_text",
    "finish_of",
    "joined",
    "parsers_that_fit",
    "sample_turn",
    "self_test",
    "stream_turn",
    "without_calls",
]
