"""NVIDIA Dynamo's own KV router: the `SelectionService` of the package `ai-dynamo-runtime`, in this process.

The service is what a Dynamo frontend decides with: its cost function, its load accounting and its index, which is
fed with the engines' KV events over ZMQ, as vLLM publishes them. Each decision waits until the index has taken in
every event so far, so events arrive without lag. Prompts are told as block hashes, kept by trajectory, so that a
turn costs only its new blocks here. With sessions, the service pins a trajectory to its first worker.

A block's token ids, which Dynamo hashes anew, are its name's two halves repeated: equal names, equal hashes.

Left out: `add_output_block` (Dynamo tracks no output blocks by default, and the simulator does not tell of tokens
as they come); the index by predictions instead of events, whose entries age by the wall clock, not by virtual time.
The service draws ties from its own generator, so two runs differ slightly. What its threads compute is not in the
CPU time that the benchmark measures in Python's thread.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
import zmq

from tests.benchmarks.balancer.arms.spread import Counting
from tests.benchmarks.balancer.policy import FleetShape, KVChange, TurnAsk, TurnEnd

PACKAGE = "ai-dynamo-runtime==1.6.1"
SETTINGS = {
    "prefill scale": "DYN_ROUTER_PREFILL_LOAD_SCALE",  # blocks to prefill count so much against decode blocks
    "overlap credit": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
    "credit decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",  # where more waits to be prefilled
    "request weight": "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",  # blocks that an active request counts as
    "temperature": "DYN_ROUTER_TEMPERATURE",
}
_SEED = 1337  # of Dynamo's block hashes
_LONGEST_TTL_S = 31_536_000.0
_SETTLE_TIMEOUT_S = 10.0
_SENTINELS = 1 << 63  # names of blocks that mark the end of a batch of events


def is_installed() -> bool:
    """Return True if Dynamo's package can be imported."""
    return importlib.util.find_spec("dynamo") is not None and importlib.util.find_spec("dynamo._core") is not None


@dataclass(slots=True)
class _Hashes:
    """A trajectory's blocks as the service takes them: of tokens and of sequences, signed."""

    names: array[int]
    of_tokens: list[int] = field(default_factory=list)
    of_sequences: list[int] = field(default_factory=list)


class _Publisher:
    """One engine's KV events, on a socket of its own."""

    def __init__(self, block_size: int) -> None:
        # The process's own context: one that is collected before its sockets waits for them for ever.
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self._block_size = block_size
        self._events: list[list[object]] = []
        self._num_sent = 0
        self._sentinel: int | None = None  # the last one, which is in the index

    @property
    def endpoint(self) -> str:
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    @property
    def is_dirty(self) -> bool:
        return bool(self._events)

    def wait_for_subscriber(self) -> None:
        """Wait for the service to subscribe. Raises TimeoutError."""
        if not self._socket.poll(int(_SETTLE_TIMEOUT_S * 1000)):
            raise TimeoutError("Dynamo's service did not subscribe to KV events")
        self._socket.recv()

    def add(self, change: KVChange) -> None:
        if change.is_cleared:
            self._events.append(["AllBlocksCleared"])
            self._sentinel = None
        if change.stored:
            self._store(change.stored, change.parent)
        if change.removed:
            self._events.append(["BlockRemoved", [_signed(name) for name in change.removed]])

    def send(self, sentinel: int) -> None:
        """Send what was added, and a block of its own that shows that it has arrived."""
        if self._sentinel is not None:
            self._events.append(["BlockRemoved", [_signed(self._sentinel)]])
        self._store(array("Q", [sentinel]), None)
        self._sentinel = sentinel
        payload = msgspec.msgpack.encode([time.time(), self._events, 0])
        self._socket.send_multipart([b"", struct.pack(">Q", self._num_sent), payload])
        self._num_sent += 1
        self._events = []

    def close(self) -> None:
        self._socket.close()

    def _store(self, names: array[int], parent: int | None) -> None:
        token_ids: list[int] = []
        for name in names:
            token_ids += ([name & 0xFFFFFFFF, name >> 32] * self._block_size)[: self._block_size]
        before = None if parent is None else _signed(parent)
        stored = [_signed(name) for name in names]
        self._events.append(["BlockStored", stored, before, token_ids, self._block_size, None])


