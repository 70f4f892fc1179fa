"""The public port of a service, with keepers as threads: processes and keepers start and end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentloop.errors import ServiceUnavailable
from agentloop_servers.net.public_port import PortKeeper, PublicPort
from agentloop_servers.net.tcp import listening_socket


class Keepers:
    """The keepers of one port; the name refers to the newest one, as an actor's name does."""

    def __init__(self, port: int, linger_s: float = 5.0) -> None:
        self.port = port
        self.ended = threading.Event()
        self.keeper = PortKeeper("127.0.0.1", port, "app", self.ended.set, linger_s)

    async def find(self) -> str:
        path = self.keeper.path("app")
        assert path is not None
        return path


@pytest.fixture
def port() -> int:
    with listening_socket("127.0.0.1") as probe:
        return int(probe.getsockname()[1])


@asynccontextmanager
async def ingress(keepers: Keepers) -> AsyncIterator[socket.socket]:
    """The share of the port that an ingress process has."""
    public = PublicPort("the port", keepers.find)
    try:
        with await public.take() as listener:
            listener.setblocking(False)
            yield listener
    finally:
        await public.close()


async def accepted(listener: socket.socket, port: int) -> None:
    """Connect, and check that this listener accepts the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        async with asyncio.timeout(60):
            server, address = await loop.sock_accept(listener)
        with server:
            assert address == client.getsockname()


async def test_processes_share_one_port_that_nobody_else_gets(port: int) -> None:
    keepers = Keepers(port)
    async with ingress(keepers) as one:
        async with ingress(keepers) as other:
            await accepted(one, port)
            await accepted(other, port)
        await accepted(one, port)  # one of them closed its share
        with pytest.raises(OSError, match="in use"):
            listening_socket("127.0.0.1", port)
    assert keepers.keeper.path("another") is None


async def test_between_two_processes_connections_wait(port: int) -> None:
    keepers = Keepers(port)
    async with ingress(keepers) as one:
        await accepted(one, port)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        async with ingress(keepers) as next_one:
            server, address = await asyncio.get_running_loop().sock_accept(next_one)
            with server:
                assert address == client.getsockname()


async def test_a_new_keeper_gets_the_socket_from_those_that_have_it(port: int) -> None:
    keepers = Keepers(port, linger_s=0.2)
    async with ingress(keepers) as one:
        lost, keepers.keeper = keepers.keeper, PortKeeper("127.0.0.1", port, "app", keepers.ended.set, 5.0)
        for process in tuple(lost.processes):
            process.shutdown(socket.SHUT_RDWR)  # as if its keeper had died
        await asyncio.to_thread(keepers.ended.wait, 10)
        async with ingress(keepers) as other:
            await accepted(other, port)
            await accepted(one, port)


async def test_a_keeper_ends_after_the_last_process_and_gives_the_port_back(port: int) -> None:
    keepers = Keepers(port, linger_s=0.2)
    async with ingress(keepers):
        assert not await asyncio.to_thread(keepers.ended.wait, 1.0)
    assert await asyncio.to_thread(keepers.ended.wait, 10)
    listening_socket("127.0.0.1", port).close()


async def test_a_port_that_is_taken_is_refused_in_words(port: int) -> None:
    keepers = Keepers(port)
    public = PublicPort("the port", keepers.find)
    with (
        listening_socket("127.0.0.1", port),
        pytest.raises(ServiceUnavailable, match=r"the port: .* already in use"),
    ):
        await public.take(timeout_s=0.1)
