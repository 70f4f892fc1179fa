"""Trainers' own broadcast groups over the whole service: real processes, real gloo, two replicas of two workers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

POLICY = Path(__file__).parents[3] / "examples" / "tiny_policy"
NUM_BYTES = (POLICY / "v1" / "model.safetensors").stat().st_size


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ServiceSite]:
    async with whole_site(
        simulated_config(mode="standalone", engine={"tensor_parallel_size": 2}), tmp_path
    ) as found:
        yield found


async def trained(site: ServiceSite, **order: Any) -> tuple[int, list[dict[str, Any]], str]:
    """Run a trainer to completion. Returns its exit code, the answers to its finish calls, and its stderr."""
    asked = json.dumps({"folder": str(POLICY / "v1"), **order})
    module = "tests.servers.weight_transfer.group_trainer"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, site.urls[0], asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, [json.loads(line) for line in out.splitlines()], err.decode()


@pytest.mark.parametrize("packed", [0, 100_000])
async def test_a_trainer_broadcasts_to_all_replicas(site: ServiceSite, packed: int) -> None:
    code, answers, complaint = await trained(site, packed=packed, parts=3, rounds=2)
    assert code == 0, complaint
    assert [answer["weight_version"] for answer in answers] == ["1", "2"]
    for answer in answers:
        for replica in answer["report"]["replicas"]:
            assert (replica["error"], replica["staging_device"], replica["transport"]) == (None, "host", "gloo")
            assert NUM_BYTES - 10_000 < replica["num_bytes"] < NUM_BYTES
    assert [one.weight_version for one in (await site.coordinator.status()).replicas] == [2, 2]


async def test_a_trainer_that_is_killed_changes_nothing_and_the_next_one_begins_anew(site: ServiceSite) -> None:
    code, answers, _ = await trained(site, parts=2, dies_after=5)
    assert (code, answers) == (-signal.SIGKILL, [])
    code, answers, complaint = await trained(site)
    assert (code, [answer["weight_version"] for answer in answers]) == (0, ["1"]), complaint
    status = await site.coordinator.status()
    assert [(one.state, one.weight_version) for one in status.replicas] == [("ready", 1), ("ready", 1)]


async def test_a_trainers_own_pause_holds_until_it_resumes(site: ServiceSite) -> None:
    async with aiohttp.ClientSession(site.urls[0]) as http:
        await http.post("/pause", params={"mode": "keep"})
        code, answers, complaint = await trained(site, version=8)
        assert (code, [answer["weight_version"] for answer in answers]) == (0, ["8"]), complaint
        assert (await site.coordinator.status()).is_paused
        await http.post("/resume")
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 3}}
        async with http.post("/inference/v1/generate", json=body) as answer:
            [choice] = (await answer.json())["choices"]
    assert {span["version"] for span in choice["weight_versions"]} == {"8"}


async def test_wrong_verbs_have_typed_answers(site: ServiceSite) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 4}
    tensors = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
    by_id = {"init_info": {**info, "nccl_unique_id_b64": "A"}}
    uneven = {"update_info": {**tensors, "shapes": []}}
    ipc = {"init_info": {"packed": False, "packed_num_buffers": "two"}}  # it has no ranks, so the value is not used
    handles = {"update_info": {**tensors, "tensor_sizes": "none", "ipc_handles_pickled": "A"}}
    same = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
    named = "init_info.nccl_unique_id_b64"
    calls: list[tuple[str, Any, tuple[int, str, str | None]]] = [
        ("init_weight_transfer_engine", {"init_info": info}, (400, "invalid_request", "world_size")),
        ("init_weight_transfer_engine", by_id, (400, "invalid_request", named)),
        ("start_weight_update", None, (404, "not_found", "group_name")),
        ("update_weights", {"update_info": tensors}, (409, "conflict", None)),
        ("update_weights", uneven, (400, "invalid_request", "update_info.shapes")),
        ("update_weights", handles, (400, "invalid_request", "update_info.ipc_handles_pickled")),
        ("begin_weight_update", {}, (409, "conflict", None)),
        ("end_weight_update", {}, (409, "conflict", None)),
        ("finish_weight_update", None, (409, "conflict", None)),
        ("finish_weight_update", {"weight_version": "seven"}, (400, "invalid_request", "weight_version")),
        ("init_weight_transfer_engine", ipc, (200, "", None)),
        ("begin_weight_update", {}, (409, "conflict", None)),  # it belongs to vLLM
        ("init_weight_transfer_engine", {"init_info": info}, (400, "invalid_request", "world_size")),
        ("start_weight_update", None, (200, "", None)),
        ("start_weight_update", None, (409, "conflict", None)),
        ("update_weights", same, (400, "invalid_request", "names")),  # the names of an earlier part
        ("continue_generation", {}, (200, "", None)),
        ("end_weight_update", {}, (409, "conflict", None)),
        ("finish_weight_update", None, (400, "invalid_request", None)),
        ("start_weight_update", None, (409, "conflict", None)),
        ("shutdown_weight_transfer_engine", None, (200, "", None)),
    ]
    async with aiohttp.ClientSession(site.urls[0]) as http:
        for path, body, expected in calls:
            async with http.post(f"/{path}", json=body) as answer:
                error = (await answer.json()).get("error", {"code": "", "param": None})
                assert (answer.status, error["code"], error["param"]) == expected, (path, body, error)
