"""A TCP proxy that cuts connections at random, at every stage of a call, deterministically for a seed.

A client whose connection is cut cannot know which stage its call reached. Some connections are cut only towards the
client: the service continues and finishes a call without a client, as behind a proxy that detects the cut late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

LINGER_S = 5.0  # time that the service's side of a half-cut connection stays open
READ_BYTES = 1 << 16


class Cut(StrEnum):
    """The stage at which a connection is cut."""

    BEFORE = "before the request is passed on"
    IN_REQUEST = "in the middle of the request"
    AFTER_REQUEST = "after the request, before the answer"
    IN_ANSWER = "in the middle of the answer"
    AFTER_ANSWER = "after the answer, before its end is known"


class CuttingProxy:
    """A proxy for one port. `rate` of its connections are cut; `cuts` counts them by stage."""

    def __init__(self, port: int, rate: float, seed: int) -> None:
        self._port = port
        self._rate = rate
        self._random = random.Random(seed)
        self.num_connections = 0
        self.cuts: Counter[Cut] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection of a client."""
        self.num_connections += 1
        cut = self._random.choice(list(Cut)) if self._random.random() < self._rate else None
        is_half = self._random.random() < 0.5
        share = self._random.uniform(0.05, 0.95)
        if cut is not None:
            self.cuts[cut] += 1
        try:
            if cut is not Cut.BEFORE:
                await self._pass_on(reader, writer, cut, share, is_half=is_half)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # either side closed the connection
        finally:
            writer.transport.abort() if cut is not None else writer.close()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut: Cut | None,
        share: float,
        *,
        is_half: bool,
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            request = await _request(reader)
            if cut is Cut.IN_REQUEST:
                up_writer.write(request[: int(len(request) * share)])
                await up_writer.drain()
                return
            up_writer.write(request)
            await up_writer.drain()
            if cut is Cut.AFTER_REQUEST:
                await asyncio.sleep(share * 0.01)
            elif cut is Cut.IN_ANSWER:
                head = await up_reader.read(READ_BYTES)
                writer.write(head[: int(len(head) * share)])
                await writer.drain()
            else:
                leaving = asyncio.create_task(reader.read(1))
                await _copy(up_reader, writer, leaving, is_last_held=cut is Cut.AFTER_ANSWER)
            if cut is not None and is_half:
                writer.transport.abort()
                await _swallow(up_reader)
        finally:
            up_writer.transport.abort() if cut is not None else up_writer.close()


async def _request(reader: asyncio.StreamReader) -> bytes:
    """Return one complete request. The clients of these tests always send a content length."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0]) if lengths else 0)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, leaving: asyncio.Task[bytes], *, is_last_held: bool
) -> None:
    """Forward an answer until its end or until the client leaves; optionally hold back its last byte."""
    held = b""
    try:
        while True:
            reading = asyncio.ensure_future(reader.read(READ_BYTES))
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            data = reading.result()
            if not data:
                return
            if is_last_held:
                data, held = held + data[:-1], data[-1:]
            writer.write(data)
            await writer.drain()
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


async def _swallow(reader: asyncio.StreamReader) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while await reader.read(READ_BYTES):
                pass
    except TimeoutError:
        pass


@asynccontextmanager
async def cutting(port: int, rate: float, seed: int) -> AsyncIterator[tuple[str, CuttingProxy]]:
    """Start a proxy; yields its base URL and the proxy. On exit it waits for the open connections."""
    proxy = CuttingProxy(port, rate, seed)
    serving: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 22, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", proxy
    finally:
        server.close()
        while serving:
            await asyncio.gather(*serving)
