"""The workbench: episodes in one process, by the service's own loop, tools and records, without an engine."""

from __future__ import annotations

from agentloop.testing.episode import play
from agentloop.testing.stand_in import Policy, ScriptedTurns
from agentloop.testing.validation import Fault, validate

__all__ = ["Fault", "Policy", "ScriptedTurns", "play", "validate"]
