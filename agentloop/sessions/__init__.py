"""Sessions of the chat endpoint, without HTTP: calls, prompts, and the journal they write."""

from __future__ import annotations

from agentloop.sessions.journal import Journal, SessionEnd, SessionRecord, SessionState
from agentloop.sessions.prompts import CallLimits, Prompt, SessionParts, make_question
from agentloop.sessions.session import Session

__all__ = [
    "CallLimits",
    "Journal",
    "Prompt",
    "Session",
    "SessionEnd",
    "SessionParts",
    "SessionRecord",
    "SessionState",
    "make_question",
]
