"""The proof of both ends of a private connection that they know a key of the run, which is never sent.

Once for each connection, before its first HTTP request:

    caller: MAGIC, id of its key (8 bytes), nonce (16)
    server: nonce (16), HMAC-SHA256(key, "server", its address, both nonces)
    caller: the server's nonce, HMAC-SHA256(key, "caller", both nonces)

So a process that has taken over the address of another one learns no key and no request, and it cannot pass the
nonces on to a server at another address, whose answer names that one. A recorded connection is of no use: each has
a nonce of the server. What else speaks to the port gets one answer in HTTP, and its connection is closed.

Workers run users' code, and know a key of their role alone; the secret cannot be made of it.
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
MAX_ARRIVALS = 4096  # connections that have not shown a key yet: a burst of a run's own is below it

_HELLO = b"\0agentloop/1\0"  # begins no HTTP request
_NONCE_BYTES = 16
_HELLO_BYTES = len(_HELLO) + 8 + _NONCE_BYTES
_PROOF_BYTES = _NONCE_BYTES + 32
_ROLE_KEY_PURPOSE = b"agentloop worker key\0"  # the run's secret has other uses, whose digests are no keys
_KEY_ID_PURPOSE = b"agentloop key id\0"


@dataclass(frozen=True, slots=True)
class Trust:
    """The means by which processes of a run know each other: the run's secret, or its workers' key."""

    key: str = field(repr=False)
    certificates: Certificates | None = None  # None: connections are not encrypted

    @property
    def scheme(self) -> str:
        """That of the URLs of private ports."""
        return "http" if self.certificates is None else "https"

    @property
    def of_workers(self) -> Trust:
        """That of the run's workers: their key is the HMAC-SHA256 of their role under the run's secret, in hex."""
        key = hmac.digest(self.key.encode(), _ROLE_KEY_PURPOSE, "sha256").hex()
        return Trust(key, self.certificates and self.certificates.of_workers)

    def server_tls(self, address: str) -> ssl.SSLContext | None:
        """Return the TLS context of a server at this address. Raises InvalidRequest."""
        return None if self.certificates is None else self.certificates.server(address)

    @property
    def key_id(self) -> bytes:
        """The name of the key, which says nothing of it."""
        return self.mac(_KEY_ID_PURPOSE)[:8]

    def mac(self, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of the parts, of which only one may be of any length."""
        return hmac.digest(self.key.encode(), b"".join(parts), "sha256")


class Impostor(ConnectionError):
    """A server that does not know the caller's key, or another server than it was called as."""


async def prove(transport: asyncio.Transport, trust: Trust, address: str) -> None:
    """Show the server of a new connection that this process knows the key, and see that the server does.

    `address` is "host:port", as it was called. The transport has no protocol of use when this returns. Raises
    Impostor and ConnectionError; the server has then received nothing.
    """
    reply = _Reply()
    transport.set_protocol(reply)
    nonce = os.urandom(_NONCE_BYTES)
    transport.write(b"".join((_HELLO, trust.key_id, nonce)))
    data = await reply.whole
    theirs, proof = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, trust.mac(b"server", address.encode(), nonce, theirs)):
        raise Impostor(errno.EACCES, "the server does not know this process's key of the run")
    if transport.is_closing():
        raise ConnectionResetError(errno.ECONNRESET, "the server hung up")
    transport.write(theirs + trust.mac(b"caller", nonce, theirs))


class _Reply(asyncio.Protocol):
    """The first bytes of a server: its proof, or something else."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) >= _PROOF_BYTES and not self.whole.done():
            self.whole.set_result(self._data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.whole.done():
            self.whole.set_exception(exc or ConnectionResetError(errno.ECONNRESET, "the server hung up"))


class Gate:
    """The entry to a private port: it hands a connection on once its caller has shown a key."""

    def __init__(self, trusts: Iterable[Trust]) -> None:
        self._trusts = {trust.key_id: trust for trust in trusts}
        self.address = ""  # "host:port", as callers know it
        self.refused: Counter[int] = Counter()  # connections and calls, by the status of the answer
        self._strangers: set[_Arrival] = set()

    def arrival(self, make: Callable[[Trust], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection; `make` gives its next one, by what the caller knows."""
        return _Arrival(self, make)

    def close(self) -> None:
        """End the connections that have not shown a key. Idempotent."""
        for one in tuple(self._strangers):
            one.transport.abort()

    def entered(self, one: _Arrival) -> None:
        """Count a new connection; one too many is cut."""
        self._strangers.add(one)
        if len(self._strangers) > MAX_ARRIVALS:
            one.transport.abort()

    def left(self, one: _Arrival) -> None:
        """Count a connection no more. Idempotent."""
        self._strangers.discard(one)

    def find(self, key_id: bytes) -> Trust:
        """Return the key of that name. Raises Unauthorized."""
        trust = self._trusts.get(key_id)
        if trust is None:
            raise Unauthorized("wrong or missing secret of the run")
        return trust


class _Arrival(asyncio.Protocol):
    """A connection whose caller has not shown a key yet."""

    transport: asyncio.Transport

    def __init__(self, gate: Gate, make: Callable[[Trust], asyncio.Protocol]) -> None:
        self._gate = gate
        self._make = make
        self._data = b""
        self._trust: Trust | None = None  # that of the hello
        self._nonces = b"", b""  # the caller's and our own

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
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
            raise Unauthorized("wrong or missing secret of the run")
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
            raise Unauthorized("wrong or missing secret of the run")
        if not hmac.compare_digest(named, own):
            raise Fenced("a copy of what was sent on another connection")
        self._leave()
        protocol, rest = self._make(trust), self._data[_PROOF_BYTES:]
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        if rest:
            protocol.data_received(rest)

    def _leave(self) -> None:
        self._timer.cancel()
        self._gate.left(self)
