"""Pickles sent to every port of a service are never loaded, and the service continues."""

from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil

from tests.support.service.whole_service import simulated_config, whole_site


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self._path),))


def listening() -> set[tuple[str, int]]:
    """Return the ports that this process listens on."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


async def said(host: str, port: int, data: bytes) -> None:
    """Send data, and wait until the peer has closed the connection or a second has passed."""
    reader, writer = await asyncio.open_connection(host, port)
    with suppress(ConnectionError, TimeoutError):
        writer.write(data)
        async with asyncio.timeout(1.0):
            await reader.read()
    writer.close()


async def test_56_no_port_loads_a_pickle(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))
    with suppress(FileExistsError):
        pickle.loads(trap)
    assert sprung.is_dir()  # a loaded pickle would be detected
    sprung.rmdir()
    before = listening()
    async with whole_site(simulated_config(replicas=1, ingress_replicas=2), tmp_path) as site:
        ports = listening() - before
        assert len(ports) >= 6  # public and private ports of two processes, coordinator, replica
        kinds = ("application/octet-stream", "application/x-pickle", "application/json", "application/msgpack")
        bodies = [
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(trap)}\r\nConnection: close\r\n\r\n".encode()
            + trap
            for path in ("/v1/chat/completions", "/generate", "/take")
            for kind in kinds
        ]
        framed = len(trap).to_bytes(4, "big") + trap
        await asyncio.gather(*(said(host, port, data) for host, port in ports for data in (trap, framed, *bodies)))
        assert not sprung.exists()
        async with aiohttp.ClientSession() as http:
            for url in site.urls:
                async with http.get(f"{url}/health") as answer:
                    assert answer.status == 200