class Dynamo(Counting):
    """Every turn where Dynamo's `select_and_reserve` puts it.

    `settings` are names of `SETTINGS`, given by environment: version 1.6.1 takes a request's
    `router_config_override` and does not heed it. Raises ImportError if the package is not
    installed. `close` ends its threads.
    """

    hears_kv = True

    def __init__(
        self,
        shape: FleetShape,
        seed: int,
        has_sessions: bool = False,
        settings: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(shape, seed)
        self._shape = shape
        self._has_sessions = has_sessions
        self._settings = {SETTINGS[name]: str(value) for name, value in (settings or {}).items()}
        self._block_bytes = shape.block_size * 4
        self._hashes: dict[int, _Hashes] = {}
        self._reserved: dict[int, str] = {}  # trajectory -> selection of its turn in flight
        self._where: dict[int, int] = {}  # trajectory -> replica of that turn
        self._pending: list[Callable[[], Awaitable[object]]] = []
        self._num_selections = 0
        self._num_sentinels = 0
        self._publishers: dict[int, _Publisher] = {}
        self._loop = asyncio.new_event_loop()
        self._service: Any = None
        self._loop.run_until_complete(self._start())

    def place(self, turn: TurnAsk, now: float) -> int:
        self._num_selections += 1
        selection = f"{turn.trajectory}-{turn.turn}-{self._num_selections}"
        request = self._request(turn, selection)
        chosen = self._loop.run_until_complete(self._select(request))
        self._reserved[turn.trajectory] = selection
        self._where[turn.trajectory] = chosen
        return chosen

    def prefilled(self, turn: TurnAsk, replica: int, now: float) -> None:
        selection = self._reserved[turn.trajectory]
        self._pending.append(lambda: self._service.prefill_complete(selection))

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        super().ended(turn, end, now)
        self._free(turn.trajectory)

    def finished(self, trajectory: int, now: float) -> None:
        self._free(trajectory)
        self._hashes.pop(trajectory, None)

    def replica_lost(self, replica: int, now: float) -> None:
        super().replica_lost(replica, now)
        for trajectory in [trajectory for trajectory, where in self._where.items() if where == replica]:
            self._free(trajectory)
        self._pending.append(lambda: self._service.delete_worker(replica))
        self._publishers.pop(replica).close()

    def replica_added(self, replica: int, now: float) -> None:
        super().replica_added(replica, now)
        self._loop.run_until_complete(self._add(replica))

    def kv_changed(self, replica: int, change: KVChange, now: float) -> None:
        publisher = self._publishers.get(replica)
        if publisher is not None:
            publisher.add(change)

    def close(self) -> None:
        """End the service and its sockets. Idempotent."""
        if not self._loop.is_closed():
            self._service.shutdown()
            for publisher in self._publishers.values():
                publisher.close()
            self._loop.close()

    def __del__(self) -> None:
        if getattr(self, "_service", None) is not None:
            self.close()

    # --- inside ---

    async def _start(self) -> None:
        with _environment({"DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "true", **self._settings}):
            core = importlib.import_module("dynamo._core")
            ttl_s = _LONGEST_TTL_S if self._has_sessions else None
            self._service = core.SelectionService(indexer_threads=1, session_affinity_ttl_secs=ttl_s)
        for replica in self.in_flight:
            await self._add(replica)

    async def _add(self, replica: int) -> None:
        publisher = self._publishers[replica] = _Publisher(self._shape.block_size)
        worker = {
            "worker_id": replica,
            "endpoint": f"http://replica-{replica}",
            "block_size": self._shape.block_size,
            "max_num_batched_tokens": self._shape.max_batched_tokens,
            "total_kv_blocks": self._shape.capacity_blocks,
            "kv_events_endpoints": {0: publisher.endpoint},
        }
        record = await self._service.upsert_worker(worker)
        if record["lifecycle"] != "schedulable":
            raise RuntimeError(f"Dynamo does not take replica {replica}: {record}")
        publisher.wait_for_subscriber()

    async def _select(self, request: dict[str, object]) -> int:
        pending, self._pending = self._pending, []
        for call in pending:
            await call()
        await self._settle()
        answer = await self._service.select_and_reserve(request)
        return int(answer["worker_id"])

    async def _settle(self) -> None:
        """Send the engines' events, and wait until the index has them. Raises TimeoutError."""
        dirty = {replica for replica, publisher in self._publishers.items() if publisher.is_dirty}
        if not dirty:
            return
        self._num_sentinels += 1
        sentinel = _SENTINELS + self._num_sentinels
        for replica in dirty:
            self._publishers[replica].send(sentinel)
        size = self._shape.block_size
        query = {"block_hashes": [self._hash(sentinel)], "sequence_hashes": [0], "isl_tokens": size}
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while dirty:
            scores = await self._service.overlap_scores(query)
            dirty -= {worker["worker_id"] for worker in scores["workers"] if worker["device_blocks"]}
            if time.monotonic() > deadline:
                raise TimeoutError(f"Dynamo's index did not take in the events of replicas {sorted(dirty)}")

    def _request(self, turn: TurnAsk, selection: str) -> dict[str, object]:
        num_blocks = turn.num_prompt_tokens // self._shape.block_size
        hashes = self._hashes.get(turn.trajectory)
        if hashes is None or hashes.names is not turn.hashes:
            hashes = self._hashes[turn.trajectory] = _Hashes(turn.hashes)
        for name in turn.hashes[len(hashes.of_tokens) : num_blocks]:
            hashes.of_tokens.append(self._hash(name))
            hashes.of_sequences.append(_signed(name))
        request: dict[str, object] = {
            "selection_id": selection,
            "block_hashes": hashes.of_tokens[:num_blocks],
            "sequence_hashes": hashes.of_sequences[:num_blocks],
            "isl_tokens": turn.num_prompt_tokens,
        }
        if self._has_sessions:
            request["session_id"] = f"trajectory-{turn.trajectory}"
        return request

    def _free(self, trajectory: int) -> None:
        selection = self._reserved.pop(trajectory, None)
        self._where.pop(trajectory, None)
        if selection is not None:
            self._pending.append(lambda: self._service.free_reservation(selection))

    def _hash(self, name: int) -> int:
        """Return Dynamo's hash of a block's token ids: xxh3 of the packed ids."""
        ids = (name.to_bytes(8, "little") * (self._block_bytes // 8 + 1))[: self._block_bytes]
        return _signed(xxhash.xxh3_64_intdigest(ids, seed=_SEED))


def _signed(name: int) -> int:
    return name - (1 << 64) if name >> 63 else name


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, which the service reads when it is made, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
