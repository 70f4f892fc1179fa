"""One service over three hosts: what a cut, a kill and a join of a host cost, as a client sees it.

`make test-hosts`. Each event strikes a host with a replica and a worker while trajectories run; a record that is
missing, doubled or incomplete fails the test, and the longest time without a record is bounded widely.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentloop.sampling import SamplingParams
from agentloop.types import GenerateRequest
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from tests.hosts.bed import Bed, Host, why_not
from tests.hosts.cluster import PORT, Cluster
from tests.hosts.load import Arrival
from tests.hosts.policy import ANSWER_TOKENS, POLICY, Said, prompts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

NUM_HOSTS = 3
NUM_TASKS, NUM_SAMPLES = 100, 8
LOAD_S = 400.0


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that is a head alone."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Bed() as bed:
        yield Cluster(bed, tmp_path)


@pytest.fixture
def cluster(head: Cluster) -> Cluster:
    for _ in range(1, NUM_HOSTS):
        head.add()
    return head


class Load:
    """A load under way on the head."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._output = folder / "load.jsonl"
        url = f"http://{cluster.head.address}:{PORT}"
        command = [cluster.python, "-m", "tests.hosts.load", url, str(NUM_TASKS), str(NUM_SAMPLES)]
        self._process = cluster.head.start(command, self._output)

    def arrivals(self) -> list[Arrival]:
        """What has come so far."""
        lines = self._output.read_text().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Arrival) for line in lines if line.startswith("{") and "\n" in line]

    def wait_for(self, num: int, timeout_s: float = 120.0) -> None:
        """Wait until so many records have come."""
        deadline_at = time.monotonic() + timeout_s
        while len(self.arrivals()) < num:
            assert self._process.poll() is None, self._output.read_text()[-2000:]
            assert time.monotonic() < deadline_at, f"{len(self.arrivals())} records"
            time.sleep(0.2)

    def ended(self) -> list[Arrival]:
        """Wait for the end; each record came, once, and whole."""
        try:
            assert self._process.wait(LOAD_S) == 0, self._output.read_text()[-2000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"only {len(self.arrivals())} records")
        found = self.arrivals()
        assert sorted(one.name for one in found) == sorted(
            f"t{task}/{sample}" for task in range(NUM_TASKS) for sample in range(NUM_SAMPLES)
        )
        assert [one for one in found if not one.is_complete] == []
        return found


