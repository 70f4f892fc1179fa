"""A service that follows a store of versions: real bytes over HTTP and files, simulated engines."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

pytest.importorskip("zstandard", reason="needs zstandard (the extra store)")

from agentloop.api.coordinator import ServiceStatus
from agentloop.client.client import RolloutClient
from agentloop.client.publish import PublishReport
from agentloop.errors import LayoutMismatch, PointerWentBack
from agentloop.types import Message, RolloutTask
from agentloop_servers.config.service import ServiceConfig
from tests.support.service.whole_service import simulated_config, whole_service
from tests.support.versions import RUN, Tensors, bytes_of, held, policy, publish_plainly, train

TASK = RolloutTask("t", (Message("user", "What is 2 + 3?"),))


def following(tmp_path: Path, **changed: object) -> ServiceConfig:
    weights = {"store": str(tmp_path / "store"), "run": RUN, "poll_s": 0.1}
    (tmp_path / "run").mkdir(exist_ok=True)
    return simulated_config(mode="standalone", weights=weights, **changed)


async def publish(client: RolloutClient, tmp_path: Path, weights: Tensors, version: int) -> PublishReport:
    torch = pytest.importorskip("torch")
    bits = {name: torch.from_numpy(value.view(np.int16)) for name, value in weights.items()}
    store, cache = str(tmp_path / "store"), str(tmp_path / "cache")
    tensors = {name: value.view(torch.bfloat16) for name, value in bits.items()}
    return await client.publish(tensors, version=version, store=store, run=RUN, cache=cache)


async def until(client: RolloutClient, holds: Callable[[ServiceStatus], bool]) -> ServiceStatus:
    async with asyncio.timeout(20):
        while not holds(status := await client.status()):
            await asyncio.sleep(0.02)
    return status


def is_at(version: int) -> Callable[[ServiceStatus], bool]:
    return lambda status: (
        status.weight_version == version
        and len(status.replicas) == 2
        and all(one.weight_version == version and one.state == "ready" for one in status.replicas)
    )


async def test_versions_are_followed_and_a_service_that_begins_anew_takes_the_last_one(
    tmp_path: Path,
) -> None:
    weights, rng = policy(), np.random.default_rng(1)
    made = tmp_path / "run" / "weights"
    config = following(tmp_path, weight_roots=[str(tmp_path / "run")])
    async with whole_service(config, tmp_path / "run") as url, RolloutClient(url) as client:
        status = await until(client, lambda status: bool(status.store and status.store.error))
        assert status.store is not None
        assert status.store.error.startswith("pointer_missing")
        assert any(status.store.error in one for one in status.degraded)
        for version in range(1, 4):
            train(weights, rng)
            report = await publish(client, tmp_path, weights, version)
            await until(client, is_at(version))
            assert held(made / f"weight_v{version:06d}") == bytes_of(weights)
        assert report.base_version == 2
        records = [record async for record in await client.submit([TASK])]
        assert records[0].is_complete
        with pytest.raises(PointerWentBack):
            await publish(client, tmp_path, weights, 3)
        with pytest.raises(LayoutMismatch):
            await publish(client, tmp_path, policy(rows=8), 4)
    train(weights, rng)
    async with RolloutClient("http://127.0.0.1:1") as alone:
        await publish(alone, tmp_path, weights, 4)  # the service polls
    shutil.rmtree(made)  # like a new host
    async with whole_service(config, tmp_path / "run") as url, RolloutClient(url) as client:
        await until(client, is_at(4))
        assert held(made / "weight_v000004") == bytes_of(weights)
        reported = await until(client, lambda status: bool(status.updates) and status.updates[-1].version == 4)
        assert {one.transport for one in reported.updates[-1].replicas} == {"published"}
        older = shutil.copytree(made / "weight_v000004", tmp_path / "run" / "older")
        await client.update_weights(older, version=3, force=True)
    async with whole_service(config, tmp_path / "run") as url, RolloutClient(url) as client:
        await until(client, lambda status: status.store is not None and status.store.latest == 4)
        assert is_at(3)(await until(client, is_at(3))), "what an operator went back to, until the next version"
        train(weights, rng)
        await publish(client, tmp_path, weights, 5)
        await until(client, is_at(5))
        reported = await until(client, lambda status: status.updates[-1].version == 5)
        assert [one.version for one in reported.updates[-2:]] == [3, 5]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[RolloutClient, Tensors]]:
    """Return a service at version 2 of a run."""
    weights, rng = policy(), np.random.default_rng(2)
    async with whole_service(following(tmp_path), tmp_path / "run") as url, RolloutClient(url) as client:
        for version in (1, 2):
            train(weights, rng)
            await publish(client, tmp_path, weights, version)
        await until(client, is_at(2))
        yield client, weights


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-len(data) // 8] ^= 1
    path.write_bytes(data)


async def test_the_fleet_serves_on_whatever_the_store_has_and_why_says_it(
    tmp_path: Path, served: tuple[RolloutClient, Tensors]
) -> None:
    client, weights = served
    run = tmp_path / "store" / RUN
    pointer = run / "latest"

    async def fails_as(code: str) -> None:
        status = await until(client, lambda status: bool(status.store and status.store.error.startswith(code)))
        assert is_at(2)(status), "nothing is activated, and no replica left traffic"
        assert any(code in finding.text for finding in await client.why())

    pointer.write_text(f"{RUN}/weight_v000001")
    await fails_as("pointer_went_back")
    pointer.write_text(f"{RUN}/weight_v000009")
    await fails_as("version_missing")
    pointer.write_text(f"{RUN}/weight_v000002")
    await until(client, lambda status: status.store is not None and not status.store.error)
    os.rename(tmp_path / "store", tmp_path / "away")
    await fails_as("pointer_missing")
    os.rename(tmp_path / "away", tmp_path / "store")
    await until(client, lambda status: status.store is not None and not status.store.error)
    train(weights, np.random.default_rng(3))
    await publish(client, tmp_path, weights, 3)
    await until(client, is_at(3))
    for path in (run / "weight_v000003").glob("*.safetensors"):
        _flip(path)
    train(weights, np.random.default_rng(4))
    await publish(client, tmp_path, weights, 4)  # both have version 3 and do not read it again
    await until(client, is_at(4))
    assert held(tmp_path / "run" / "weights" / "weight_v000004") == bytes_of(weights)


async def test_a_service_without_a_store_refuses_to_look_at_one(tmp_path: Path) -> None:
    async with whole_service(simulated_config(), tmp_path) as url, RolloutClient(url) as client:
        async with aiohttp.ClientSession() as http, http.post(f"{url}/admin/weights/follow") as answer:
            assert answer.status == 409
            assert "does not follow a store" in await answer.text()
        assert (await client.status()).store is None


async def test_a_folder_is_published_by_the_command_line(
    tmp_path: Path, served: tuple[RolloutClient, Tensors]
) -> None:
    client, weights = served
    folder = tmp_path / "run" / "weights" / "weight_v000002"
    arguments = ["weights", "publish", str(folder), "--store", str(tmp_path / "store"), "--run", RUN]
    arguments += ["--cache", str(tmp_path / "cache")]
    output = await _command(*arguments, "--version", "3", "--url", client.url, "--encoding", "overwrite")
    assert "version 3 published: a delta to 2" in output
    await until(client, is_at(3))
    assert held(tmp_path / "run" / "weights" / "weight_v000003") == bytes_of(weights)
    assert "is not greater than the published version" in await _command(
        *arguments, "--version", "3", "--url", client.url
    )


async def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "agentloop_servers.cli", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return " ".join(output.decode().split())


async def test_versions_are_pulled_to_each_host_and_served_from_there(tmp_path: Path) -> None:
    """slime's publishing on disk: deltas only; the model is version 0. After a fault the last version remains."""
    config = simulated_config(mode="standalone", weight_roots=[str(tmp_path / "root")])
    root, local = tmp_path / "root", tmp_path / "root" / "local"
    (tmp_path / "run").mkdir()
    base = {name: np.frombuffer(data, np.uint8) for name, data in held(config.model_path()).items()}
    versions: list[Tensors] = [base, {name: value ^ np.uint8(len(name) % 3) for name, value in base.items()}]
    for bit in (1, 2):
        versions.append({name: value ^ np.uint8(bit) for name, value in versions[-1].items()})
    for version in (1, 2, 3):
        publish_plainly(root, version, versions[version], versions[version - 1])
    asked = {"local_checkpoint_dir": str(local), "source_dir": str(root / RUN), "target_version": 3}
    async with whole_service(config, tmp_path / "run") as url, aiohttp.ClientSession(url) as http:

        async def answer(status: int, path: str, body: dict[str, object]) -> dict[str, Any]:
            async with http.post(path, json=body) as answer:
                assert answer.status == status, await answer.text()
                return dict(await answer.json())

        async def fails(code: str, param: str | None, **changed: object) -> None:
            failed = await answer(400, "/pull_weights", {**asked, **changed})
            assert (failed["success"], failed["message"]) == (False, failed["error"]["message"])
            assert (failed["error"]["code"], failed["error"]["param"]) == (code, param)

        link, served = {**asked, "local_checkpoint_dir": f"{local}/"}, 0  # written with a trailing slash
        for version in (0, 1, 2, 3, 1, 3):
            before = local.resolve() if local.exists() else root
            assert (await answer(200, "/pull_weights", {**link, "target_version": version}))["success"]
            assert held(local) == bytes_of(versions[version])
            assert before.exists(), "the version that is served until the update"
            if version > served:
                served = version
                named = {"model_path": str(local), "weight_version": str(version)}
                assert (await answer(200, "/update_weights_from_disk", named))["weight_version"] == str(version)
        damaged = publish_plainly(root, 4, base, versions[3]) / "model-00001-of-00001.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-8])
        await fails("version_damaged", None, target_version=4)
        await fails("version_missing", None, target_version=5)
        await fails("invalid_request", "source_dir", source_dir=str(tmp_path))
        await fails("invalid_request", "local_checkpoint_dir", local_checkpoint_dir=str(tmp_path / "run" / "local"))
        await fails("invalid_request", "local_checkpoint_dir", local_checkpoint_dir=str(root / RUN))
        for taken in (f"{root}/", f"{root}/.", f"{local}/.."):
            await fails("invalid_request", "local_checkpoint_dir", local_checkpoint_dir=taken)
        assert set(os.listdir(tmp_path)) == {"root", "run"}
        assert set(os.listdir(root)) == {"local", "local.versions", RUN}
        await fails("invalid_request", "target_version", target_version="2")
        assert held(local) == bytes_of(versions[3])
        async with http.get("/get_weight_version") as found:
            assert await found.json() == {"weight_version": "3"}
