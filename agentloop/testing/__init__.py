"""Tests for environments: episodes in one process with the service's loop, tools and records, but no engine."""

from __future__ import annotations

from agentloop.testing.episode import play
from agentloop.testing.stand_in import Policy, ScriptedTurns
from agentloop.testing.validation import Fault, validate

__all__ = ["Fault", "Policy", "ScriptedTurns", "play", "validate"]
