"""The real HTTP app on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn
from fastapi import FastAPI


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve the app on a free port of 127.0.0.1; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # otherwise each answer waits 40 ms for an ACK
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(app, log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=2)
        server = _QuietServer(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:
                    await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


class _QuietServer(uvicorn.Server):
    """Does not replace the test runner's signal handlers."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


@asynccontextmanager
async def cutting_proxy(target_url: str, should_cut: Callable[[int], bool]) -> AsyncIterator[str]:
    """Run a TCP proxy that drops the n-th connection halfway through the answer if `should_cut(n)`."""
    port = int(target_url.rsplit(":", 1)[1])
    num_connections = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int | None) -> None:
        while data := await reader.read(65536):
            writer.write(data if max_bytes is None else data[:max_bytes])
            await writer.drain()
            if max_bytes is not None:
                break
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        max_bytes = 200 if should_cut(num_connections) else None
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            carry(reader, up_writer, None), carry(up_reader, writer, max_bytes), return_exceptions=True
        )
        up_writer.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
