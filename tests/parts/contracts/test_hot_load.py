"""The hot-load API over a whole service with simulated engines, and snapshots in a directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

pytest.importorskip("zstandard", reason="needs zstandard (the extra store)")

from agentloop.client.client import RolloutClient
from agentloop.errors import StorageFull
from agentloop_contracts.hot_load import HOT_LOAD_PREFIX
from agentloop_servers.run.locks import take_lock
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_service, whole_site
from tests.support.versions import Tensors, bytes_of, held, policy, publish_plainly, train

RUN = "run-1"


@dataclass
class HotLoadSite:
    """A service, its store, and the answers of its hot-load API."""

    url: str
    store: Path
    cache: Path
    http: aiohttp.ClientSession
    client: RolloutClient
    service: ServiceSite

    async def call(self, method: str, path: str, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.request(method, self.url + path, **kwargs) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        status, answer = await self.call("GET", HOT_LOAD_PREFIX + path, params=params)
        assert status == 200, answer
        return answer

    async def load(self, job_id: str, identity: str, base: str = "", **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"deploymentId": RUN, "hotLoadId": job_id, "identity": identity, "type": "SNAPSHOT_TYPE_FULL"}
        if base:
            body |= {"type": "SNAPSHOT_TYPE_INCREMENTAL"}
            body["incrementalSnapshotMetadata"] = {
                "previousSnapshotIdentity": base,
                "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
                "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
            }
        return await self.call("POST", f"{HOT_LOAD_PREFIX}/hotLoads", json=body | fields)

    async def loaded(self, job_id: str, identity: str, base: str = "", **fields: Any) -> dict[str, Any]:
        """Start a hot load, and return it at its end."""
        status, answer = await self.load(job_id, identity, base, **fields)
        assert status == 200, answer
        return await self.ended(job_id)

    async def ended(self, job_id: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while True:
                hot_load: dict[str, Any] = (await self.get(f"/hotLoads/{job_id}"))["hotLoad"]
                if hot_load["status"]["finishedAt"] is not None:
                    return hot_load
                await asyncio.sleep(0.02)

    async def replicas(self, job_id: str) -> list[tuple[str, str]]:
        shown = (await self.get(f"/hotLoads/{job_id}/replicas"))["replicas"]
        return [(one["state"], one["currentSnapshotIdentity"]) for one in shown]

    async def until_replicas(self, job_id: str, expected: list[tuple[str, str]]) -> None:
        async with asyncio.timeout(20):
            while await self.replicas(job_id) != expected:
                await asyncio.sleep(0.02)

    def upload(self, identity: str, new: Tensors, old: Tensors | None = None, base: str = "") -> None:
        """Store a snapshot as `cwtrain` does: a delta's index has the names, a full one's has no version."""
        folder = publish_plainly(self.store, 9, new, old, checksum="adler32").rename(self.store / RUN / identity)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        named = {"version": identity, "base_version": base} if base else {}
        index["metadata"] = {**index["metadata"], **named} if base else {"total_size": 1}
        path.write_text(json.dumps(index))


@asynccontextmanager
async def hot_load_site(tmp_path: Path, **changed: Any) -> AsyncIterator[HotLoadSite]:
    weights = {"store": str(tmp_path / "store"), "run": RUN, "follows": False}
    (tmp_path / "run").mkdir(exist_ok=True)
    config = simulated_config(mode="standalone", weights=weights, **changed)
    async with AsyncExitStack() as closing:
        service = await closing.enter_async_context(whole_site(config, tmp_path / "run"))
        url = service.urls[0]
        http = await closing.enter_async_context(aiohttp.ClientSession())
        client = await closing.enter_async_context(RolloutClient(url))
        yield HotLoadSite(url, tmp_path / "store", tmp_path / "run" / "weights", http, client, service)


async def test_full_and_delta_snapshots_are_loaded_and_a_restart_keeps_them(tmp_path: Path) -> None:
    weights, rng = policy(), np.random.default_rng(1)
    async with hot_load_site(tmp_path) as site:
        deployment = (await site.get(f"/deployments/{RUN}"))["deployment"]
        assert deployment["status"]["status"] == "STATUS_READY"
        assert deployment["spec"]["hotLoad"]["pathPrefix"] == RUN
        site.upload("step-1", weights)
        first = await site.loaded("job-1", "step-1", promptCachePolicy="PROMPT_CACHE_POLICY_PRESERVE")
        assert first["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", first
        assert await site.replicas("job-1") == [("READY", "step-1")] * 2
        older = {name: value.copy() for name, value in weights.items()}
        train(weights, rng)
        site.upload("step-2", weights, older, base="step-1")
        second = await site.loaded("job-2", "step-2", base="step-1")
        assert [one["identity"] for one in second["spec"]["snapshotChain"]] == ["step-1", "step-2"]
        assert await site.replicas("job-2") == [("READY", "step-2")] * 2
        version = (await site.client.status()).weight_version
        assert version is not None
        assert held(site.cache / f"weight_v{version:06d}") == bytes_of(weights)
        assert [one.kv_policy for one in (await site.client.status()).updates[-2:]] == ["keep", "recompute"]
    async with hot_load_site(tmp_path) as site:  # the table and the served snapshot are those of before
        await site.until_replicas("job-2", [("READY", "step-2")] * 2)
        back = await site.loaded("job-3", "step-1")
        assert back["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", back
        assert held(site.cache / f"weight_v{version + 1:06d}") == bytes_of(older)
        assert await site.replicas("job-2") == [("READY", "step-1")] * 2
        status, ledger = await site.call("GET", "/weights/ledger", params={"version": version + 1})
        assert status == 200
        for row in ledger["rows"]:
            assert (row["version"], row["snapshot"], row["error"]) == (version + 1, "step-1", None)
            assert row["finished_at"] > 0
            assert row["paused_ms"] > 0
        assert len(ledger["rows"]) == 2
        pages = await site.get("/hotLoads", maxPageSize=2)
        assert [one["spec"]["id"] for one in pages["hotLoads"]] == ["job-3", "job-2"]
        rest = await site.get("/hotLoads", maxPageSize=2, pageToken=pages["nextPageToken"])
        assert ([one["spec"]["id"] for one in rest["hotLoads"]], rest["nextPageToken"]) == (["job-1"], "")


async def test_a_snapshot_that_cannot_be_served_fails_and_the_fleet_keeps_its_weights(tmp_path: Path) -> None:
    weights = policy()
    async with hot_load_site(tmp_path) as site:
        before = (await site.client.status()).weight_version
        missing = await site.loaded("job-1", "nothing")
        assert missing["status"]["state"] == "HOT_LOAD_STATE_FAILED"
        [condition] = missing["status"]["conditions"]
        assert condition["reason"] == "version_missing"
        assert "nothing/model.safetensors.index.json" in condition["message"]
        assert await site.replicas("job-1") == [("ERROR", "initial")] * 2
        rows = (await site.get("/hotLoads/job-1/replicas"))["replicas"]
        assert [one["errorReason"].partition(": ")[0] for one in rows] == ["version_missing", ""]
        site.upload("step-1", weights)
        await site.loaded("job-2", "step-1")
        changed = {name: value.copy() for name, value in weights.items()}
        train(changed, np.random.default_rng(2))
        site.upload("step-2", changed, weights, base="step-1")
        for path in (site.store / RUN / "step-2").glob("*.safetensors"):
            data = bytearray(path.read_bytes())
            data[-len(data) // 8] ^= 1
            path.write_bytes(data)
        damaged = await site.loaded("job-3", "step-2", base="step-1")
        assert damaged["status"]["conditions"][0]["reason"] in ("version_damaged", "checksum_mismatch")
        assert await site.replicas("job-3") == [("ERROR", "step-1")] * 2
        assert (await site.client.status()).weight_version == (before or 0) + 1


async def test_requests_that_are_refused(tmp_path: Path) -> None:
    async with hot_load_site(tmp_path) as site:
        site.upload("step-1", policy())
        await site.loaded("job-1", "step-1")

        async def refused(status: int, code: str, says: str, **fields: Any) -> None:
            body = {"job_id": "job-9", "identity": "step-2", **fields}
            got, answer = await site.load(**body)
            assert (got, answer["code"]) == (status, code), answer
            assert says in answer["message"]

        await refused(409, "ALREADY_EXISTS", "job-1", job_id="job-1")
        await refused(404, "NOT_FOUND", "'other'", deploymentId="other")
        await refused(409, "FAILED_PRECONDITION", "publish a full snapshot", base="step-7")
        await refused(400, "INVALID_ARGUMENT", "reserved", identity="initial")
        await refused(400, "INVALID_ARGUMENT", "identity", identity="../x")
        await refused(400, "INVALID_ARGUMENT", "another snapshot", base="step-2")
        await refused(400, "INVALID_ARGUMENT", "incremental", type="SNAPSHOT_TYPE_INCREMENTAL")
        await refused(400, "INVALID_ARGUMENT", "promptCachePolicy", promptCachePolicy="PROMPT_CACHE_POLICY_X")
        status, answer = await site.call("POST", f"{HOT_LOAD_PREFIX}/hotLoads/job-1:cancel", json={})
        assert (status, answer["code"]) == (409, "FAILED_PRECONDITION")
        assert (await site.call("GET", f"{HOT_LOAD_PREFIX}/hotLoads/job-9"))[0] == 404
        status, answer = await site.call("GET", "/weights/ledger", params={"version": 99})
        assert status == 404
        assert "unknown version 99" in answer["error"]["message"]


async def test_a_hot_load_is_cancelled_while_replicas_stage_and_the_next_one_runs(tmp_path: Path) -> None:
    async with hot_load_site(tmp_path) as site:
        site.upload("step-1", policy())
        site.cache.mkdir()
        lock = take_lock(site.cache / "lock")  # replicas wait for it before they assemble the version
        assert lock is not None
        status, created = await site.load("job-1", "step-1")
        assert (status, created["hotLoad"]["status"]["state"]) == (200, "HOT_LOAD_STATE_PENDING")
        await site.until_replicas("job-1", [("UPDATING", "initial")] * 2)
        status, answer = await site.load("job-2", "step-1")
        assert (status, answer["code"]) == (409, "FAILED_PRECONDITION")
        assert "already in progress" in answer["message"], "the client waits for the active hot load by this text"
        for _ in range(2):
            status, cancelled = await site.call("POST", f"{HOT_LOAD_PREFIX}/hotLoads/job-1:cancel", json={})
            assert (status, cancelled["hotLoad"]["status"]["state"]) == (200, "HOT_LOAD_STATE_CANCELED")
        lock.release()
        assert (await site.loaded("job-2", "step-1"))["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
        assert await site.replicas("job-2") == [("READY", "step-1")] * 2


async def test_an_open_hot_load_continues_after_a_restart(tmp_path: Path) -> None:
    async with hot_load_site(tmp_path) as site:
        site.upload("step-1", policy())
        site.cache.mkdir()
        lock = take_lock(site.cache / "lock")
        assert lock is not None
        await site.load("job-1", "step-1")
        await site.until_replicas("job-1", [("UPDATING", "initial")] * 2)
        await site.service.coordinator.close()
        lock.release()
    async with hot_load_site(tmp_path) as site:
        assert (await site.ended("job-1"))["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
        await site.until_replicas("job-1", [("READY", "step-1")] * 2)


@pytest.mark.parametrize("follows", [None, True])
async def test_a_service_without_a_store_for_hot_loads_names_the_setting(
    tmp_path: Path, follows: bool | None
) -> None:
    weights = None if follows is None else {"store": str(tmp_path / "store"), "run": RUN, "follows": follows}
    (tmp_path / "run").mkdir()
    async with AsyncExitStack() as closing:
        config = simulated_config(mode="standalone", weights=weights)
        url = await closing.enter_async_context(whole_service(config, tmp_path / "run"))
        http = await closing.enter_async_context(aiohttp.ClientSession())
        async with http.get(f"{url}{HOT_LOAD_PREFIX}/deployments/x") as answer:
            assert answer.status == 409
            assert "`follows: false`" in (await answer.json())["message"]


async def test_a_hot_load_that_cannot_be_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(_: object) -> None:
        raise StorageFull("the disk is full")

    async with hot_load_site(tmp_path) as site:
        site.upload("step-1", policy())
        with monkeypatch.context() as patch:
            patch.setattr(site.service.coordinator.jobs, "_save", full)
            status, answer = await site.load("job-1", "step-1")
            assert (status, answer["error"]["code"]) == (507, "storage_full")
        assert (await site.get("/hotLoads"))["hotLoads"] == []
        assert (await site.loaded("job-1", "step-1"))["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
