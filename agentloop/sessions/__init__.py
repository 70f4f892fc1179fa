"""Sessions of the chat endpoint, without HTTP: calls, prompts, and the journal they write."""

from __future__ import annotations

from agentloop.sessions.facts import Journal, SessionFacts, SessionParts, SessionState
from agentloop.sessions.prompts import Prompt
from agentloop.sessions.session import Session

__all__ = [
    "Journal",
    "Prompt",
    "Session",
    "SessionFacts",
    "SessionParts",
    "SessionState",
]
