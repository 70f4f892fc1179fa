"""Shutdown of an ingress process's server with requests in flight."""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from agentloop_servers.endpoint import direct_server
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.http.guard import HttpGuard, HttpLimits
from agentloop_servers.net.tls import RunAuthority, certificate
from agentloop_servers.private_http.client import Connector
from agentloop_servers.private_http.trust import Trust


async def waiting_app(scope: Scope, receive: Receive, send: Send) -> None:
    """An app with long polls that never end; `/stream` has begun its answer."""
    if scope["type"] == "lifespan":
        return
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
    await asyncio.Event().wait()


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(direct_server, "STOP_TIMEOUT_S", 0.2)
    return DirectServer(HttpGuard(waiting_app, HttpLimits()), "127.0.0.1")


async def test_a_poll_that_is_open_at_the_end_is_told_to_come_again(server, caplog) -> None:
    url = await server.start()
    async with aiohttp.ClientSession() as http:
        polling = asyncio.create_task(http.get(f"{url}/poll", headers={"x-request-id": "mine"}))
        await asyncio.sleep(0.1)
        with caplog.at_level(logging.ERROR, "uvicorn.error"):
            await server.close()
            answer = await polling
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-request-id"] == "mine"
        assert (await answer.json())["error"]["code"] == "service_unavailable"
    assert not any(record.exc_info for record in caplog.records)


async def test_a_stream_that_is_open_at_the_end_is_seen_to_be_cut(server, caplog) -> None:
    url = await server.start()
    async with aiohttp.ClientSession() as http:
        answer = await http.get(f"{url}/stream")
        assert await answer.content.read(6) == b"begun "
        with caplog.at_level(logging.ERROR, "uvicorn.error"):
            await server.close()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("authority", [None, RunAuthority.of(certificate())], ids=["in clear", "encrypted"])
async def test_over_several_hosts_the_own_port_is_for_the_other_processes_alone(authority):
    trust = Trust("secret", authority)
    server = DirectServer(HttpGuard(answering_app, HttpLimits()), "127.0.0.1", trust=trust)
    url = await server.start()
    try:
        assert url.startswith(trust.scheme)
        connectors = Connector(trust), Connector(Trust("another", authority)), Connector(trust.of_workers)
        for connector, is_known in zip(connectors, (True, False, False), strict=True):
            async with aiohttp.ClientSession(connector=connector) as session:
                if is_known:
                    async with session.get(f"{url}/health") as answer:
                        assert (answer.status, await answer.text()) == (200, "here")
                else:
                    with pytest.raises(aiohttp.ClientConnectorError, match="does not have"):
                        await session.get(f"{url}/health")
        async with aiohttp.ClientSession() as stranger:
            if authority is None:
                async with stranger.get(f"{url}/health") as answer:
                    assert answer.status == 401
            else:
                with pytest.raises(aiohttp.ClientError):
                    await stranger.get(f"{url}/health")
    finally:
        await server.close()


async def answering_app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})
