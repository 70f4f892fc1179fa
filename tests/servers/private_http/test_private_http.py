"""The private ports of a run: authentication, limits, and fast detection of a lost peer."""

import asyncio
import select
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agentloop.concurrency.aio import LoopThread
from agentloop.errors import (
    Conflict,
    DeadlineExceeded,
    EngineLost,
    EngineUnreachable,
    InvalidRequest,
)
from agentloop.values.codec import decode
from agentloop_servers.net.tcp import USER_TIMEOUT_MS
from agentloop_servers.net.tls import Certificates, RunAuthority, certificate
from agentloop_servers.private_http.client import MAX_OPENING, PrivateHttp
from agentloop_servers.private_http.fencing import CommandKind, FencingGuard, FencingToken
from agentloop_servers.private_http.server import Misdirected, PrivateServer, answer
from agentloop_servers.private_http.trust import Trust

OPTIONS = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}


class Port:
    """A server that echoes, and a client of it."""

    def __init__(
        self,
        secret: str = "secret",
        certificates: tuple[Certificates | None, ...] = (None, None),
        **options: object,
    ) -> None:
        """Set up the port; `certificates` are the server's and the caller's."""
        self.cancelled = asyncio.Event()
        self.accepted: list[dict[int, int]] = []
        routes = [web.post("/echo", self.echo), web.post("/hang", self.hang), web.post("/break", self.broken)]
        self.server = PrivateServer("echo", routes, Trust("secret", certificates[0]), **options)  # type: ignore[arg-type]
        self.http = PrivateHttp(
            Trust(secret, certificates[1]), lost=EngineLost, late=DeadlineExceeded, unreachable=EngineUnreachable
        )

    async def __aenter__(self) -> "Port":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.server.close()

    @property
    def place(self) -> str:
        """Return the server's "host:port"."""
        return self.server.url.split("/")[2]

    async def echo(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.accepted.append(options_of(request.transport.get_extra_info("socket")))
        return answer(len(await request.read()))

    async def hang(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return stream

    async def broken(self, request: web.Request) -> web.Response:
        raise ZeroDivisionError

    async def ask(self, path: str, body: bytes = b"", timeout_s: float = 10.0, **headers: str) -> int:
        async with self.http.open("POST", self.server.url + path, body, timeout_s, headers) as opened:
            return decode(await opened.read(), int)


def options_of(one: socket.socket) -> dict[int, int]:
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == USER_TIMEOUT_MS
    return {name: one.getsockopt(socket.IPPROTO_TCP, name) for name in OPTIONS}


async def test_both_ends_of_a_connection_notice_a_vanished_peer():
    async with Port() as port:
        assert await port.ask("/echo", b"abc") == 3
        assert port.accepted == [OPTIONS]
        async with port.http.open("POST", port.server.url + "/hang", b"") as opened:
            assert opened.connection is not None
            assert options_of(opened.connection.transport.get_extra_info("socket")) == OPTIONS


async def test_a_caller_of_another_run_is_refused_and_counted():
    async with Port("another") as port:
        with pytest.raises(EngineUnreachable, match="does not have"):
            await port.ask("/echo")
        assert (port.accepted, port.server.gate.refused) == ([], {401: 1})


async def test_a_stranger_gets_401_and_nothing_else():
    async with Port() as port:
        place = port.place
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02", b"x", b"\0agentloop/1\0" + bytes(24)):
            answer = await exchange(place, said)
            assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n"), said
            assert b'"unauthorized"' in answer
        assert (port.accepted, port.server.gate.refused) == ([], {401: 4})


async def test_a_call_meant_for_another_server_is_refused_before_it_is_handled():
    async with Port() as port:
        assert await ask(port.http, f"{port.server.url}/echo") == 0
        with pytest.raises(EngineUnreachable) as refused:
            await ask(port.http, f"http://{port.place}/replica-1/echo")
        assert isinstance(refused.value.__cause__, Misdirected)
        assert (len(port.accepted), port.server.gate.refused) == (1, {421: 1})


async def test_what_was_recorded_is_refused_when_it_is_sent_again():
    async with Port() as port, Port() as other:
        recorder = Recorder(port.place)
        async with await asyncio.start_server(recorder.pass_on, "127.0.0.1", 0) as relay:
            place = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            port.server.gate.address = place  # the recorder is between the two, like a reader on the network
            assert await ask(port.http, f"http://{place}/echo/echo") == 0
            await port.http.close()
        assert b"POST /echo/echo" in recorder.sent
        assert b"secret" not in recorder.sent
        for one in (port, other):
            answer = await exchange(one.place, recorder.sent)
            assert b"HTTP/1.1 409 Conflict\r\n" in answer
            assert one.server.gate.refused == {409: 1}
        assert (len(port.accepted), len(other.accepted)) == (1, 0)


async def test_what_took_over_a_dead_servers_port_learns_nothing_and_gives_no_answer():
    heard: list[bytes] = []
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\0" + b" " * 99, bytes(48)]

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.write(answers[len(heard) - 1])
        heard[-1] += await reader.read()  # reads everything
        writer.close()

    async with Port() as port:
        assert await port.ask("/echo") == 0
        url, place = port.server.url, port.place
        await port.server.close()
        host, _, number = place.rpartition(":")
        async with await asyncio.start_server(impostor, host, int(number)):
            for _ in answers:
                with pytest.raises(EngineUnreachable, match="does not have"):
                    await ask(port.http, f"{url}/echo")
    assert [len(each) for each in heard] == [37, 37]  # a hello: nonces and the name of the key
    assert not any(b"secret" in each or b"POST" in each for each in heard)


async def test_an_impostor_cannot_pass_the_proof_on_to_a_server_elsewhere():
    async with Port() as port:
        recorder = Recorder(port.place)
        async with await asyncio.start_server(recorder.pass_on, "127.0.0.1", 0) as relay:
            place = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            with pytest.raises(EngineUnreachable, match="does not have"):
                await ask(port.http, f"http://{place}/echo/echo")
        assert (port.accepted, b"POST" in recorder.sent) == ([], False)


async def test_a_body_is_bounded():
    async with Port(max_body_bytes=1000) as port:
        assert await port.ask("/echo", b"x" * 1000) == 1000
        with pytest.raises(InvalidRequest, match="1000 bytes"):
            await port.ask("/echo", b"x" * 2000)


async def test_a_caller_that_gives_up_cancels_its_call():
    async with Port() as port, asyncio.timeout(60):
        with pytest.raises(DeadlineExceeded):
            await port.ask("/hang", timeout_s=0.05)
        await port.cancelled.wait()


async def test_a_bug_and_a_foreign_server_are_errors_of_ours():
    async with Port() as port:
        with pytest.raises(Exception, match=r"ZeroDivisionError\) in echo") as caught:
            await port.ask("/break")
        assert getattr(caught.value, "code", "") == "internal_error"
        with pytest.raises(EngineLost, match="not from an agentloop server"):
            await port.ask("/no/such/route")
        await port.server.close()
        for _ in range(2):  # a pooled connection, then a new one
            with pytest.raises(EngineLost) as lost:
                await port.ask("/echo")
        assert isinstance(lost.value.__cause__, aiohttp.ClientConnectorError)


async def test_a_burst_of_connections_waits_in_the_system_while_the_server_is_busy():
    """A server that is busy for a moment loses no connection; dropped ones would be retried only after seconds."""
    async with Port() as port:
        host, _, number = port.place.rpartition(":")

        def connect() -> list[socket.socket]:
            return [socket.create_connection((host, int(number)), timeout=10) for _ in range(500)]

        before = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            opened = thread.submit(connect).result()  # the server's event loop does not run during this call
        assert time.monotonic() - before < 9  # a dropped connection takes ten seconds
        for one in opened:
            one.close()
        assert await port.ask("/echo", b"abc") == 3


async def test_few_connections_to_one_server_are_opened_at_a_time():
    # the backlog takes one connection, and no other handshake is answered
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        number = deaf.getsockname()[1]
        http = PrivateHttp(Trust("secret"), lost=EngineLost, late=DeadlineExceeded)
        asking = [asyncio.create_task(ask(http, f"http://127.0.0.1:{number}/echo")) for _ in range(4 * MAX_OPENING)]
        await asyncio.sleep(0.5)
        assert 0 < num_sockets_to(number) <= MAX_OPENING + 2  # and the connections in the backlog
        async with Port() as port:  # connections to another server are not delayed
            assert await ask(http, f"{port.server.url}/echo") == 0
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await http.close()


async def test_a_burst_opens_no_more_connections_than_run_at_once():
    async with Port() as port:
        for _ in range(3):
            await asyncio.gather(*(port.ask("/echo") for _ in range(300)))
        number = int(port.place.rpartition(":")[2])
        num_opened = num_sockets_to(number)
        await asyncio.gather(*(port.ask("/echo") for _ in range(300)))
        assert num_sockets_to(number) == num_opened <= 300  # kept for the next burst


async def test_a_process_that_stands_still_calls_no_server_dead():
    """A connection takes several rounds of the event loop, each of which exceeds the whole deadline."""
    thread, port, loop = LoopThread("server"), Port(), asyncio.get_running_loop()
    await asyncio.wrap_future(thread.run(port.server.start()))
    http = PrivateHttp(Trust("secret"), lost=EngineLost, late=DeadlineExceeded, connect_timeout_s=0.2)
    num_left = 6

    def stand_still() -> None:
        nonlocal num_left
        time.sleep(0.3)
        num_left -= 1
        if num_left:
            loop.call_soon(stand_still)

    try:
        asking = asyncio.create_task(ask(http, f"{port.server.url}/echo"))
        loop.call_soon(stand_still)
        assert await asking == 0
    finally:
        await http.close()
        await asyncio.wrap_future(thread.run(port.server.close()))
        thread.stop()


async def test_a_server_that_cannot_be_reached_is_told_in_time():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        place = deaf.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(place)
        http = PrivateHttp(
            Trust("secret"),
            lost=EngineLost,
            late=DeadlineExceeded,
            unreachable=EngineUnreachable,
            connect_timeout_s=0.3,
        )
        with pytest.raises(EngineUnreachable, match="could not connect within"):
            await ask(http, f"http://127.0.0.1:{place[1]}/echo")
        await http.close()
        for filler in fillers:
            filler.close()


async def test_with_certificates_nothing_travels_in_clear():
    authority = RunAuthority.of(certificate())
    async with Port(certificates=(authority, authority.of_workers)) as port:
        recorder = Recorder(port.place)
        async with await asyncio.start_server(recorder.pass_on, "127.0.0.1", 0) as relay:
            place = f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
            port.server.gate.address = place
            body = b"a body that is read by nobody" * 100
            async with port.http.open("POST", f"https://{place}/echo/echo", body) as opened:
                assert decode(await opened.read(), int) == len(body)
            await port.http.close()
        assert len(recorder.sent) > len(body)
        assert not any(part in recorder.sent for part in (b"POST", b"agentloop", b"read by nobody"))
        assert not (await exchange(port.place, b"POST /echo/echo HTTP/1.1\r\n\r\n")).startswith(b"HTTP")
        assert len(port.accepted) == 1


@pytest.mark.parametrize("case", ["another run's", "none", "another address"])
async def test_a_server_of_another_authority_or_address_is_refused_and_so_is_one_in_clear(case):
    authority = RunAuthority.of(certificate())
    held = {
        "another run's": RunAuthority.of(certificate()),
        "none": None,
        "another address": AtAnotherAddress(authority.cert, authority.key),
    }[case]
    async with Port(certificates=(held, authority)) as port:
        with pytest.raises(EngineUnreachable):
            await ask(port.http, f"https://{port.place}/echo/echo")
        assert port.accepted == []


class AtAnotherAddress(RunAuthority):
    """The authority of a process that now uses another process's address."""

    def server(self, address: str) -> ssl.SSLContext:
        return RunAuthority.server(self, "127.0.0.9")


class Recorder:
    """A proxy in front of a server that records all bytes sent to it."""

    def __init__(self, place: str) -> None:
        self.sent = b""
        self._host, _, self._port = place.rpartition(":")

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(self._host, int(self._port))

        async def back() -> None:
            while piece := await there.read(4096):
                writer.write(piece)

        answering = asyncio.create_task(back())
        while piece := await reader.read(4096):
            self.sent += piece
            to_there.write(piece)
        to_there.close()
        await answering
        writer.close()


async def exchange(place: str, said: bytes) -> bytes:
    """Send bytes to a port, and return all bytes of the answer."""
    host, _, port = place.rpartition(":")
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        answer = await reader.read()
        writer.close()
    return answer


async def ask(http: PrivateHttp, url: str) -> int:
    async with http.open("POST", url, b"") as opened:
        return decode(await opened.read(), int)


def num_sockets_to(port: int) -> int:
    """Return the number of this host's client sockets to a port of 127.0.0.1, opened or opening."""
    ends = (line.split()[2:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(peer == f"0100007F:{port:04X}" and state in ("01", "02") for peer, state in ends)


def test_a_long_stage_is_not_late_because_of_what_froze_meanwhile():
    guard = FencingGuard()
    guard.admit(CommandKind.FREEZE, FencingToken(1, 2))
    guard.admit(CommandKind.STAGE, FencingToken(1, 1))
    with pytest.raises(Conflict):
        guard.admit(CommandKind.STAGE, FencingToken(1, 1))


async def test_connections_of_a_burst_wait_while_the_server_computes():
    """E3: asyncio's backlog of 128 dropped further handshakes, which were retried after a second."""
    num_callers = 600
    async with Port() as port:
        host, _, number = port.place.partition(":")
        callers = [socket.socket() for _ in range(num_callers)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex((host, int(number)))  # this event loop does not run, so no connection is accepted
        try:
            _, connected, _ = select.select([], callers, [], 0.5)
            assert len(connected) == num_callers
        finally:
            for caller in callers:
                caller.close()
