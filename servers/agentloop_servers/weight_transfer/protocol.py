"""The control connections between a sender of weights and the engine workers: small messages over TCP.

The sender listens, workers connect; the first message is a `Hello` with the offer's token. Frames are a length
(four bytes, big-endian) and a msgpack body of one of the `Message` structs; no bulk data and no pickle. Each end
has one thread (`ControlConnections`) whose event loop reads and writes all of its connections, so that the end of
a peer is known at once, whatever else this process waits for.

Order of an update: Hello, Accept; then for each attempt Go from every worker, StartAttempt, TransportBytes both
ways, Arrived and EndAttempt; at the end Done. Abandon ends an attempt or the update, from either side at any time.
A connection survives an update only by a `Done`, so no message of an old update meets a new one.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeVar

import msgspec

from agentloop.concurrency.aio import LoopThread
from agentloop_servers.net.tcp import keep_alive, listening_socket
from agentloop_servers.net.tls import trusting

HELLO_TIMEOUT_S = 5.0
HANDOVER_TIMEOUT_S = 15.0  # for the thread to take a message over, not for the peer to read it
LINGER_S = 1.0  # in which the peer of a closed connection reads the last message
_ACCEPT_TURNS = 4  # of the loop, in which a connection that is being accepted comes through
CONNECTION_POLL_S = 0.05  # between two reads of flags that are set without a notice
MAX_HELLO_BYTES = 2**16
MAX_FRAME_BYTES = 2**26  # the checksums of seven million tensors
MAX_WAITING = 1024  # messages; a transport has two buckets in flight, so this bound is never met by a sane peer
MAX_STRANGERS = 256  # connections that have not shown the token yet; more are turned away
HEADER = struct.Struct(">I")


class BaseMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of all control messages."""


class Hello(BaseMessage, frozen=True, tag="hello"):
    """A worker's introduction. Processes on one host, or one device, have the same `host`, or `device`."""

    token: str
    rank: int
    host: str
    device: str  # "cpu", or the CUDA device's uuid
    can_hold: bool  # whether its memory has room beside the served weights
    num_receivers: int  # that the sender waits for
    num_optional: int = 0  # beside these, and not waited for
    is_optional: bool = False  # this worker is one of the optional ones


class Accept(BaseMessage, frozen=True, tag="accept"):
    """The sender's answer to a Hello. In one phase the worker says Go at its commit, else once it has memory."""

    transport: str
    is_one_phase: bool
    bucket_bytes: int


class Go(BaseMessage, frozen=True, tag="go"):
    """A worker's word that it is ready to receive an attempt's bytes."""


class StartAttempt(BaseMessage, frozen=True, tag="start_attempt"):
    """The sender's word that an attempt begins: bucket 0 comes next, buckets of earlier attempts are void."""

    attempt_id: int


class TransportBytes(BaseMessage, frozen=True, tag="transport"):
    """A message of a transport, to its other half."""

    attempt_id: int
    body: bytes


class Arrived(BaseMessage, frozen=True, tag="arrived"):
    """A worker's word that it has consumed every bucket of the attempt."""

    attempt_id: int


class EndAttempt(BaseMessage, frozen=True, tag="end_attempt"):
    """The sender's word that all workers have every bucket; `checksums` has one entry a bucket."""

    attempt_id: int
    checksums: list[int]


class Done(BaseMessage, frozen=True, tag="done"):
    """A worker's word that the checksums of all buckets are equal."""


class Abandon(BaseMessage, frozen=True, tag="abandon"):
    """The end of an attempt, which another one follows; without `attempt_id`, the end of the worker's update."""

    reason: str
    attempt_id: int | None = None


Message = Hello | Accept | Go | StartAttempt | TransportBytes | Arrived | EndAttempt | Done | Abandon
M = TypeVar("M", bound=BaseMessage)
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
_connection_ids = itertools.count(1)


class ConnectionLost(Exception):
    """An error of a connection whose peer is gone or has broken the protocol."""


class TransportBroken(Exception):
    """An error that ends the attempt: a lost peer, a cancellation or a deadline. `str()` is one clear line."""


