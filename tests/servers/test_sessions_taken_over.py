"""Sessions of a service on several hosts with PostgreSQL: one host is isolated, and another takes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from agentloop.api.coordinator import FrontPort
from agentloop.errors import ServiceUnavailable
from agentloop_servers.app import begun_run
from agentloop_servers.config.service import SECRET_NAME, ClusterSettings, ServiceConfig
from agentloop_servers.net.tcp import listening_socket, url_of_socket
from agentloop_servers.processes.ingress import IngressProcess
from tests.support.service.cut_port import CutPort
from tests.support.service.postgres_server import PostgresServer
from tests.support.service.whole_service import SECRET, ServiceSite, simulated_config, whole_site

TAKEN_OVER_WITHIN_S = 60.0  # 20 s on idle hosts


class Host:
    """A host with an ingress process and its own disk."""

    def __init__(self, site: ServiceSite, config: ServiceConfig, folder: Path, name: str) -> None:
        self.disk = folder / name / site.run_dir.name
        self.disk.mkdir(parents=True)
        self.port = CutPort(site.front)
        self.public = listening_socket(config.host)
        self.url = url_of_socket(self.public, "http")
        self.process = IngressProcess(config, self.disk, SECRET, cast(FrontPort, self.port))


@asynccontextmanager
async def two_hosts(server: PostgresServer, tmp_path: Path) -> AsyncIterator[tuple[Host, Host]]:
    run_dir = tmp_path / "head" / server.new_name()
    run_dir.mkdir(parents=True)
    (run_dir / SECRET_NAME).write_text(SECRET.key)
    config = simulated_config(store=server.url, replicas=1)
    begun_run(config, run_dir)
    async with whole_site(config, run_dir, num_hosts=2) as site:
        shared = config.model_copy(update={"cluster": ClusterSettings()})
        hosts = [Host(site, shared, tmp_path, name) for name in ("a", "b")]
        try:
            for host in hosts:
                await host.process.start(0, host.public)
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                await host.process.close()
                host.public.close()


async def asked(
    http: aiohttp.ClientSession, host: Host, method: str, path: str, *, key: str = "", **body: Any
) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.request(method, f"{host.url}{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def until(http: aiohttp.ClientSession, host: Host, method: str, path: str, **body: Any) -> Any:
    """Return the answer to a client that retries as long as the service answers 503."""
    async with asyncio.timeout(TAKEN_OVER_WITHIN_S):
        while True:
            status, found = await asked(http, host, method, path, **body)
            if status == 200:
                return found
            assert status == 503, found
            await asyncio.sleep(0.2)


def is_healthy(host: Host) -> bool:
    try:
        host.process.check_health()
    except ServiceUnavailable:
        return False
    return True


def turn(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return {"model": "default", "messages": messages, "max_tokens": 8}


@pytest.mark.slow
async def test_a_session_goes_on_at_another_host_and_the_one_that_is_cut_off_records_nothing(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    async with two_hosts(postgres_server, tmp_path) as (a, b), aiohttp.ClientSession() as http:
        made = await until(http, a, "POST", "/sessions", rollout_id="mine")
        await until(http, a, "POST", "/sessions", session_id="first")  # after partitions have been assigned
        await until(http, b, "POST", "/sessions", session_id="second")
        given = [await until(http, b, "POST", "/sessions", session_id=f"given-{number}") for number in range(12)]
        mine = next(one for one in given if one["base_url"].startswith(a.url))
        keys = {one["session_id"]: one["control_key"] for one in (made, mine)}
        ids = list(keys)
        first = {}
        for name in ids:
            answer = await until(http, b, "POST", f"/sessions/{name}/v1/chat/completions", **turn("Hi"))
            first[name] = answer["choices"][0]["message"]["content"]
        a.port.is_cut = True
        async with asyncio.timeout(TAKEN_OVER_WITHIN_S):
            while is_healthy(a):
                await asyncio.sleep(0.1)
        for name in ids:
            said = turn("Hi", first[name], "And?")
            await until(http, b, "POST", f"/sessions/{name}/v1/chat/completions", **said)
        # The host is running, its clients reach it, and it reaches the database.
        for name in ids:
            status, found = await asked(
                http, a, "POST", f"/sessions/{name}/v1/chat/completions", **turn("Hi", first[name], "Late?")
            )
            assert status == 503, found
            status, found = await asked(http, a, "POST", f"/sessions/{name}/finish", key=keys[name])
            assert status == 503, found
        for name in ids:
            (record,) = await until(http, b, "POST", f"/sessions/{name}/finish", key=keys[name])
            assert record["is_complete"], record
            assert [len(path["turns"]) for path in record["paths"]] == [2]
        b.process.check_health()
