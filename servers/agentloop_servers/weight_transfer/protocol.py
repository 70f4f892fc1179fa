"""The control connections between a weight sender and the engine workers: small messages over TCP, no bulk data.

The sender listens and workers connect. A frame is a length (four bytes, big-endian) and one `Message` in msgpack,
never pickle. In each process one thread (`ControlConnections`) reads and writes all connections, so the end of a
peer is detected at once, even while the process waits for something else.

Messages of an update: Hello, Accept; for each attempt Go from every worker, StartAttempt, TransportBytes both
ways, Arrived and EndAttempt; finally Done. Either side may send Abandon to end an attempt or the update. A
connection is reused only after Done, so messages of different updates never mix.
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
HANDOVER_TIMEOUT_S = 15.0  # for the connection's thread to send a message, not for the peer to read it
LINGER_S = 1.0  # for the peer of a closed connection to read the last message
_ACCEPT_TURNS = 4  # event loop iterations after which a connection in `accept` is complete
CONNECTION_POLL_S = 0.05  # seconds between two reads of flags that change without a notification
MAX_HELLO_BYTES = 2**16
MAX_FRAME_BYTES = 2**26  # enough for the checksums of seven million tensors
MAX_WAITING = 1024  # messages; a transport has two buckets in flight, so a correct peer stays below it
MAX_STRANGERS = 256  # connections without a valid token; further ones are closed
HEADER = struct.Struct(">I")


class BaseMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of all control messages."""


class Hello(BaseMessage, frozen=True, tag="hello"):
    """The first message of a worker. Processes on one host have the same `host`, on one GPU the same `device`."""

    token: str
    rank: int
    host: str
    device: str  # "cpu", or the CUDA device's uuid
    can_hold: bool  # it has staging memory in addition to the served weights
    num_receivers: int  # the number of workers that the sender waits for
    num_optional: int = 0  # further workers that the sender does not wait for
    is_optional: bool = False  # this is one of the optional workers


class Accept(BaseMessage, frozen=True, tag="accept"):
    """The sender's response to Hello.

    The worker sends Go once it has memory; in a blocking update, at its commit.
    """

    transport: str
    is_one_phase: bool
    bucket_bytes: int


class Go(BaseMessage, frozen=True, tag="go"):
    """The worker is ready to receive the bytes of an attempt."""


class StartAttempt(BaseMessage, frozen=True, tag="start_attempt"):
    """The sender starts an attempt at bucket 0. Buckets of earlier attempts are void."""

    attempt_id: int


class TransportBytes(BaseMessage, frozen=True, tag="transport"):
    """A message of a transport to its other end."""

    attempt_id: int
    body: bytes


class Arrived(BaseMessage, frozen=True, tag="arrived"):
    """The worker has consumed every bucket of the attempt."""

    attempt_id: int


class EndAttempt(BaseMessage, frozen=True, tag="end_attempt"):
    """All workers have every bucket. `checksums` has one entry per bucket."""

    attempt_id: int
    checksums: list[int]


class Done(BaseMessage, frozen=True, tag="done"):
    """The worker has found all checksums equal."""


class Abandon(BaseMessage, frozen=True, tag="abandon"):
    """Ends an attempt, which is followed by another one. Without `attempt_id` it ends the worker's update."""

    reason: str
    attempt_id: int | None = None


Message = Hello | Accept | Go | StartAttempt | TransportBytes | Arrived | EndAttempt | Done | Abandon
M = TypeVar("M", bound=BaseMessage)
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
_connection_ids = itertools.count(1)


class ConnectionLost(Exception):
    """The peer is gone or has violated the protocol."""


class TransportBroken(Exception):
    """The attempt has failed: a lost peer, a cancellation or a deadline. `str()` is one line."""


