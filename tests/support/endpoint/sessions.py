"""Sessions over the shipped policy's tokenizer and template, a simulated engine and a journal in memory.

async with started(scripted_engine("Hello.")) as engine:
    session = make_session(engine)
    result = await session.call(ask("Hi"), key("one"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.engine.interface import TokenEngine
from agentloop.generation.turn_reader import TurnPiece, TurnReader
from agentloop.parsers.by_name import get_parser
from agentloop.sessions.calls import SessionRecord
from agentloop.sessions.prompts import CallLimits, SessionParts
from agentloop.sessions.session import Session
from agentloop.trajectory.node import CallRecord, ModelCallState, Node
from agentloop.types import KVPolicy, Message, SamplingParams, Trajectory
from agentloop.values import codec
from tests.support.engine.engines import leased
from tests.support.engine.scripted import RENDERER, SPEC

PARSER = get_parser("hermes")
CREATED_AT = 1_000_000.0
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
}


class MemoryJournal:
    """A session's journal, written through the codec. Tests set its switches."""

    def __init__(self) -> None:
        self.calls: dict[str, bytes] = {}
        self.nodes: dict[str, list[bytes]] = {}
        self.record: bytes | None = None
        self.writes: list[str] = []  # "begin", "end committed", "end failed", "save", in order
        self.failures: list[tuple[str, Exception]] = []  # each is raised by the next write whose name begins so
        self.loses_answers = False  # errors are raised after the write was done
        self.gate: asyncio.Event | None = None  # every write except the start of a call waits for it

    def open_call(self, session_id: str, call: CallRecord) -> None:
        self._write_now("begin", lambda: self._put(call))

    async def close_call(self, session_id: str, call: CallRecord, nodes: Sequence[Node]) -> None:
        def put() -> None:
            self._put(call)
            self.nodes[call.call_id] = [codec.encode(node) for node in nodes]

        await self._write(f"end {call.state}", put)

    async def save(self, record: SessionRecord) -> None:
        def put() -> None:
            self.record = codec.encode(record)

        await self._write("save", put)

    @property
    def records(self) -> list[CallRecord]:
        return [codec.decode(data, CallRecord) for data in self.calls.values()]

    @property
    def states(self) -> list[ModelCallState]:
        return [record.state for record in self.records]

    @property
    def stored_nodes(self) -> list[Node]:
        return [codec.decode(data, Node) for nodes in self.nodes.values() for data in nodes]

    def restored(self, session: Session, engine: TokenEngine, **parts: object) -> Session:
        """Return the session as another process would restore it."""
        record = session.record if self.record is None else codec.decode(self.record, SessionRecord)
        return make_session(engine, self, record=record, nodes=self.stored_nodes, calls=self.records, **parts)

    def _put(self, call: CallRecord) -> None:
        self.calls[call.call_id] = codec.encode(call)

    async def _write(self, what: str, put: Callable[[], None]) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        self._write_now(what, put)

    def _write_now(self, what: str, put: Callable[[], None]) -> None:
        self.writes.append(what)
        failure = next((one for one in self.failures if what.startswith(one[0])), None)
        if failure is None:
            put()
            return
        self.failures.remove(failure)
        if self.loses_answers:
            put()
        raise failure[1]


@dataclass
class Wall:
    """A wall clock, in seconds since 1970, that a test sets."""

    now_s: float = CREATED_AT

    def __call__(self) -> float:
        return self.now_s


def make_parts(**fields: object) -> SessionParts:
    """Return session parts; `fields` override."""
    renderer = fields.pop("renderer", RENDERER)
    given = {
        "renderer": renderer,
        "reader": TurnReader(renderer, fields.get("parser", PARSER)),  # type: ignore[arg-type]
        "parser": PARSER,
        "kv_policy": KVPolicy.KEEP,
        "max_context_tokens": SPEC.max_context_tokens,
        "vocab_size": RENDERER.vocab_size,
        "limits": CallLimits(journal_timeout_s=5.0),
        "unix_time": Wall(),
    }
    return SessionParts(**{**given, **fields})


def make_session(
    engine: TokenEngine,
    journal: MemoryJournal | None = None,
    *,
    record: SessionRecord | None = None,
    nodes: Sequence[Node] = (),
    calls: Sequence[CallRecord] = (),
    **parts: object,
) -> Session:
    """Return a session; `parts` override those of `make_parts`."""
    record = SessionRecord("s", CREATED_AT, 3600.0, task_id="t") if record is None else record
    journal, made = MemoryJournal() if journal is None else journal, make_parts(**parts)
    under_lease = leased(engine, vocab_size=made.vocab_size)
    return Session(record, parts=made, engine=under_lease, journal=journal, nodes=nodes, calls=calls)


def ask(
    *messages: str | Message, max_tokens: int | None = 12, seed: int | None = None, **fields: object
) -> ChatCall:
    """Return a call; a text becomes a user message."""
    made = tuple(Message("user", one) if isinstance(one, str) else one for one in messages)
    return ChatCall(made, SamplingParams(1, seed=seed), max_tokens=max_tokens, **fields)


def key(name: str, retry_count: int = 0) -> CallKey:
    return CallKey(name.encode(), retry_count)


async def streamed(session: Session, chat: ChatCall, call_key: CallKey) -> tuple[list[TurnPiece], ChatResult]:
    """Read a stream to its end."""
    *pieces, result = [item async for item in session.stream(chat, call_key)]
    assert isinstance(result, ChatResult)
    assert all(isinstance(piece, TurnPiece) for piece in pieces)
    return pieces, result


def check_pieces(pieces: Sequence[TurnPiece], result: ChatResult) -> None:
    """Check that a stream's pieces add up to its answer."""
    for node in result.choices:
        own = [piece for piece in pieces if piece.choice_index == node.choice_index]
        assert [piece.finish is not None for piece in own] == [False] * (len(own) - 1) + [True]
        assert "".join(piece.content for piece in own) == node.reply.message.content
        assert [i for piece in own for i in piece.token_ids] == node.reply.token_ids.tolist()


def check_trajectory(trajectory: Trajectory, nodes: Sequence[Node]) -> None:
    """Check that arrays are aligned, spans tile the output, and every sampled token is in exactly one mask."""
    for path in trajectory.paths:
        num_ids = len(path.response_ids)
        assert len(path.response_mask) == len(path.logprobs) == num_ids
        sampled = np.zeros(num_ids, bool)
        for turn in path.turns:
            sampled[turn.start : turn.end] = True
            assert turn.prompt_len == len(path.prompt_ids) + turn.start
        spanned = np.zeros(num_ids, int)
        for span in path.weight_versions:
            spanned[span.start : span.end] += 1
        assert (spanned == sampled).all()
        assert not (path.response_mask & ~sampled).any()
        assert not path.logprobs[~sampled].any()
        if path.num_shared:
            parent = trajectory.paths[path.parent]
            both = [np.concatenate((one.prompt_ids, one.response_ids))[: path.num_shared] for one in (path, parent)]
            assert (both[0] == both[1]).all()
    num_sampled = sum(len(node.reply.token_ids) for node in nodes)
    assert sum(int(path.response_mask.sum()) for path in trajectory.paths) == num_sampled
