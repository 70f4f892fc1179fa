"""Trainers' own broadcast groups over the whole service: real processes, real gloo, two replicas of two workers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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
    """Run a trainer to its end. Returns its exit code, the answers to its finishes, and what it complained of."""
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
            assert (replica["error"], replica["held_in"], replica["transport"]) == (None, "host", "gloo")
            assert NUM_BYTES - 10_000 < replica["num_bytes"] < NUM_BYTES
    assert [one.weight_version for one in (await site.coordinator.status()).replicas] == [2, 2]
