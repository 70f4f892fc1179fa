"""A hundred versions through a store while readers, the writer and the store itself are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zstandard", reason="needs zstandard (the extra store)")

from agentloop.client.client import RolloutClient
from agentloop_servers.local import running_service
from agentloop_store.store import VersionStore
from tests.parts.store.test_follow import following, is_at
from tests.parts.store.test_versions import publisher
from tests.servers.processes import deployed
from tests.support.versions import RUN, Tensors, bytes_of, given, held, train

TINY = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v1"

PUBLISH = """
import sys
from pathlib import Path
import numpy as np
from tests.parts.store.test_versions import publisher
from tests.support.versions import given
saved = np.load(sys.argv[2])
print("begun", flush=True)
publisher(Path(sys.argv[1])).publish(given({name: saved[name] for name in saved.files}), int(sys.argv[3]))
"""


def tiny_policy() -> Tensors:
    """Return the shipped policy's tensors, as the bits of bf16 or the halves of float32."""
    return {name: np.frombuffer(data, np.uint16).copy() for name, data in held(TINY).items()}


def publish_and_kill(tmp_path: Path, weights: Tensors, version: int, delay_s: float) -> bool:
    """Start to publish in a process that is killed. Return True if the version was published all the same."""
    np.savez(tmp_path / "trained.npz", **weights)
    arguments = [str(tmp_path), str(tmp_path / "trained.npz"), str(version)]
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISH, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
    return VersionStore(str(tmp_path / "store"), RUN).latest() == version


async def follow_through(tmp_path: Path, num_versions: int, kill_every: int) -> tuple[int, int]:
    """Publish to a real service of two replicas, with kills. Returns the bytes stored, and those of full pushes."""
    weights, rng, moments = tiny_policy(), np.random.default_rng(1), np.random.default_rng(2)
    stored = full = 0
    publishing = publisher(tmp_path)
    report = publishing.publish(given(weights), 1)
    num_killed = 0
    async with running_service(following(tmp_path, port=0), tmp_path / "run") as url, RolloutClient(url) as client:
        for version in range(2, num_versions + 1):
            train(weights, rng)
            turn = version % kill_every
            is_published = False
            if turn == 1:  # the publisher is killed during a publish
                is_published = await asyncio.to_thread(
                    publish_and_kill, tmp_path, weights, version, float(moments.uniform(0, 0.08))
                )
                num_killed += not is_published
            if not is_published:
                report = await asyncio.to_thread(publishing.publish, given(weights), version)
            stored, full = stored + report.num_bytes, full + report.num_full_bytes
            if turn == 2:  # a replica is killed while it reads
                await asyncio.sleep(float(moments.uniform(0, 0.1)))
                os.kill(deployed("EngineReplica")[0], signal.SIGKILL)
            if turn == 3:  # the store is killed
                os.rename(tmp_path / "store", tmp_path / "away")
                await asyncio.sleep(0.5)
                os.rename(tmp_path / "away", tmp_path / "store")
        async with asyncio.timeout(120):
            while not is_at(num_versions)(await client.status()):
                await asyncio.sleep(0.2)
    assert held(tmp_path / "run" / "weights" / f"weight_v{num_versions:06d}") == bytes_of(weights)
    assert num_killed > 0
    return stored, full


@pytest.mark.ray
@pytest.mark.slow
async def test_a_service_follows_through_kills_of_publisher_replica_and_store(tmp_path: Path) -> None:
    stored, full = await follow_through(tmp_path, num_versions=13, kill_every=6)
    assert stored < 0.3 * full


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_a_hundred_versions_through_kills_end_byte_for_byte(tmp_path: Path) -> None:
    stored, full = await follow_through(tmp_path, num_versions=100, kill_every=10)
    print(json.dumps({"stored_bytes": stored, "full_bytes": full, "share": stored / full}))
    assert stored < 0.2 * full
