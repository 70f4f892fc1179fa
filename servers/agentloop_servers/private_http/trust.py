"""Mutual authentication of private connections by a key of the run, which is never sent.

Once per connection, before its first HTTP request:

    caller: MAGIC, id of its key (8 bytes), nonce (16)
    server: nonce (16), HMAC-SHA256(key, "server", its address, both nonces)
    caller: the server's nonce, HMAC-SHA256(key, "caller", both nonces)

The server's address is in its HMAC, so a process that has taken over an address cannot relay the nonces to the
real server; a recorded connection cannot be replayed, because the server's nonce is new. Workers run users' code
and have only a key of their role, from which the run's secret cannot be derived.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import orjson

from agentloop.errors import AgentLoopError, Unauthorized
from agentloop_servers.net.tls import Certificates
from agentloop_servers.private_http.fencing import Fenced

HELLO_TIMEOUT_S = 5.0
MAX_ARRIVALS = 4096  # unauthenticated connections; bursts of a run's own processes stay below it

_HELLO = b"\0agentloop/1\0"  # cannot be the beginning of an HTTP request
_NONCE_BYTES = 16
_HELLO_BYTES = len(_HELLO) + 8 + _NONCE_BYTES
_PROOF_BYTES = _NONCE_BYTES + 32
_ROLE_KEY_PURPOSE = b"agentloop worker key\0"  # separates the role key from other digests of the run's secret
_KEY_ID_PURPOSE = b"agentloop key id\0"


@dataclass(frozen=True, slots=True)
class Trust:
    """The credentials of a run's processes: the run's secret, or its workers' key."""

    key: str = field(repr=False)
    certificates: Certificates | None = None  # None: connections are not encrypted

    @property
    def scheme(self) -> str:
        """The scheme of private URLs."""
        return "http" if self.certificates is None else "https"

    @property
    def of_workers(self) -> Trust:
        """The credentials of workers. Their key is the HMAC-SHA256 of their role with the run's secret, in hex."""
        key = hmac.digest(self.key.encode(), _ROLE_KEY_PURPOSE, "sha256").hex()
        return Trust(key, self.certificates and self.certificates.of_workers)

    def server_tls(self, address: str) -> ssl.SSLContext | None:
        """Return the TLS context to serve with at this address; None without certificates.

        Raises InvalidRequest.
        """
        return None if self.certificates is None else self.certificates.server(address)

    @property
    def key_id(self) -> bytes:
        """The public name of the key, which does not reveal it."""
        return self.mac(_KEY_ID_PURPOSE)[:8]

    def mac(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the parts. Only one of them may have a variable length."""
        return hmac.digest(self.key.encode(), b"".join(parts), "sha256")


class Impostor(ConnectionError):
    """A server that does not have the caller's key, or is not the server that was called."""


async def prove(transport: asyncio.Transport, trust: Trust, address: str) -> None:
    """Authenticate this process and the server of a new connection to each other.

    `address` is "host:port" as it was called. Afterwards the transport needs a new protocol. Raises Impostor and
    ConnectionError; the server has then received nothing of a request.
    """
    reply = _Reply()
    transport.set_protocol(reply)
    nonce = os.urandom(_NONCE_BYTES)
    transport.write(b"".join((_HELLO, trust.key_id, nonce)))
    data = await reply.whole
    theirs, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, trust.mac(b"server", address.encode(), nonce, theirs)):
        raise Impostor(errno.EACCES, "the server does not have this process's key: it belongs to another run")
    if transport.is_closing():
        raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
    transport.write(theirs + trust.mac(b"caller", nonce, theirs))


class _Reply(asyncio.Protocol):
    """The first bytes of a server: its proof, or another response."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) >= _PROOF_BYTES and not self.whole.done():
            self.whole.set_result(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.whole.done():
            self.whole.set_exception(
                exc or ConnectionResetError(errno.ECONNRESET, "the server closed the connection")
            )


class Gate:
    """Authenticates the callers of a private port, and then passes their connections on."""

    def __init__(self, trusts: Iterable[Trust]) -> None:
        self._trusts = {trust.key_id: trust for trust in trusts}
        self.address = ""  # "host:port" as callers use it
        self.refused: Counter[int] = Counter()  # HTTP status -> refused connections and calls
        self._strangers: set[_Arrival] = set()

    def arrival(self, make: Callable[[Trust], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection. `make` returns the next protocol for the caller's key."""
        return _Arrival(self, make)

    def close(self) -> None:
        """Close the unauthenticated connections. Idempotent."""
        for one in tuple(self._strangers):
            one.transport.abort()

    def entered(self, one: _Arrival) -> None:
        """Add a new connection, and close it if there are too many."""
        self._strangers.add(one)
        if len(self._strangers) > MAX_ARRIVALS:
            one.transport.abort()

    def left(self, one: _Arrival) -> None:
        """Remove a connection. Idempotent."""
        self._strangers.discard(one)

    def find(self, key_id: bytes) -> Trust:
        """Return the credentials with this key id. Raises Unauthorized."""
        trust = self._trusts.get(key_id)
        if trust is None:
            raise Unauthorized("the caller's key does not belong to this run")
        return trust


class _Arrival(asyncio.Protocol):
    """A connection whose caller is not authenticated yet."""

    transport: asyncio.Transport

    def __init__(self, gate: Gate, make: Callable[[Trust], asyncio.Protocol]) -> None:
        self._gate = gate
        self._make = make
        self._data = b""
        self._trust: Trust | None = None  # the credentials that the caller's first message names
        self._nonces = b"", b""  # the caller's nonce and our own

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transport does not inherit from asyncio.Transport
        self.transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.transport.abort)
        self._gate.entered(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            if self._trust is None:
                self._greet()
            if self._trust is not None and len(self._data) >= _PROOF_BYTES:
                self._admit(self._trust)
        except AgentLoopError as error:
            self._gate.refused[error.http_status] += 1
            self._leave()
            self._data = b""
            body, status = orjson.dumps(error.to_wire()), HTTPStatus(error.http_status)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    def _greet(self) -> None:
        if not _HELLO.startswith(self._data[: len(_HELLO)]):
            raise Unauthorized("the caller did not authenticate with a key of this run")
        if len(self._data) < _HELLO_BYTES:
            return
        hello, self._data = self._data[:_HELLO_BYTES], self._data[_HELLO_BYTES:]
        key_id, theirs, own = hello[len(_HELLO) : -_NONCE_BYTES], hello[-_NONCE_BYTES:], os.urandom(_NONCE_BYTES)
        self._trust, self._nonces = (trust := self._gate.find(key_id)), (theirs, own)
        self.transport.write(own + trust.mac(b"server", self._gate.address.encode(), theirs, own))

    def _admit(self, trust: Trust) -> None:
        theirs, own = self._nonces
        named, proof = self._data[:_NONCE_BYTES], self._data[_NONCE_BYTES:_PROOF_BYTES]
        if not hmac.compare_digest(proof, trust.mac(b"caller", theirs, named)):
            raise Unauthorized("the caller's proof does not match its key")
        if not hmac.compare_digest(named, own):
            raise Fenced("the caller's proof was recorded on another connection")
        self._leave()
        protocol, rest = self._make(trust), self._data[_PROOF_BYTES:]
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if rest:
            protocol.data_received(rest)

    def _leave(self) -> None:
        self._timer.cancel()
        self._gate.left(self)