class Connection:
    """One control connection, for any thread but its owner's. Every change notifies the owner's condition.

    `death` is the reason of the connection's end, empty while it lives. A message is sent once `send` returns; the
    condition must not be held meanwhile, so a `check` must not send.
    """

    def __init__(self, owner: ControlConnections, writer: asyncio.StreamWriter, tls: ssl.SSLContext | None) -> None:
        self.connection_id = next(_connection_ids)
        self.own_host: str = (writer.get_extra_info("sockname") or ("",))[0]
        self.peer_host: str
        self.peer_host, peer_port = (writer.get_extra_info("peername") or ("an unknown host", 0))[:2]
        self.peer_address = f"{self.peer_host}:{peer_port}"
        self.death = ""
        self.tls = tls
        self._owner = owner
        self._writer = writer
        self._inbox: deque[BaseMessage] = deque()

    def send(self, message: BaseMessage) -> None:
        """Send one message. Raises ConnectionLost."""
        try:
            self._owner.thread.run(self._write(message)).result(HANDOVER_TIMEOUT_S)
        except (RuntimeError, OSError, concurrent.futures.CancelledError) as error:  # the owner was closed
            raise ConnectionLost(self.death or "closed") from error

    def pop(self, kind: type[M]) -> M | None:
        """Take the oldest waiting message of this kind; None if there is none now."""
        with self._owner.condition:
            message = self.peek(kind)
            if message is not None:
                self._inbox.remove(message)
            return message

    def peek(self, kind: type[M]) -> M | None:
        """Return the message that `pop` would take, without taking it."""
        with self._owner.condition:
            return next((message for message in self._inbox if isinstance(message, kind)), None)

    def take(
        self, kind: type[M], *, deadline_at: float | None = None, check: Callable[[], None] | None = None
    ) -> M:
        """Wait for a message of this kind. Raises ConnectionLost, TimeoutError, or the error of `check`.

        Without a deadline `check` must keep one.
        """
        with self._owner.condition:
            while True:
                if check is not None:
                    check()
                message = self.pop(kind)
                if message is not None:
                    return message
                if self.death:
                    raise ConnectionLost(self.death)
                if deadline_at is not None and time.monotonic() >= deadline_at:
                    raise TimeoutError(f"no {kind.__name__} in time")
                self._owner.condition.wait(CONNECTION_POLL_S)

    def forget(self) -> None:
        """Drop all waiting messages."""
        with self._owner.condition:
            self._inbox.clear()

    def close(self) -> None:
        """Close the connection in the background; messages that were sent still arrive. Idempotent."""
        self.die("closed")
        self._owner.thread.call(self._end_writing)

    def die(self, reason: str) -> None:
        """Record the connection's end and its reason; the first reason counts."""
        with self._owner.condition:
            self.death = self.death or reason
            self._owner.condition.notify_all()

    # --- on the owner's thread ---

    async def serve(self, reader: asyncio.StreamReader, *, must_introduce: bool = False) -> None:
        """Read messages until either side ends the connection. `must_introduce`: a Hello has to come first."""
        try:
            if must_introduce:
                async with asyncio.timeout(self._owner.hello_timeout_s):
                    first = await _read(reader, MAX_HELLO_BYTES)
                if not isinstance(first, Hello):
                    raise ConnectionLost("the first message was no hello")
                self._receive(first)
                self._owner.know(self)
            while True:
                self._receive(await _read(reader, MAX_FRAME_BYTES))
        except msgspec.MsgspecError:
            self.die("the peer does not speak the protocol")
        except asyncio.IncompleteReadError:
            self.die("the connection was closed")
        except (ConnectionLost, OSError) as error:
            self.die(str(error) or "no hello in time")
        finally:
            self._writer.close()

    def _receive(self, message: BaseMessage) -> None:
        if isinstance(message, Hello) and not self._owner.authorize(message):
            self._writer.write(_frame(Abandon("the token is wrong or of an earlier offer")))
            raise ConnectionLost("wrong token")
        with self._owner.condition:
            if len(self._inbox) >= MAX_WAITING:
                raise ConnectionLost("the peer sends more than it may")
            if not self.death:
                self._inbox.append(message)
            self._owner.condition.notify_all()

    async def _write(self, message: BaseMessage) -> None:
        if self.death:
            raise ConnectionLost(self.death)
        self._writer.write(_frame(message))

    def _end_writing(self) -> None:
        """Close in two steps: a socket that is closed with unread data may lose its last message."""
        with contextlib.suppress(OSError, RuntimeError):  # the peer was faster
            self._writer.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._writer.close)


