"""The feed of an engine's KV-cache events: read from its publisher sockets, and handed to subscribers as our own.

Wire, the same in vLLM and SGLang: multipart `[topic, sequence (8 bytes big-endian), msgpack batch]`, one for each
step with events. One task reads. A gap in a rank's sequence is filled from its replay socket, which answers a first
sequence with all that it still has, up to sequence -1 (with or without the topic's frame); what cannot be had any
more counts as `AllBlocksCleared`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from agentloop.engine import AllBlocksCleared, KVEvent, KVEventPublisher, KVSubscription

_log = structlog.stdlib.get_logger(__name__)

REPLAY_TIMEOUT_S = 10.0  # engines look for such requests between two batches, and at least ten times a second

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KVBatch:
    """The events of one step of one rank."""

    events: Sequence[KVEvent]
    rank: int = 0  # of the data-parallel engine


class KVEventFeed:
    """Owner of the subscriber socket and the task that reads it.

    Data-parallel ranks are one cache to its readers: what one of them clears counts as cleared.
    """

    def __init__(self, decode: Callable[[bytes], KVBatch]) -> None:
        """`decode` reads a batch of the engine's."""
        self.events = KVEventPublisher()
        self._decode = decode
        self._next_sequence: dict[int, int] = {}  # by rank
        self._replays: Sequence[str] = ()  # endpoints, by rank
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoints: Sequence[str], replays: Sequence[str]) -> None:
        """Connect to every rank's publisher and start reading, before the first request: nothing is missed.

        `replays` are the ranks' replay sockets.
        """
        self._replays = replays
        self._task = asyncio.create_task(self._read(endpoints), name="kv-events")

    def subscribe(self) -> KVSubscription:
        """Return the events from now on; none, and their end, where the engine tells none."""
        subscription = self.events.subscribe()
        if self._task is None:
            subscription.close()
        return subscription

    def clear(self) -> None:
        """Announce that the cache was cleared: an engine publishes that with its next step only, and once more."""
        self.events.publish(AllBlocksCleared())

    async def close(self) -> None:
        """Stop reading; subscriptions end. Idempotent. Raises what ended the reading before, if something did."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _read(self, endpoints: Sequence[str]) -> None:
        import zmq.asyncio

        try:
            with zmq.asyncio.Context() as context:
                await self._receive(context, endpoints)
        finally:
            self.events.close()

    async def _receive(self, context: Any, endpoints: Sequence[str]) -> None:
        import zmq

        with _socket(context, zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            for endpoint in endpoints:
                socket.connect(endpoint)
            while True:
                _, number, payload = await socket.recv_multipart()
                batch, sequence = self._decode(payload), int.from_bytes(number, "big")
                expected = self._next_sequence.get(batch.rank, 0)
                if sequence < expected:
                    continue  # it came with a replay
                if sequence > expected:
                    await self._replay(context, batch.rank, expected, sequence)
                self._tell(batch)
                self._next_sequence[batch.rank] = sequence + 1
                await asyncio.sleep(0)  # subscribers read before the next batch, which may be here already

    async def _replay(self, context: Any, rank: int, expected: int, end: int) -> None:
        """Tell the batches `[expected, end)` of a rank that did not arrive, or that they are lost."""
        import zmq

        missed: list[KVBatch] = []
        with contextlib.suppress(TimeoutError), _socket(context, zmq.DEALER) as socket:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                socket.connect(self._replays[rank])
                await socket.send_multipart([b"", expected.to_bytes(8, "big")])
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    if number == _END_OF_REPLAY or int.from_bytes(number, "big") != expected + len(missed):
                        break
                    missed.append(self._decode(payload))
        if expected + len(missed) < end:
            _log.warning("kv_events_lost", rank=rank, num_batches=end - expected)
            self.events.publish(AllBlocksCleared())
            return
        for batch in missed[: end - expected]:
            self._tell(batch)

    def _tell(self, batch: KVBatch) -> None:
        for event in batch.events:
            self.events.publish(event)


def kv_endpoint(socket_dir: str) -> str:
    """Return an endpoint in a private directory.

    Its name has "inproc" in it: vLLM 0.32 and SGLang 0.5.17 give each data-parallel rank a socket of its own only
    if that word or "tcp" is in the endpoint, and fail on others.
    """
    return f"ipc://{socket_dir}/inproc-kv"


def kv_endpoints(endpoint: str, num_ranks: int) -> tuple[str, ...]:
    """Return the sockets of all data-parallel ranks' KV events, if an engine is given `endpoint`
    (`kv_endpoint`)."""
    return (endpoint, *(f"{endpoint}_dp{rank}" for rank in range(1, num_ranks)))


def replay_endpoint(endpoint: str) -> str:
    """Return the socket on which an engine sends again what it published on `endpoint`."""
    return f"{endpoint}-replay"


def _socket(context: Any, kind: int) -> Any:
    import zmq

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)  # the sender's own bound applies
    return socket