class Connection:
    """One control connection, used from any thread except its owner's. Every change notifies the owner's
    condition.

    `death` is the reason why the connection ended; empty while it is open. `send` returns after the message was
    written. The caller must not hold the condition during `send`, so a `check` must not send.
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
        try:
            self._owner.thread.run(self._write(message)).result(HANDOVER_TIMEOUT_S)
        except (RuntimeError, OSError, concurrent.futures.CancelledError) as error:  # the owner was closed
            raise ConnectionLost(self.death or "closed") from error

    def pop(self, kind: type[M]) -> M | None:
        """Remove and return the oldest message of this type; None if the inbox has none."""
        with self._owner.condition:
            message = self.peek(kind)
            if message is not None:
                self._inbox.remove(message)
            return message

    def peek(self, kind: type[M]) -> M | None:
        """Return the message that `pop` would return, without removing it."""
        with self._owner.condition:
            return next((message for message in self._inbox if isinstance(message, kind)), None)

    def take(
        self, kind: type[M], *, deadline_at: float | None = None, check: Callable[[], None] | None = None
    ) -> M:
        """Wait for a message of this type. Raises ConnectionLost, TimeoutError, or the error of `check`.

        Without `deadline_at`, `check` must enforce a deadline.
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
                    raise TimeoutError(f"the peer sent no {kind.__name__} message before the deadline")
                self._owner.condition.wait(CONNECTION_POLL_S)

    def forget(self) -> None:
        """Drop all received messages."""
        with self._owner.condition:
            self._inbox.clear()

    def close(self) -> None:
        """Close the connection in the background, after the messages that were sent. Idempotent."""
        self.die("closed")
        self._owner.thread.call(self._end_writing)

    def die(self, reason: str) -> None:
        """Record why the connection ended. The first reason is kept."""
        with self._owner.condition:
            self.death = self.death or reason
            self._owner.condition.notify_all()

    # On the owner's thread

    async def serve(self, reader: asyncio.StreamReader, *, must_introduce: bool = False) -> None:
        """Read messages until either side closes the connection.

        With `must_introduce` the first must be a Hello.
        """
        try:
            if must_introduce:
                async with asyncio.timeout(self._owner.hello_timeout_s):
                    first = await _read(reader, MAX_HELLO_BYTES)
                if not isinstance(first, Hello):
                    raise ConnectionLost("the first message was not a Hello")
                self._receive(first)
                self._owner.know(self)
            while True:
                self._receive(await _read(reader, MAX_FRAME_BYTES))
        except msgspec.MsgspecError:
            self.die("the peer sent a malformed message")
        except asyncio.IncompleteReadError:
            self.die("the peer closed the connection")
        except (ConnectionLost, OSError) as error:
            self.die(str(error) or "the peer sent no Hello within its timeout")
        finally:
            self._writer.close()

    def _receive(self, message: BaseMessage) -> None:
        if isinstance(message, Hello) and not self._owner.authorize(message):
            self._writer.write(_frame(Abandon("the token is wrong or belongs to an earlier offer")))
            raise ConnectionLost("wrong token")
        with self._owner.condition:
            if len(self._inbox) >= MAX_WAITING:
                raise ConnectionLost(f"the peer sent more than {MAX_WAITING} messages that were not read")
            if not self.death:
                self._inbox.append(message)
            self._owner.condition.notify_all()

    async def _write(self, message: BaseMessage) -> None:
        if self.death:
            raise ConnectionLost(self.death)
        self._writer.write(_frame(message))

    def _end_writing(self) -> None:
        """Close in two steps, because a socket that is closed with unread data may lose its last message."""
        with contextlib.suppress(OSError, RuntimeError):  # the peer has closed it already
            self._writer.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self._writer.close)


class ControlConnections:
    """All control connections of one process, with the thread that reads and writes them.

    `authorize` checks the token of a Hello. `known` has the connections with a valid token.
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
        self._tls: ssl.SSLContext | None = None  # the server's
        self._serving: dict[Connection, asyncio.Task[None]] = {}
        atexit.register(self._close_at_exit)

    def listen(self, host: str, tls: ssl.SSLContext | None = None) -> str:
        """Accept connections on a free port of `host`, with TLS if `tls` is given. Returns "host:port"."""
        self._tls = tls
        sock = listening_socket(host, backlog=MAX_STRANGERS)
        port = sock.getsockname()[1]

        async def start() -> None:
            self._server = await asyncio.start_server(self._accept, sock=sock, ssl=tls)

        self.thread.run(start()).result()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def connect(self, address: str, timeout_s: float, certificate: str = "") -> Connection:
        """Open a connection to "host:port", with TLS if a certificate is given. Raises ConnectionLost."""
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
            raise ConnectionLost(
                f"could not connect to {address}: {str(error) or f'no response within {timeout_s:g} s'}"
            ) from error

    def know(self, connection: Connection) -> None:
        """Add a connection with a valid token to `known`."""
        with self.condition:
            self.known.append(connection)

    def forget_dead(self) -> None:
        """Remove closed connections from `known`."""
        with self.condition:
            self.known = [connection for connection in self.known if not connection.death]

    def close(self) -> None:
        """Stop listening, close all connections and stop the thread, without waiting for it. Idempotent."""
        atexit.unregister(self._close_at_exit)
        with contextlib.suppress(RuntimeError):  # already closed
            self.thread.run(self._end())

    def _close_at_exit(self) -> None:
        """Close at the exit of the process if `close` was not called, so that the last messages arrive."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self.thread.run(self._end()).result(3 * LINGER_S)

    # On the thread

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
            for sock in self._server.sockets:  # closing a server during an accept would leak that socket
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
        raise ConnectionLost("the peer sent a malformed frame")
    message: BaseMessage = _decoder.decode(await reader.readexactly(size))
    return message


def _frame(message: BaseMessage) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Peer:
    """The process at the other end of a connection, during one attempt.

    Carries a transport's small messages and drops those of earlier attempts. `check` raises TransportBroken if the
    attempt is over for any peer; it takes microseconds. `host` is the `host` of a worker's Hello.
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
