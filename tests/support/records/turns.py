"""Realistic calls and turns of a session, for tests of stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import numpy as np

from agentloop.sessions.calls import SessionRecord
from agentloop.trajectory.node import CallRecord, ModelCallState, Node, Reply
from agentloop.types import FinishReason, Generation, Message, WeightVersionSpan
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import ConstraintKind, TurnSampling
from agentloop_servers.endpoint.session_store import SessionStore


async def in_store(store: SessionStore, work: Callable[[sqlite3.Connection], Any]) -> Any:
    """Run a function in a store's file, over the store's connection."""
    return await store._run(work)


def make_record(
    session_id: str = "s", *, owner: str = "", ttl_s: float = 100.0, created_at: float = 0.0
) -> SessionRecord:
    return SessionRecord(session_id, created_at, ttl_s, owner)


def make_call(call_id: str, state: ModelCallState = ModelCallState.OPEN, error: str = "") -> CallRecord:
    return CallRecord(call_id, call_id.encode() * 4, 5, state, error)


def make_node(node_id: str, call_id: str, parent_id: str | None = None, num_tokens: int = 10) -> Node:
    reply = Reply(
        Message("assistant", f"reply {node_id} \u2713"),
        np.arange(100, 100 + num_tokens, dtype=np.int32),
        np.full(num_tokens, -0.25, np.float32),
        (WeightVersionSpan(0, 0, num_tokens),),
        FinishReason.STOP,
        is_closed=True,
        replica_id="replica-0",
        raw_logprobs=np.full(num_tokens, -0.5, np.float32),
        sampling=TurnSampling(temperature=0.5, constraint_kind=ConstraintKind.REGEX, constraint_text="a"),
        seed=3,
    )
    return Node(node_id, call_id, 0, parent_id, (Message("user", "go on"),), np.arange(20, dtype=np.int32), reply)


def make_reply(*generations: Generation, message: Message = Message("assistant")) -> Reply:  # noqa: B008 - frozen
    """Return the turn that these generations make: several generations if aborts cut it."""
    sampled = SampledTokens()
    for generation in generations:
        sampled.add(generation)
    last = generations[-1]
    return Reply(
        message,
        np.array(sampled.token_ids, np.int32),
        np.array(sampled.logprobs, np.float32),
        sampled.weight_versions,
        last.finish_reason,
        is_closed=last.finish_reason is FinishReason.STOP,
        cached_tokens=generations[0].cached_tokens,
        replica_id=last.replica_id,
    )
