"""One service over three hosts: the cost of a cut, a kill and a join of a host, as seen by a client.

`make test-hosts`. Each event affects a host with a replica and a worker while trajectories run. A record that is
missing, doubled or incomplete fails the test; the longest time without a record has a wide bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentloop.engine.interface import PushSource
from agentloop.types import GenerateRequest
from agentloop.values.sampling import SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.weight_transfer.sender import SendReport
from tests.hosts.bed import Bed, Host, why_not
from tests.hosts.capture import flows
from tests.hosts.cluster import KEY, PORT, Cluster
from tests.hosts.load import PROMPT, SEARCHING_TURNS, Arrival
from tests.hosts.policy import ANSWER_TOKENS, POLICY, Said, prompts
from tests.hosts.push import values_of
from tests.hosts.sessions import SYSTEM, Kept
from tests.hosts.sockets import HELLO, Listener, documented, listeners, told
from tests.servers.weight_transfer.pushing import to_workers
from tests.support.service.postgres_server import PostgresServer

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

NUM_HOSTS = 3
NUM_TASKS, NUM_SAMPLES = 100, 8
LOAD_S = 400.0


@pytest.fixture
def head(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster with only a head; a parameter is the number of its CPUs."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Bed() as bed:
        yield Cluster(bed, tmp_path, getattr(request, "param", 2))


@pytest.fixture
def cluster(head: Cluster) -> Cluster:
    for _ in range(1, NUM_HOSTS):
        head.add()
    return head


class Load:
    """A running load on one host, through the public port of a host: both default to the head."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        host: Host | None = None,
        by: Host | None = None,
        loop: str = "Paced",
    ) -> None:
        host = host or cluster.head
        folder.mkdir(exist_ok=True)
        self._output = folder / "load.jsonl"
        url = f"http://{(by or cluster.head).address}:{PORT}"
        command = [cluster.python, "-m", "tests.hosts.load", url, str(NUM_TASKS), str(NUM_SAMPLES), loop]
        self._process = host.start(command, self._output)

    def arrivals(self) -> list[Arrival]:
        """Return the records that have arrived."""
        lines = self._output.read_text().splitlines(keepends=True)
        return [msgspec.json.decode(line, type=Arrival) for line in lines if line.startswith("{") and "\n" in line]

    def wait_for(self, num: int, timeout_s: float = 120.0) -> None:
        """Wait until `num` records have arrived."""
        deadline_at = time.monotonic() + timeout_s
        while len(self.arrivals()) < num:
            assert self._process.poll() is None, self._output.read_text()[-2000:]
            assert time.monotonic() < deadline_at, f"{len(self.arrivals())} records"
            time.sleep(0.2)

    def ended(self) -> list[Arrival]:
        """Wait for the end; check that each record arrived once, and is complete."""
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
    """Return the longest time without a record, from the event to the last record."""
    times = [since, *(one.at for one in arrivals if one.at > since)]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def replicas_of(cluster: Cluster) -> dict[str, str]:
    """Return the states of replicas by id, as reported by the service."""
    return {one["replica_id"]: one["state"] for one in cluster.status()["replicas"]}