def longest_gap_s(arrivals: list[Arrival], since: float) -> float:
    """The longest time without a record, from the event to the last record."""
    times = [since, *(one.at for one in arrivals if one.at > since)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def replicas_of(cluster: Cluster) -> dict[str, str]:
    """States of replicas by id, as the service tells."""
    return {one["replica_id"]: one["state"] for one in cluster.status()["replicas"]}


def until_ready(cluster: Cluster, num: int, timeout_s: float = 120.0, *, is_exact: bool = False) -> None:
    """Wait until so many replicas take traffic, or no more than these."""
    deadline_at = time.monotonic() + timeout_s
    while (found := list(replicas_of(cluster).values()).count("ready")) < num or (is_exact and found > num):
        assert time.monotonic() < deadline_at, replicas_of(cluster)
        time.sleep(0.5)


def versions_of(cluster: Cluster) -> set[int | None]:
    """The weight versions that replicas serve."""
    return {one["weight_version"] for one in cluster.status()["replicas"]}


def report(event: str, arrivals: list[Arrival], since: float) -> None:
    again = sum(one.attempt > 0 for one in arrivals)
    print(f"\n{event}: {len(arrivals)} records, {again} begun again, gap {longest_gap_s(arrivals, since):.1f} s")


ARGS: dict[str, Any] = {
    "workers": {"replicas": NUM_HOSTS, "capacity": 64, "allowed_imports": ["tests"]},
    "replicas": NUM_HOSTS,
}


def test_engines_and_workers_are_on_every_host(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(**ARGS):
        arrivals = Load(cluster, tmp_path).ended()
        assert len({replica for one in arrivals for replica in one.replica_ids}) == NUM_HOSTS
        kinds = [host.run(["ps", "ax", "-o", "args"]) for host in cluster.hosts]
        assert all(kind.count("ray::ServeReplica:agentloop:AgentLoopWorker") == 1 for kind in kinds)
        assert ["ray::ServeReplica:agentloop:Coordinator" in kind for kind in kinds] == [True, False, False]
        shown = cluster.head.run([cluster.python, "-m", "agentloop_servers.cli", "status"])
        assert all(f"http://{host.address}:{PORT}" in shown for host in cluster.hosts), shown


@pytest.mark.parametrize("event", ["cut", "kill", "cut 5 s", "cut 30 s"])
def test_a_host_that_vanishes_under_load_loses_no_record(cluster: Cluster, tmp_path: Path, event: str) -> None:
    struck: Host = cluster.hosts[-1]
    with cluster.service(**ARGS):
        load = Load(cluster, tmp_path)
        load.wait_for(NUM_TASKS)
        since = time.time()
        match event.split():
            case ["kill"]:
                struck.kill()
            case ["cut"]:
                struck.order("cut")
            case ["cut", seconds, _]:
                struck.order("cut")
                time.sleep(float(seconds))
                struck.order("heal")
        arrivals = load.ended()
        report(event, arrivals, since)
        assert longest_gap_s(arrivals, since) < 60.0
        if event == "cut 5 s":
            assert all(one.attempt == 0 for one in arrivals)
            until_ready(cluster, NUM_HOSTS)


def test_the_doctor_shows_what_differs_between_hosts(cluster: Cluster) -> None:
    said = cluster.doctor()
    print(f"\n{said}")
    assert "exit 0" in said
    assert all(host.address in said for host in cluster.hosts)
    struck = cluster.hosts[-1]
    struck.run(["mount", "-t", "tmpfs", "none", "examples/tiny_policy/v0"])
    said = cluster.doctor()
    assert f"{struck.address}: " in said
    assert "exit 1" in said


def running(host: Host, kind: str) -> int:
    """The processes of a kind on a host."""
    return host.run(["ps", "ax", "-o", "args"]).count(f"ray::ServeReplica:agentloop:{kind}")


def test_a_host_joins_under_load_and_another_is_drained(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(**ARGS):
        load = Load(cluster, tmp_path)
        load.wait_for(NUM_TASKS)
        joined = cluster.add()
        since = time.monotonic()
        while not all(running(joined, kind) for kind in ("AgentLoopWorker", "Ingress")):
            assert time.monotonic() - since < 60.0, joined.run(["ps", "ax", "-o", "args"])
            time.sleep(0.5)
        print(f"\nworker and ingress {time.monotonic() - since:.0f} s after the host had joined")
        drained = next(host for host in cluster.hosts[1:] if running(host, "EngineReplica"))
        since = time.monotonic()
        with pytest.raises(subprocess.CalledProcessError):
            cluster.drain(cluster.head)
        print(cluster.drain(drained), f"after {time.monotonic() - since:.0f} s")
        drained.kill()
        arrivals = load.ended()
        assert all(one.attempt == 0 for one in arrivals)
        assert f"{drained.address} is drained: it gets no work" in cluster.status()["degraded"]


def test_a_cut_a_join_and_a_kill_in_one_run(head: Cluster, tmp_path: Path) -> None:
    """The short form, which `make test` runs: two hosts, and a third that joins."""
    cluster, struck = head, head.add()
    with cluster.service(workers={**ARGS["workers"], "replicas": 2}, replicas=2):
        first = Load(cluster, tmp_path / "first")
        first.wait_for(NUM_TASKS)
        since = time.time()
        struck.order("cut")
        time.sleep(5.0)
        struck.order("heal")
        arrivals = first.ended()
        report("cut for 5 s", arrivals, since)
        assert all(one.attempt == 0 for one in arrivals)
        joined = cluster.add()
        second = Load(cluster, tmp_path / "second")
        second.wait_for(NUM_TASKS)
        since = time.time()
        struck.kill()
        arrivals = second.ended()
        report("killed", arrivals, since)
        assert longest_gap_s(arrivals, since) < 60.0
        deadline_at = time.monotonic() + 120.0
        while not all(running(joined, kind) for kind in ("AgentLoopWorker", "Ingress")) or struck.address in {
            one["host"] for one in cluster.status()["replicas"]
        }:
            assert time.monotonic() < deadline_at, (joined.run(["ps", "ax", "-o", "args"]), cluster.status())
            time.sleep(0.5)
        until_ready(cluster, 2)


def test_sessions_are_on_every_host_and_lost_with_theirs_alone(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(**ARGS):
        urls = [f"http://{host.address}:{PORT}" for host in cluster.hosts]
        assert cluster.status()["public_urls"] == sorted(urls)
        output = tmp_path / "sessions.txt"
        talk = cluster.head.start([cluster.python, "-m", "tests.hosts.sessions", *urls], output)
        while "continued" not in output.read_text():
            assert talk.poll() is None, output.read_text()
            time.sleep(0.2)
        cluster.hosts[-1].kill()
        assert talk.wait(120.0) == 0, output.read_text()
        print(output.read_text())


def pushed(cluster: Cluster, version: int, mib: int) -> dict[str, Any]:
    """Push a tensor from the head; returns the report."""
    url = f"http://127.0.0.1:{PORT}"  # what the trainer offers must reach the others all the same
    command = [cluster.python, "-m", "tests.hosts.push", url, str(version), str(mib)]
    return msgspec.json.decode(cluster.head.run(command, LOAD_S), type=dict[str, Any])


def test_tensors_of_a_cpu_reach_the_replicas_of_every_host(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(mode="standalone", **ARGS):
        load = Load(cluster, tmp_path)
        load.wait_for(NUM_TASKS)
        report = pushed(cluster, 1, 64)
        transports = sorted(one["transport"] for one in report["replicas"])
        assert transports == ["shm", "tcp", "tcp"]
        assert [one["error"] for one in report["replicas"]] == [None] * NUM_HOSTS
        load.ended()
        struck = cluster.hosts[-1]
        struck.order("cut")
        report = pushed(cluster, 2, 1)
        assert sum(one["error"] is None for one in report["replicas"]) == NUM_HOSTS - 1
        struck.order("heal")
        deadline_at = time.monotonic() + 120.0
        while sorted(states := replicas_of(cluster).values()) != ["joining", "ready", "ready"]:
            assert time.monotonic() < deadline_at, states
            time.sleep(0.5)
        pushed(cluster, 3, 1)  # a simulated engine gives nothing on, so it waits for the next push
        until_ready(cluster, NUM_HOSTS)
        assert versions_of(cluster) == {3}


async def answers_of_one_host(version: int) -> list[list[int]]:
    """The answers of a fresh engine without tensor parallelism."""
    config = VllmConfig(
        str(POLICY / f"v{version}"),
        version,
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        kv_cache_memory_bytes=2**27,
    )
    engine = VllmEngine(config)
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
        asked = [GenerateRequest(f"r{n}", tuple(ids), sampling) for n, ids in enumerate(prompts())]
        return [list((await engine.generate(request)).token_ids) for request in asked]
    finally:
        await engine.close()


def said(cluster: Cluster, *update: str) -> Said:
    """The service's answers, after an update."""
    url = f"http://{cluster.head.address}:{PORT}"
    output = cluster.head.run([cluster.python, "-m", "tests.hosts.policy", url, *update], LOAD_S)
    return msgspec.json.decode(output.splitlines()[-1], type=Said)  # the client warns of the precision


def followers(cluster: Cluster) -> list[Host]:
    """The hosts with a follower's process."""
    running = {host.number: host.run(["ps", "ax", "-o", "args"]) for host in cluster.hosts if host.started}
    return [host for host in cluster.hosts if "vllm.headless" in running.get(host.number, "")]


WIDE = {
    "kind": "vllm",
    "device": "cpu",
    "dtype": "float32",
    "block_size": 32,
    "kv_cache_mib": 128,
    "num_threads": 1,
    "tensor_parallel_size": 2,
    "hosts": 2,
}


def test_an_engine_over_two_hosts_is_one_engine(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    expected = [asyncio.run(answers_of_one_host(version)) for version in (0, 1)]
    assert expected[0] != expected[1]
    with Bed() as bed:
        cluster = Cluster(bed, tmp_path, head_cpus=0)
        for _ in range(2):
            cluster.add()
        began_at = time.monotonic()
        with cluster.service("servers/cpu_push.yaml", replicas=1, engine=WIDE):
            print(f"\nready after {time.monotonic() - began_at:.0f} s")
            first = said(cluster)
            assert first.answers == expected[0]
            directory = said(cluster, "directory", "1")
            assert (directory.answers, directory.versions) == (expected[1], [0, 1])
            push = said(cluster, "push", "2")
            assert (push.answers, push.versions) == (expected[0], [1, 2])
            print("transports:", directory.transports, push.transports)
            assert said(cluster, "directory", "3").answers == expected[1]
            cluster.add()
            (struck,) = followers(cluster)
            struck.kill()
            since = time.monotonic()
            until_ready(cluster, 0, is_exact=True)
            print(f"its end was known after {time.monotonic() - since:.0f} s")
            until_ready(cluster, 1, 300.0)
            print(f"ready again after {time.monotonic() - since:.0f} s")
            last = said(cluster)
            assert last.answers == expected[1]
            assert last.replica_id != first.replica_id
            assert versions_of(cluster) == {3}
            assert struck not in followers(cluster)
