"""The protocol between a sender of weights and one engine worker: small messages over a TCP connection.

The sender listens, workers connect; the first message is a `Hello` with the offer's token, and whoever does not
say it within `HELLO_TIMEOUT_S` is dropped. Frames are a length (four bytes, big-endian) and a msgpack body of one
of the `Message` structs; no bulk data and no pickle. Every connection has one thread that reads, so that the end of
the peer is known at once, whatever else this process waits for. The reader alone closes the socket.

Order of an update, worker to sender: Hello, Ready, then for each attempt Go, TransportBytes and Arrived, at the end
Done or (any time) Fail; sender to worker: Accept or Refuse, then for each attempt (once all said Go) StartAttempt,
TransportBytes, EndAttempt or AbandonAttempt; Abandon ends all. A connection survives an update only by a `Done`, so
no message of an old update meets a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from agentloop_servers.tcp import keep_alive
from agentloop_servers.weight_transfer.transports.base import TransportBroken

HELLO_TIMEOUT_S = 5.0
FRAME_TIMEOUT_S = 15.0  # from the first byte of a frame to its last, either way
LINGER_S = 1.0  # how long a closed connection waits for the peer to have read the last message
CONNECTION_POLL_S = 0.05  # how late a flag that nobody announces may be seen
MAX_HELLO_BYTES = 2**16
MAX_FRAME_BYTES = 2**26  # the checksums of seven million tensors
MAX_WAITING = 1024  # messages; a transport has two buckets in flight, so this bound is never met by a sane peer
MAX_STRANGERS = 256  # connections that have not proved the token yet; more are turned away
HEADER = struct.Struct(">I")


class BaseMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """The base of all messages."""


class BadNews(BaseMessage, frozen=True):
    """The sender's word that something ends; tagged in its subclasses."""

    reason: str


class Hello(BaseMessage, frozen=True, tag="hello"):
    """A worker introduces itself. `host` and `device` are equal exactly for processes on one host or one device."""

    token: str
    rank: int
    host: str
    device: str  # "cpu", or the CUDA device's uuid
    can_hold: bool  # whether its memory has room beside the served weights
    num_receivers: int  # that the sender waits for
    num_optional: int = 0  # that come beside these, if they can
    is_optional: bool = False  # this is one of those


class Accept(BaseMessage, frozen=True, tag="accept"):
    """The worker is in. In one phase it first says Go at its commit, else together with Ready."""

    transport: str
    is_one_phase: bool
    bucket_bytes: int


class Refuse(BadNews, frozen=True, tag="refuse"):
    """The worker is not in."""


class Ready(BaseMessage, frozen=True, tag="ready"):
    """The worker's memory for the update is there."""


class Go(BaseMessage, frozen=True, tag="go"):
    """The bytes of an attempt may flow: the worker's answer to a roll call."""


class StartAttempt(BaseMessage, frozen=True, tag="start_attempt"):
    """Bucket 0 comes next; whatever came before is void."""

    attempt_id: int


class AbandonAttempt(BadNews, frozen=True, tag="abandon_attempt"):
    """The attempt is void; another one follows, or Abandon."""

    attempt_id: int


class Abandon(BadNews, frozen=True, tag="abandon"):
    """The update is off for this worker."""


class TransportBytes(BaseMessage, frozen=True, tag="transport"):
    """A transport's own message."""

    attempt_id: int
    body: bytes


class Arrived(BaseMessage, frozen=True, tag="arrived"):
    """Every bucket of the attempt has been consumed; the worker's transport is done with it."""

    attempt_id: int


class EndAttempt(BaseMessage, frozen=True, tag="end_attempt"):
    """All workers have every bucket; `checksums` has one entry a bucket."""

    attempt_id: int
    checksums: list[int]


class Done(BaseMessage, frozen=True, tag="done"):
    """The worker has everything and has compared it."""


class Fail(BaseMessage, frozen=True, tag="fail"):
    """The worker is out of this update."""

    reason: str


Message = (
    Hello
    | Accept
    | Refuse
    | Ready
    | Go
    | StartAttempt
    | AbandonAttempt
    | Abandon
    | TransportBytes
    | Arrived
    | EndAttempt
    | Done
    | Fail
)


M = TypeVar("M", bound=BaseMessage)
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
_connection_ids = itertools.count(1)


class ConnectionLost(Exception):
    """The peer is gone or has broken the protocol."""