def until(condition: Callable[[], bool], state: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for a condition; on a timeout, the error includes `state`."""
    deadline_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_at, state()
        time.sleep(0.5)


def until_ready(cluster: Cluster, num: int, timeout_s: float = 120.0, *, is_exact: bool = False) -> None:
    """Wait until at least `num` replicas take traffic; with `is_exact`, exactly `num`."""
    deadline_at = time.monotonic() + timeout_s
    while (found := list(replicas_of(cluster).values()).count("ready")) < num or (is_exact and found > num):
        assert time.monotonic() < deadline_at, replicas_of(cluster)
        time.sleep(0.5)


def versions_of(cluster: Cluster) -> set[int | None]:
    """Return the weight versions that replicas serve."""
    return {one["weight_version"] for one in cluster.status()["replicas"]}


def report(event: str, arrivals: list[Arrival], since: float) -> None:
    again_s = [one.first_turn_at - since for one in arrivals if one.attempt > 0]
    print(f"\n{event}: {len(arrivals)} records, gap {longest_gap_s(arrivals, since):.1f} s")
    print(f"{len(again_s)} begun again, after {max(again_s, default=0.0):.1f} s at most")
    moved = [one for one in arrivals if one.attempt == 0 and one.unavailable_s > 0.0]
    num_lost, num_sampled = (sum(getattr(one, of) for one in moved) for of in ("num_lost", "num_sampled"))
    still_s = max((one.unavailable_s for one in moved), default=0.0)
    print(f"{len(moved)} others stood still, {still_s:.1f} s at most; {num_lost} of {num_sampled} tokens again")


ARGS: dict[str, Any] = {
    "workers": {"replicas": NUM_HOSTS, "capacity": 64, "allowed_imports": ["tests"]},
    "replicas": NUM_HOSTS,
}


PROCESSES = {  # our own processes, and the docs' names for their listeners
    "ray::ServeReplica:agentloop:Coordinator": "coordinator (head)",
    "ray::ServeReplica:agentloop:EngineReplica": "engine replicas",
    "ray::ServeReplica:agentloop:Ingress": "ingress processes",
    "ray::ServeReplica:agentloop:AgentLoopWorker": None,
    "ray::PortKeeper": None,
    "agentloop_servers.cli serve": None,
}
GRPC = b"\0\0"  # an HTTP/2 settings frame, sent unconditionally: each Ray process has such a port
REFUSED = b"HTTP/1.1 401 "


def kind_of(listener: Listener) -> str | None:
    """Return the kind of our process that holds the listener."""
    return next((kind for kind in PROCESSES if listener.is_of(kind)), None)


def check_sockets(cluster: Cluster, *, tls: bool = False) -> None:
    """Check that our listeners are documented and answer a stranger only with 401; the others are Ray's."""
    table = dict(documented())
    for host in cluster.hosts:
        stranger = next(other for other in cluster.hosts if other is not host)
        open_ones = [one for one in listeners(host) if one.is_open_to_others]
        ours = {one.port: one for one in open_ones if kind_of(one) is not None}
        assert [one.address for one in open_ones if one.port == PORT] == ["0.0.0.0"]
        assert "ingress processes" in table["`host`:`port` on each node"]
        del ours[PORT]
        answers = told(stranger, host.address, list(ours))
        rays = {port for port, answer in answers.items() if answer.startswith(GRPC)}
        private = [one for port, one in ours.items() if port not in rays]
        words = [PROCESSES[str(kind_of(one))] for one in private]
        print(f"\n{host.address}: {sorted(map(str, words))}, {len(rays)} of Ray in them")
        assert all(word and word in table["free ones, on the node's address"] for word in words), private
        assert sorted(map(str, words)) == sorted(
            ["engine replicas", "ingress processes", *["coordinator (head)"] * (host is cluster.head)]
        )
        assert {one.address for one in private} == {host.address}
        ports = [one.port for one in private]
        if tls:
            assert all(b"HTTP" not in answers[port] for port in ports), answers
            answers = told(stranger, host.address, ports, tls=True)
        again = told(stranger, host.address, ports, HELLO, tls=tls)
        for port in ports:
            assert answers[port].startswith(REFUSED), answers[port]
            assert again[port].startswith(REFUSED), again[port]
            assert answers[port].count(b"HTTP/1.1") == 1
        for one in open_ones:
            if kind_of(one) is None:
                assert one.is_of("ray"), one
        assert "Ray" in table.values()


class Watch:
    """Records replicas that take no traffic while it is used as a context: host, id and state, by time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self.seen: list[tuple[float, dict[str, tuple[str, str]]]] = []  # host and state by replica

    def __enter__(self) -> Watch:
        self._watching = self._thread.submit(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watching.result()

    def _watch(self) -> None:
        while not self._is_over.wait(0.5):
            replicas = self._cluster.status()["replicas"]
            states = {one["replica_id"]: (one["host"], one["state"]) for one in replicas}
            self.seen.append((time.time(), states))

    def gone_s(self, host: Host, since: float) -> float | None:
        """Return the time until a host's replica was first seen without traffic; None if it never was."""
        later = ((at - since, states.values()) for at, states in self.seen if at > since)
        return next((after_s for after_s, states in later if (host.address, "ready") not in states), None)

    def states_of(self, *hosts: Host) -> set[str]:
        """Return all states in which replicas of these hosts were seen."""
        addresses = {host.address for host in hosts}
        return {state for _, states in self.seen for host, state in states.values() if host in addresses}


@pytest.mark.parametrize("events", ["cut 5 s, cut", "kill", "cut 75 s"])
def test_a_host_that_vanishes_under_load_loses_no_record(cluster: Cluster, tmp_path: Path, events: str) -> None:
    struck: Host = cluster.hosts[-1]
    with cluster.service(**ARGS), Watch(cluster) as watch:
        for event in events.split(", "):
            load = Load(cluster, tmp_path / event)
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
            print("its replica took no traffic after, s:", watch.gone_s(struck, since))
            assert longest_gap_s(arrivals, since) < 60.0
            if event == "cut 5 s":
                assert all(one.attempt == 0 for one in arrivals)
                until_ready(cluster, NUM_HOSTS)
            if event == "cut 75 s":
                comes_back(cluster, struck, watch, since + 75.0)
        assert "suspect" not in watch.states_of(*cluster.hosts[:-1])  # no other replica is suspected


def comes_back(cluster: Cluster, struck: Host, watch: Watch, healed_at: float) -> None:
    """Check that a host that was away too long for Ray rejoins once its Ray is restarted."""
    until(lambda: "raylet" not in struck.run(["ps", "ax", "-o", "args"]), lambda: replicas_of(cluster))
    print(f"its Ray had ended {time.time() - healed_at:.0f} s after healing")
    since_then = [(at - healed_at, states.values()) for at, states in watch.seen if at > healed_at]
    # such a replica would soon be ended by Ray
    assert [at for at, states in since_then if (struck.address, "ready") in states] == []
    cluster.restart(struck)
    began_at = time.monotonic()
    until(lambda: all(running(struck, kind) for kind in ("AgentLoopWorker", "Ingress")), lambda: cluster.status())
    until_ready(cluster, NUM_HOSTS)
    print(f"worker and ingress {time.monotonic() - began_at:.0f} s after its Ray was up again")


def median_call_s(cluster: Cluster) -> float:
    """Return the duration of a short call from the head."""
    url = f"http://{cluster.head.address}:{PORT}"
    return float(cluster.head.run([cluster.python, "-m", "tests.hosts.calls", url, "40"], 120.0))


def check_slow_links(cluster: Cluster, folder: Path) -> None:
    """Check that 200 ms between hosts and 2 % lost frames raise no alarm, and cost two round trips per call."""
    quick_s = median_call_s(cluster)
    for host in cluster.hosts:
        host.order("delay 50")
        host.order("loss 1")
    since = time.monotonic()
    with Watch(cluster) as watch:
        slow_s = median_call_s(cluster)
        number = 0
        while time.monotonic() - since < 60.0:
            number += 1
            assert all(one.attempt == 0 for one in Load(cluster, folder / f"slow-{number}").ended())
    lasted_s = time.monotonic() - since
    print(f"\nslow links: no alarm in {lasted_s:.0f} s; a call {1000 * quick_s:.0f} -> {1000 * slow_s:.0f} ms")
    assert watch.states_of(*cluster.hosts) == {"ready"}
    assert slow_s < quick_s + 2 * 0.2 + 0.2  # two round trips, and two busy cores


def test_engines_and_workers_are_on_every_host_also_by_slow_links(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(**ARGS):
        arrivals = Load(cluster, tmp_path).ended()
        assert len({replica for one in arrivals for replica in one.replica_ids}) == NUM_HOSTS
        kinds = [host.run(["ps", "ax", "-o", "args"]) for host in cluster.hosts]
        assert all(kind.count("ray::ServeReplica:agentloop:AgentLoopWorker") == 1 for kind in kinds)
        assert ["ray::ServeReplica:agentloop:Coordinator" in kind for kind in kinds] == [True, False, False]
        shown = cluster.head.run([cluster.python, "-m", "agentloop_servers.cli", "status"])
        assert all(f"http://{host.address}:{PORT}" in shown for host in cluster.hosts), shown
        num_refused = cluster.status()["num_refused"]
        check_sockets(cluster)
        until(lambda: cluster.status()["num_refused"] - num_refused >= 2 * (1 + NUM_HOSTS), cluster.status)
        check_slow_links(cluster, tmp_path)


def answered(host: Host, path: str, body: object, key: str = KEY) -> tuple[int, str, dict[str, Any]]:
    """Return status, retry-after and body of a host's call to itself; status 0 without an answer."""
    command = ["curl", "-s", "-m", "35", "-w", "\n%{http_code} %header{retry-after}"]
    command += ["-H", f"Authorization: Bearer {key}", "-H", "content-type: application/json"]
    command += ["-d", json.dumps(body), f"http://{host.address}:{PORT}{path}"]
    found, _, end = host.run(["sh", "-c", shlex.join(command) + " || true"], 60.0).rpartition("\n")
    status, _, retry_after = end.partition(" ")
    return int(status), retry_after, json.loads(found or "{}")


def test_a_lost_head_s_run_goes_on_from_its_disk(head: Cluster, tmp_path: Path) -> None:
    cluster, other = head, head.add()
    client = cluster.bystander()
    num_sessions = 24
    with (
        cluster.service(workers={**ARGS["workers"], "replicas": 2}, replicas=2),
        ThreadPoolExecutor(num_sessions + 1) as threads,
    ):
        opened = [answered(other, "/sessions", {"session_id": f"s{number}"}) for number in range(num_sessions)]
        assert {status for status, _, _ in opened} == {200}, opened
        keys = {found["session_id"]: found["api_key"] for _, _, found in opened}

        def say(session_id: str) -> tuple[int, str, float]:
            body = {"model": "default", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 8}
            began_at = time.monotonic()
            status, retry_after, _ = answered(
                other, f"/sessions/{session_id}/v1/chat/completions", body, keys[session_id]
            )
            return status, retry_after, time.monotonic() - began_at

        assert {status for status, _, _ in threads.map(say, keys)} == {200}
        load = Load(cluster, tmp_path, client, other)
        load.wait_for(NUM_TASKS)
        cluster.head.kill()
        since = time.time()
        work = {"tasks": [{"task_id": "t", "messages": [{"role": "user", "content": "Go."}]}]}
        submitted = threads.submit(answered, other, "/rollouts", work)
        said = list(threads.map(say, keys))
        status, retry_after, _ = submitted.result()
        assert (status, retry_after != "") == (503, True), (status, retry_after)
        went_on = [seconds for status, _, seconds in said if status == 200]
        print(f"\ncalls of sessions: {len(went_on)} of {num_sessions} went on, after {max(went_on):.1f} s at most")
        assert max(went_on) < 15.0
        # The others are on the head's disk, or had a lease on its replica: only a coordinator grants another lease.
        kinds = {(status, retry_after != "") for status, retry_after, _ in said}
        assert kinds <= {(200, False), (503, True), (0, False)}
        cluster.restart(cluster.head)
        cluster.restart(other)
        cluster.resume()
        print(f"ready again {time.time() - since:.0f} s after the head was lost")
        arrivals = load.ended()
        report("head lost", arrivals, since)
        until_ready(cluster, 2)
        assert {status for status, _, _ in threads.map(say, keys)} == {200}


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
    """Return the processes of a kind on a host."""
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
        assert f"{drained.address} is drained: it receives no work" in cluster.status()["degraded"]


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


def test_engines_are_on_the_hosts_of_their_labels(head: Cluster) -> None:
    cluster, hosts = head, {zone: head.add(4, labels=f"zone={zone}") for zone in "ab"}
    engine = {"kind": "simulated", "device": "cpu", "num_cpus": 0.5}
    entries = [
        {**engine, "name": f"in-{zone}", "replicas": num, "labels": {"zone": zone}}
        for zone, num in (("a", 1), ("b", 3))
    ]
    nowhere = {**engine, "name": "nowhere", "labels": {"zone": "c"}}
    refusal = "error: engine nowhere: no node with zone=c and 0.5 free CPUs"
    args = {"engine": {}, "replicas": 1}
    with pytest.raises(AssertionError, match=refusal), cluster.service(**args, engines=[*entries, nowhere]):
        pass
    with cluster.service(**args, engines=entries):
        until_ready(cluster, 4)
        found = [(one["replica_id"][:4], one["host"]) for one in cluster.status()["replicas"]]
        assert sorted(found) == [("in-a", hosts["a"].address), *[("in-b", hosts["b"].address)] * 3]


def talking(cluster: Cluster, output: Path, fate: str = "lost") -> subprocess.Popen[str]:
    """Run agents with sessions that are opened on one host and continued on others, until one host is lost."""
    urls = [f"http://{host.address}:{PORT}" for host in cluster.hosts]
    talk = cluster.head.start([cluster.python, "-m", "tests.hosts.sessions", fate, *urls], output)
    while "continued" not in output.read_text():
        assert talk.poll() is None, output.read_text()
        time.sleep(0.2)
    return talk


def test_sessions_are_on_every_host_and_lost_with_theirs_alone(head: Cluster, tmp_path: Path) -> None:
    """The hosts' clocks also differ by hours."""
    cluster = head
    for clock_s in (3600.0, -3600.0):
        host = cluster.add(clock_s=clock_s)
        told_s = float(host.run([cluster.python, "-c", "import time; print(time.time())"]))
        assert abs(told_s - time.time() - clock_s) < 60.0
    with cluster.service(**ARGS):
        arrivals = Load(cluster, tmp_path).ended()
        assert all(one.attempt == 0 for one in arrivals)
        urls = [f"http://{host.address}:{PORT}" for host in cluster.hosts]
        assert cluster.status()["public_urls"] == sorted(urls)
        assert set(replicas_of(cluster).values()) == {"ready"}
        output = tmp_path / "sessions.txt"
        talk = talking(cluster, output)
        cluster.hosts[-1].kill()
        assert talk.wait(120.0) == 0, output.read_text()
        print(output.read_text())


@pytest.fixture
def database(cluster: Cluster) -> Iterator[PostgresServer]:
    """A PostgreSQL server that all hosts reach, and that runs outside them."""
    server = PostgresServer(cluster.bed.address, cluster.bed.name)
    yield server
    server.close()


def num_recorded(cluster: Cluster, session: Kept) -> int:
    """Return the number of turns in its record, which has one path."""
    path = f"{session.path}/trajectories"
    (record,) = cluster.call(cluster.head, path, key=session.control_key)
    (one,) = record["paths"]
    return len(one["turns"])


def told_on(host: Host, sessions: list[Kept]) -> set[int]:
    """Return the statuses of session calls from a host to itself."""
    body = {"model": "default", "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 8}
    with ThreadPoolExecutor(len(sessions)) as threads:
        told = threads.map(
            lambda one: answered(host, f"{one.path}/v1/chat/completions", body, one.key)[0], sessions
        )
        return set(told)


@pytest.mark.parametrize("event", ["kill", "cut"])
def test_with_a_database_what_a_lost_host_had_goes_on(
    cluster: Cluster, database: PostgresServer, tmp_path: Path, event: str
) -> None:
    """Trajectories are at their last turn, and sessions have all turns; the same holds after a healed cut."""
    struck = cluster.hosts[-1]
    roomy = {"capacity": NUM_TASKS * NUM_SAMPLES // 2, "tools": {"search": "tests.hosts.load:search"}}
    args = {**ARGS, "workers": {**ARGS["workers"], **roomy}}  # two workers have slots for all
    with cluster.service(store=database.url, **args):
        output = tmp_path / "sessions.txt"
        talk = talking(cluster, output, "kept")
        load = Load(cluster, tmp_path, loop="Searching")
        load.wait_for(1)
        since = time.time()
        struck.kill() if event == "kill" else struck.order("cut")
        assert talk.wait(180.0) == 0, output.read_text()
        *told, kept = output.read_text().splitlines()
        print("", *told, sep="\n")
        sessions = msgspec.json.decode(kept, type=list[Kept])
        arrivals = load.ended()
        report(event, arrivals, since)
        again = [one for one in arrivals if one.attempt > 0]
        resumed = [one for one in again if one.num_resumed_turns > 0]
        after_s = [one.first_turn_at - since for one in resumed]
        num_lost, num_sampled = (sum(getattr(one, of) for one in again) for of in ("num_lost", "num_sampled"))
        print(f"resumed {len(resumed)} of {len(again)}, after {min(after_s):.1f} to {max(after_s):.1f} s")
        print(f"tokens of finished turns sampled again: {num_lost} of {num_sampled}, {num_lost / num_sampled:.1%}")
        assert {(one.num_turns, one.num_tool_calls) for one in arrivals} == {(SEARCHING_TURNS, SEARCHING_TURNS - 1)}
        assert max(after_s) < 60.0
        assert longest_gap_s(arrivals, since) < 60.0
        assert all(one.num_lost < one.num_sampled / 4 for one in resumed)
        assert len(resumed) > len(again) / 2
        assert [num_recorded(cluster, one) for one in sessions] == [one.num_turns for one in sessions]
        if event == "cut":
            assert 200 not in told_on(struck, sessions)
            struck.order("heal")
            until(lambda: "raylet" not in struck.run(["ps", "ax", "-o", "args"]), cluster.status)
            assert [num_recorded(cluster, one) for one in sessions] == [one.num_turns for one in sessions]


def with_coordinator(hosts: list[Host]) -> list[Host]:
    """Return the hosts with the coordinator's process."""
    return [host for host in hosts if running(host, "Coordinator")]


DEAD_AT = """
import ray, time
ray.init("auto", logging_level="ERROR", log_to_driver=False)
print("begun", flush=True)
while all(node["Alive"] for node in ray.nodes()):
    time.sleep(0.2)
print(time.time(), flush=True)
"""


def accepted_at(host: Host) -> float:
    """Submit until a submission is accepted; returns its time."""
    number = 0
    while True:
        number += 1
        task = {"task_id": f"new-{number}", "messages": [{"role": "user", "content": "Go."}]}
        status, _, _ = answered(host, "/rollouts", {"tasks": [task], "rollout_id": f"new-{number}"})
        if status == 200:
            return time.time()


@pytest.mark.parametrize("head", [0], indirect=True)
@pytest.mark.parametrize("event", ["kill", "cut"])
def test_with_a_database_a_lost_coordinator_beside_the_head_goes_on_elsewhere(
    cluster: Cluster, database: PostgresServer, tmp_path: Path, event: str
) -> None:
    args = {**ARGS, "replicas": NUM_HOSTS - 1}
    with cluster.service(store=database.url, **args), ThreadPoolExecutor(1) as threads:
        (struck,) = with_coordinator(cluster.hosts)
        left = [host for host in cluster.hosts if host is not struck]
        assert cluster.head in left
        until_ready(cluster, NUM_HOSTS - 1)
        load = Load(cluster, tmp_path)
        dead = cluster.head.start([cluster.python, "-c", DEAD_AT], tmp_path / "dead.txt")
        while "begun" not in (tmp_path / "dead.txt").read_text():
            time.sleep(0.2)
        load.wait_for(NUM_TASKS)
        struck.kill() if event == "kill" else struck.order("cut")
        since = time.time()
        accepted = threads.submit(accepted_at, cluster.head)
        dead.wait(120.0)
        dead_s = float((tmp_path / "dead.txt").read_text().split()[-1]) - since
        accepted_s = accepted.result() - since
        arrivals = load.ended()
        report(f"coordinator's host, {event}", arrivals, since)
        times = sorted(one.at - since for one in arrivals if one.at > since)
        _, back_s = max((later - earlier, later) for earlier, later in itertools.pairwise([0.0, *times]))
        print(f"Ray: dead after {dead_s:.1f} s; records again after {back_s:.1f} s, submits {accepted_s:.1f} s")
        assert len(with_coordinator(left)) == 1
        assert event == "kill" or not with_coordinator([struck])
        assert back_s < dead_s + 60.0
        assert accepted_s < dead_s + 60.0


def pushed(cluster: Cluster, version: int, mib: int) -> dict[str, Any]:
    """Push a tensor from the head; returns the report."""
    url = f"http://127.0.0.1:{PORT}"  # the trainer's sender must be reachable by the other hosts nevertheless
    command = [cluster.python, "-m", "tests.hosts.push", url, str(version), str(mib)]
    return msgspec.json.decode(cluster.head.run(command, LOAD_S), type=dict[str, Any])


def sent_to(receivers: list[Host], sender: Host, folder: Path, num_tensors: int, num_bytes: int) -> SendReport:
    """Push tensors from one process of a host to one process of each given host, without a service."""
    module = [sys.executable, "-m", "tests.servers.weight_transfer.push_process"]
    sending = sender.start([*module, "send", "-1", "auto", sender.address, str(num_tensors), str(num_bytes)])
    assert sending.stdout is not None
    source = msgspec.json.decode(sending.stdout.readline(), type=PushSource)
    offer = folder / "offer.json"
    offer.write_bytes(msgspec.json.encode(to_workers(source, len(receivers))))
    receiving = [["bash", "-c", f"{shlex.join([*module, 'receive', '-1'])} < {offer}"]] * len(receivers)
    processes = [host.start(command) for host, command in zip(receivers, receiving, strict=True)]
    for process in processes:
        said = process.communicate(timeout=LOAD_S)
        assert said == ("done\n", ""), said
    done, report = sending.communicate(timeout=LOAD_S)[0].splitlines()
    assert done == "done"
    return msgspec.json.decode(report, type=SendReport)


def test_a_push_crosses_a_link_once_for_all_workers_of_a_host(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Bed() as bed:
        sender, *others = [bed.add() for _ in range(3)]
        before = [host.received_bytes() for host in others]
        report = sent_to([*others, others[0], others[0], sender], sender, tmp_path, 12, 2**20)
        assert (report.transports, report.num_attempts, report.num_receivers) == (("shm", "tcp"), 1, 5)
        for host, received in zip(others, before, strict=True):
            assert report.num_bytes < host.received_bytes() - received < 1.3 * report.num_bytes


@contextlib.contextmanager
def watched(host: Host, kind: str) -> Iterator[set[Listener]]:
    """Collect the listeners of a kind of process on a host while the block runs."""
    found: set[Listener] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found.update(one for one in listeners(host) if one.is_of(kind))

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            yield found
        finally:
            is_over.set()
            looking.result()


def in_clear(record: Path, needles: list[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Return the needles that crossed a link in clear text: through public ports, and through all others."""
    found: tuple[set[bytes], set[bytes]] = set(), set()
    for (_, source, _, destination), data in flows(record).items():
        found[PORT not in (source, destination)].update(needle for needle in needles if needle in data)
    return found


def test_tensors_of_a_cpu_reach_the_replicas_of_every_host_encrypted(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.service(mode="standalone", cluster={"tls": "run"}, **ARGS):
        assert cluster.status()["is_encrypted"]
        secret = cluster.head.run(["cat", f"{cluster.run_dir()}/secret"]).strip()
        weights = values_of(1, 64)[2**20 : 2**20 + 16].numpy().tobytes()
        records = [tmp_path / f"link-{host.number}.pcap" for host in cluster.hosts]
        for host, record in zip(cluster.hosts, records, strict=True):
            host.order(f"record {record}")
        talking(cluster, tmp_path / "sessions.txt").kill()
        load = Load(cluster, tmp_path)
        load.wait_for(NUM_TASKS)
        with watched(cluster.head, "tests.hosts.push") as trainers:
            report = pushed(cluster, 1, 64)
        transports = sorted(one["transport"] for one in report["replicas"])
        assert transports == ["shm", "tcp", "tcp"]
        assert [one["error"] for one in report["replicas"]] == [None] * NUM_HOSTS
        assert {one.address for one in trainers} == {cluster.head.address}
        assert "a push" in dict(documented())["free ones, on the trainer's address"]
        load.ended()
        needles = [SYSTEM.encode(), PROMPT.encode(), secret.encode(), weights]
        for host, record in zip(cluster.hosts, records, strict=True):
            host.order("record")
            assert record.stat().st_size > 64 * 2**20
            public, private = in_clear(record, needles)
            assert private == set()
            assert public == {SYSTEM.encode()}  # proves that clear text is found
        check_sockets(cluster, tls=True)
        struck = cluster.hosts[-1]
        struck.order("cut")
        report = pushed(cluster, 2, 1)
        assert sum(one["error"] is None for one in report["replicas"]) == NUM_HOSTS - 1
        struck.order("heal")
        outdated = ("joining", "quarantined")  # depends on whether it was given up before its link was healed
        until(
            lambda: sorted(replicas_of(cluster).values()) in [sorted(["ready", "ready", one]) for one in outdated],
            lambda: replicas_of(cluster),
        )
        pushed(cluster, 3, 1)  # a simulated engine cannot pass weights on, so the replica waits for the next push
        until_ready(cluster, NUM_HOSTS)
        assert versions_of(cluster) == {3}


async def answers_of_one_host(version: int) -> list[list[int]]:
    """Return the answers of a fresh engine without tensor parallelism."""
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
    """Return the service's answers, after an update."""
    url = f"http://{cluster.head.address}:{PORT}"
    output = cluster.head.run([cluster.python, "-m", "tests.hosts.policy", url, *update], LOAD_S)
    return msgspec.json.decode(output.splitlines()[-1], type=Said)  # the client warns of the precision


def followers(cluster: Cluster) -> list[Host]:
    """Return the hosts with a follower's process."""
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


def check_group_sockets(cluster: Cluster) -> None:
    """Check that an engine over two hosts listens on documented ports and, with one exception, its own
    addresses.
    """
    row = dict(documented())["free ones"]
    assert all(word in row for word in ("NCCL", "Gloo", "vLLM's queues", "on all addresses, torch's store"))
    found = [(host.address, one) for host in cluster.hosts for one in listeners(host) if one.is_of("VLLM::")]
    reachable = [(host, one.address) for host, one in found if one.is_open_to_others]
    assert len({host for host, _ in reachable}) == 2, reachable
    assert [address for host, address in reachable if address != host] == ["::"], reachable


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
            check_group_sockets(cluster)
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