class ControlConnections:
    """All control connections of one end, with the thread that reads and writes them.

    `authorize` checks the token of a Hello. `known` are the connections with a right one.
    """

    def __init__(
        self,
        name: str,
        condition: threading.Condition,
        authorize: Callable[[Hello], bool] = lambda hello: False,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.condition = condition
        self.thread = LoopThread(name)
        self.authorize = authorize
        self.hello_timeout_s = hello_timeout_s
        self.known: list[Connection] = []
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None  # of the server
        self._serving: dict[Connection, asyncio.Task[None]] = {}
        atexit.register(self._close_at_exit)

    def listen(self, host: str, tls: ssl.SSLContext | None = None) -> str:
        """Accept connections on a free port of `host`, by TLS if its context is given. Returns "host:port"."""
        self._tls = tls
        sock = listening_socket(host, backlog=MAX_STRANGERS)
        port = sock.getsockname()[1]

        async def start() -> None:
            self._server = await asyncio.start_server(self._accept, sock=sock, ssl=tls)

        self.thread.run(start()).result()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def connect(self, address: str, timeout_s: float, certificate: str = "") -> Connection:
        """Open a connection to "host:port", by TLS if its certificate is given. Raises ConnectionLost."""
        host, _, port = address.rpartition(":")
        tls = trusting(certificate) if certificate else None

        async def open_one() -> Connection:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls)
            keep_alive(writer.get_extra_info("socket"))
            connection = Connection(self, writer, tls)
            self._serve(connection, connection.serve(reader))
            return connection

        try:
            return self.thread.run(open_one()).result(timeout_s + HANDOVER_TIMEOUT_S)
        except (OSError, ValueError, OverflowError) as error:
            raise ConnectionLost(f"no connection to {address} ({str(error) or 'no answer in time'})") from error

    def know(self, connection: Connection) -> None:
        """Add a connection whose peer has shown the right token to `known`."""
        with self.condition:
            self.known.append(connection)

    def forget_dead(self) -> None:
        """Remove ended connections from `known`."""
        with self.condition:
            self.known = [connection for connection in self.known if not connection.death]

    def close(self) -> None:
        """Stop listening, close all connections and end the thread, without waiting for it. Idempotent."""
        atexit.unregister(self._close_at_exit)
        with contextlib.suppress(RuntimeError):  # it was closed
            self.thread.run(self._end())

    def _close_at_exit(self) -> None:
        """Close at the process's exit if `close` was not called, so that last messages arrive."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.thread.run(self._end()).result(3 * LINGER_S)

    # --- on the thread ---

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) - len(self.known) >= MAX_STRANGERS:
            writer.close()
            return
        connection = Connection(self, writer, self._tls)
        self._serve(connection, connection.serve(reader, must_introduce=True))

    def _serve(self, connection: Connection, serving: Coroutine[None, None, None]) -> None:
        task = self._serving[connection] = asyncio.create_task(serving)
        task.add_done_callback(lambda _: self._serving.pop(connection))

    async def _end(self) -> None:
        if self._server is not None:
            for sock in self._server.sockets:  # a server that is closed amid an accept leaves that socket open
                asyncio.get_running_loop().remove_reader(sock)
            for _ in range(_ACCEPT_TURNS):
                await asyncio.sleep(0)
            self._server.close()
        for connection in self._serving:
            connection.close()
        if self._serving:
            await asyncio.wait(self._serving.values(), timeout=2 * LINGER_S)
        self.thread.stop()


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> BaseMessage:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if not 0 < size <= max_bytes:
        raise ConnectionLost("the peer does not speak the protocol")
    message: BaseMessage = _decoder.decode(await reader.readexactly(size))
    return message


def _frame(message: BaseMessage) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Peer:
    """The process at the other end of one connection, during one attempt.

    It carries a transport's small messages; those of an earlier attempt are dropped. `check` raises TransportBroken
    if the attempt is over for *any* peer, and costs microseconds. `host` is a worker's, as its Hello names it.
    """

    def __init__(self, connection: Connection, attempt_id: int, check: Callable[[], None], host: str = "") -> None:
        self.connection_id = connection.connection_id
        self.host = host
        self.own_host, self.peer_host = connection.own_host, connection.peer_host
        self.tls = connection.tls
        self.check = check
        self._connection = connection
        self._attempt_id = attempt_id

    def post(self, body: bytes) -> None:
        """Send a message. Raises TransportBroken."""
        try:
            self._connection.send(TransportBytes(attempt_id=self._attempt_id, body=body))
        except ConnectionLost as error:
            raise TransportBroken(str(error)) from error

    def take(self) -> bytes:
        """Wait for the peer's next message. Raises TransportBroken."""
        try:
            while True:
                message = self._connection.take(TransportBytes, check=self.check)
                if message.attempt_id == self._attempt_id:
                    return message.body
        except ConnectionLost as error:
            raise TransportBroken(str(error)) from error