class ConnectionTimeout(Exception):
    """The message that was waited for has not come in time."""


class Connection:
    """One connection to the other side.

    Thread-safe; all connections of one owner share its condition, notified at every change.

    Nothing is sent while the condition is held, so a `check` must not send.
    With `authorize` the first message must be a Hello that it accepts, and so must every later Hello.
    """

    def __init__(
        self,
        sock: socket.socket,
        condition: threading.Condition,
        *,
        authorize: Callable[[Hello], bool] | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.connection_id = next(_connection_ids)
        self.peer_address = _address_of_peer(sock)
        self._sock = sock
        self._condition = condition
        self._authorize = authorize
        self._send_lock = threading.Lock()
        self._inbox: deque[BaseMessage] = deque()
        self._death: str | None = None
        self._closed_at: float | None = None
        self._is_open = True  # the socket; guarded by the send lock
        self._is_known = authorize is None  # the token was proved
        self._hello_by = time.monotonic() + hello_timeout_s
        sock.settimeout(FRAME_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        self._reader = threading.Thread(
            target=self._read, name=f"weights-connection-{self.connection_id}", daemon=True
        )
        self._reader.start()

    @property
    def is_dead(self) -> bool:
        """True once the peer is gone, or this side has closed."""
        return self._death is not None

    @property
    def is_known(self) -> bool:
        """True once the peer has proved the token."""
        return self._is_known

    @property
    def death(self) -> str:
        """The reason why it is dead, in a few words; empty while it lives."""
        return self._death or ""

    def send(self, message: BaseMessage) -> None:
        """Send one message. Raises ConnectionLost."""
        body = _encoder.encode(message)
        with self._send_lock:
            if self._death is not None or not self._is_open:
                raise ConnectionLost(self._death or "closed")
            try:
                self._sock.sendall(HEADER.pack(len(body)) + body)
            except OSError as error:
                self._die(f"the connection broke ({error})")
                raise ConnectionLost(self.death) from error

    def pop(self, kind: type[M]) -> M | None:
        """Take the oldest waiting message of this kind, at once, or None."""
        with self._condition:
            for position, message in enumerate(self._inbox):
                if isinstance(message, kind):
                    del self._inbox[position]
                    return message
        return None

    def peek(self, kind: type[M]) -> M | None:
        """Return the message that `pop` would take, and leave it there."""
        with self._condition:
            return next((message for message in self._inbox if isinstance(message, kind)), None)

    def take(
        self, kind: type[M], *, deadline_at: float | None = None, check: Callable[[], None] | None = None
    ) -> M:
        """Wait for a message of this kind. Raises ConnectionLost, ConnectionTimeout, and whatever `check` raises.

        Without a deadline `check` must keep one.
        """
        with self._condition:
            while True:
                if check is not None:
                    check()
                message = self.pop(kind)
                if message is not None:
                    return message
                if self._death is not None:
                    raise ConnectionLost(self._death)
                if deadline_at is not None and time.monotonic() >= deadline_at:
                    raise ConnectionTimeout(f"no {kind.__name__} in time")
                self._condition.wait(CONNECTION_POLL_S)

    def forget(self) -> None:
        """Drop the messages that wait."""
        with self._condition:
            self._inbox.clear()

    def close(self) -> None:
        """Tell the peer that nothing more comes. Returns at once; the reader closes the socket. Idempotent."""
        with self._send_lock:
            if self._closed_at is None:
                self._closed_at = time.monotonic()
                self._die("closed")
                if self._is_open:
                    with contextlib.suppress(OSError):  # the peer was faster
                        self._sock.shutdown(socket.SHUT_WR)

    def _die(self, reason: str) -> None:
        with self._condition:
            self._death = self._death or reason
            self._condition.notify_all()

    def _read(self) -> None:
        try:
            while True:
                self._receive(_decoder.decode(self._read_frame()))
        except msgspec.MsgspecError:
            self._die("the peer does not speak the protocol")
        except (ConnectionLost, OSError) as error:
            self._die(str(error))
        finally:
            with self._send_lock:
                self._is_open = False
                self._sock.close()

    def _receive(self, message: BaseMessage) -> None:
        if isinstance(message, Hello) and self._authorize is not None:
            if not self._authorize(message):
                self.send(Refuse(reason="the token is wrong or of an earlier offer"))
                raise ConnectionLost("wrong token")
            self._is_known = True
        if not self._is_known:
            raise ConnectionLost("the first message was no hello")
        with self._condition:
            if len(self._inbox) >= MAX_WAITING:
                raise ConnectionLost("the peer sends more than it may")
            if self._closed_at is None:
                self._inbox.append(message)
            self._condition.notify_all()

    def _read_frame(self) -> bytes:
        header = self._read_exactly(HEADER.size, b"")
        (size,) = HEADER.unpack(header)
        if not 0 < size <= (MAX_FRAME_BYTES if self._is_known else MAX_HELLO_BYTES):
            raise ConnectionLost("the peer does not speak the protocol")
        return self._read_exactly(size, header)

    def _read_exactly(self, size: int, header: bytes) -> bytes:
        """Read `size` bytes. Without a header before them, the first may take any time if the peer is known."""
        parts = bytearray()
        deadline_at = time.monotonic() + FRAME_TIMEOUT_S if header else None
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while len(parts) < size:
            self._check_time(deadline_at)
            if not poller.poll(CONNECTION_POLL_S * 1000 * (1 if self._closed_at or not self._is_known else 10)):
                continue
            chunk = self._sock.recv(min(size - len(parts), 2**20))
            if not chunk:
                raise ConnectionLost("the connection was closed")
            if deadline_at is None:
                deadline_at = time.monotonic() + FRAME_TIMEOUT_S
            parts += chunk
        return bytes(parts)

    def _check_time(self, deadline_at: float | None) -> None:
        now = time.monotonic()
        if self._death is not None and self._closed_at is None:
            raise ConnectionLost(self._death)
        if deadline_at is not None and now > deadline_at:
            raise ConnectionLost("a message broke off")
        if not self._is_known and now > self._hello_by:
            raise ConnectionLost("no hello in time")
        if self._closed_at is not None and now > self._closed_at + LINGER_S:
            raise ConnectionLost("closed")


class AttemptPeer:
    """A `Peer`: the transport's messages of one attempt over a connection. `check` is the attempt's own."""

    def __init__(self, connection: Connection, attempt_id: int, check: Callable[[], None]) -> None:
        self._connection = connection
        self._attempt_id = attempt_id
        self.check = check

    @property
    def connection_id(self) -> int:
        return self._connection.connection_id

    def post(self, body: bytes) -> None:
        try:
            self._connection.send(TransportBytes(attempt_id=self._attempt_id, body=body))
        except ConnectionLost as error:
            raise TransportBroken(str(error)) from error

    def take(self) -> bytes:
        try:
            while True:
                message = self._connection.take(TransportBytes, check=self.check)
                if message.attempt_id == self._attempt_id:
                    return message.body
        except ConnectionLost as error:
            raise TransportBroken(str(error)) from error


class Listener:
    """The socket that accepts workers on `host`, on a port that the system chooses.

    `on_connection` is called from its own thread. A connection is handed out before it has proved the token: see
    `Connection.is_known`.
    """

    def __init__(
        self,
        host: str,
        condition: threading.Condition,
        authorize: Callable[[Hello], bool],
        on_connection: Callable[[Connection], None],
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=MAX_STRANGERS)
        self._condition = condition
        self._authorize = authorize
        self._on_connection = on_connection
        self._hello_timeout_s = hello_timeout_s
        self._strangers: list[Connection] = []
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"{shown}:{self._sock.getsockname()[1]}"
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="weights-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections stay. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._thread.join(FRAME_TIMEOUT_S)
            self._sock.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if not self._is_closed:
                    time.sleep(CONNECTION_POLL_S)  # out of file descriptors, or the peer left first
                continue
            self._strangers = [
                connection for connection in self._strangers if not (connection.is_known or connection.is_dead)
            ]
            if len(self._strangers) >= MAX_STRANGERS:
                sock.close()
                continue
            connection = Connection(
                sock, self._condition, authorize=self._authorize, hello_timeout_s=self._hello_timeout_s
            )
            self._strangers.append(connection)
            self._on_connection(connection)


def connect(address: str, condition: threading.Condition, timeout_s: float) -> Connection:
    """Open a connection to "host:port". Raises ConnectionLost."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=max(timeout_s, CONNECTION_POLL_S))
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectionLost(f"no connection to {address} ({error})") from error
    return Connection(sock, condition)


def _address_of_peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:  # it has gone already
        return "an unknown host"
    return f"{host}:{port}"
