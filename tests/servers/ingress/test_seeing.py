"""`GET /metrics`, `/flight` and `/why`: permissions, and the reported state of a service."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentloop.api import findings
from agentloop.api.findings import Cause, Finding
from agentloop.api.flight import Doing
from agentloop.client.client import RolloutClient
from agentloop.errors import NotFound, ServiceUnavailable
from agentloop.observability.metrics import FAMILIES, PREFIX, MetricsPage
from agentloop.rollout.context import LoopContext
from agentloop.types import Limits, Message, RolloutTask
from agentloop_servers import metrics
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.coordinator import coordinator
from agentloop_servers.http.auth import Keys, key_digest
from tests.servers.ingress.test_ingress import opened
from tests.servers.test_monitoring import slow_request
from tests.support.service.whole_service import simulated_config, whole_site


async def read(url: str, key: str | None = None) -> tuple[int, dict[tuple[str, str], float]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics", headers=headers) as answer:
        text = await answer.text()
    if answer.status != 200:
        return answer.status, {}
    families = list(text_string_to_metric_families(text))
    found = {(s.name, "/".join(s.labels.values())): s.value for family in families for s in family.samples}
    for family in families:
        name = family.name.removeprefix(PREFIX)
        assert family.type == FAMILIES.get(name, FAMILIES.get(f"{name}_total")).kind
    return 200, found


async def test_the_metrics_key_opens_them_and_nothing_else(tmp_path: Path) -> None:
    keys = Keys.of(["user-1"], "admin-1")
    keys.metrics_digest = key_digest("m-1")
    async with opened(tmp_path, keys) as door:
        assert [(await read(door.url, key))[0] for key in (None, "user-1", "other")] == [401, 403, 401]
        assert [(await read(door.url, key))[0] for key in ("m-1", "admin-1")] == [200, 200]
        for path in ("/status", "/rollouts/r", "/flight", "/history", "/why"):
            status, _, _ = await door.call("GET", path, headers={"authorization": "Bearer m-1"})
            assert status == 401


async def test_without_the_coordinator_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, Keys()) as door:

        async def away() -> MetricsPage:
            raise ServiceUnavailable("away")

        monkeypatch.setattr(door.coordinator, "metrics", away)
        assert await read(door.url) == (200, {("agentloop_process_up", "coordinator"): 0.0})


async def test_a_service_counts_its_answers_and_tells_of_its_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (metrics, coordinator):
        monkeypatch.setattr(module, "REPORT_S", 0.1)
    config: ServiceConfig = simulated_config()
    async with whole_site(config, tmp_path, reports=True) as site:
        slow = await slow_request(site.urls[0])
        async with aiohttp.ClientSession() as http:
            for path in ("/health", "/nothing", "/rollouts/none"):
                async with http.get(site.urls[0] + path):
                    pass
        async with asyncio.timeout(30):
            found: dict[tuple[str, str], float] = {}
            while ("agentloop_http_requests_total", "any/none/404") not in found:
                await asyncio.sleep(0.1)
                _, found = await read(site.urls[0])
        slow.close()
    assert found["agentloop_http_in_flight", "ingress-0//rollouts"] == 1
    assert found["agentloop_http_requests_total", "GET//health/200"] == 1
    assert found["agentloop_http_requests_total", "GET//rollouts/{rollout_id}/404"] == 1
    assert found["agentloop_http_seconds_count", "/health"] == 1
    assert found["agentloop_replicas", "simulated/ready"] == config.num_replicas
    assert found["agentloop_process_resident_memory_bytes", "ingress-0"] > 1e6
    assert found["agentloop_loop_lag_seconds", "ingress-0"] < 5


class Waits:
    """A loop that samples a turn, and then waits outside the engine."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=8)
        await asyncio.sleep(600)


class Blocks:
    """A loop that blocks its worker's event loop, and then waits."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        time.sleep(2)  # noqa: ASYNC251 - this is what it tests
        await asyncio.sleep(60)


async def test_code_that_blocked_a_worker_is_named_by_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (metrics, coordinator):
        monkeypatch.setattr(module, "REPORT_S", 0.1)
    said = f", at {__file__}:{inspect.getsourcelines(Blocks.run)[1] + 1} in run"
    async with (
        whole_site(simulated_config(), tmp_path, reports=True) as site,
        RolloutClient(site.urls[0]) as client,
    ):
        rollout = await client.submit([RolloutTask("t", (Message("user", "Hi"),), loop=f"{__name__}:Blocks")])
        async with asyncio.timeout(30):
            while not any(said in one.text for one in await client.why() if one.cause is Cause.BLOCKED):
                await asyncio.sleep(0.1)
        await client.cancel(rollout.rollout_ids[0])


async def first_finding(client: RolloutClient, cause: Cause) -> Finding:
    """Poll `why` until its first finding has the cause: on a busy machine a blocked process may be listed first."""
    async with asyncio.timeout(200):
        while (first := (await client.why())[0]).cause is not cause:
            await asyncio.sleep(0.1)
    return first


async def test_what_a_trajectory_waits_for_is_told_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(findings, "SLOW_TOOL_S", 0.5)
    limits = Limits(timeout_s=600)
    task = RolloutTask("t", (Message("user", "Hi"),), loop=f"{__name__}:Waits", limits=limits)
    async with whole_site(simulated_config(), tmp_path) as site, RolloutClient(site.urls[0]) as client:
        await first_finding(client, Cause.NOTHING)
        rollout = await client.submit([task], num_samples=2)
        first = await first_finding(client, Cause.LOOP)
        page = await client.flight(1)
        async with asyncio.timeout(200):
            looping: dict[tuple[str, ...], float | None] = {}
            while looping.get(("doing", "loop")) != 2:
                await asyncio.sleep(0.2)
                history = await client.history("doing", "workers")
                looping = {(one.name, *one.labels): one.values[-1] for one in history.series}
        assert (await client.history(since=history.times[-1] + 3600)).times == ()
        [*_, other] = (await client.flight(2)).oldest
        beyond = await site.coordinator.flight(1, other.id)
        [row] = page.oldest
        [told, *rest] = await client.why(row.id)
        with pytest.raises(NotFound, match="is not running"):
            await client.why("r/none/0")
        command = [sys.executable, "-m", "agentloop_servers.cli", "why", "--url", site.urls[0]]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        shown, _ = await process.communicate()
        await client.cancel(rollout.rollout_ids[0])
    assert "(and 1 more)" in first.text
    assert [row.id for row in beyond.oldest] == [page.oldest[0].id, other.id]
    assert page.doing == (("loop", 2),)
    assert looping["workers",] == 1
    assert row.id.startswith(rollout.rollout_ids[0])
    assert (row.flight.doing, row.flight.turn) == (Doing.LOOP, 1)
    assert 0 < row.flight.num_tokens <= 8
    assert row.flight.age_s >= row.flight.for_s > 0.5
    assert row.flight.left_s is not None
    assert row.flight.left_s < 600
    assert row.replica.startswith("simulated-")
    assert told.text.startswith(f"{row.id}: loop for")
    assert Cause.LOOP in {one.cause for one in rest}
    assert "has waited for its loop" in shown.decode()
