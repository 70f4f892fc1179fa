"""A service over test hosts: its CPU a turn on one, two and three, and weights over sockets between two.

    python -m tests.benchmarks.hosts [--hosts 1 2 3] [--rounds 3] [--mib 256] [--fan-out 128]

Root, and what `tests/hosts/bed.py` needs. CPU is user and system of the service's own processes on all hosts, over
the load of `tests.hosts.load` (800 trajectories of 6 turns), less what they use while nothing runs; Ray's processes
and the load's own are not counted. The links are user-space ones, and the hosts share this machine's cores.

Weights: one tensor from the head to the replica of another host by the `tcp` lane (first byte to last, its
checksums included), in turn with as many bytes by four plain sockets. The bytes of the link are the interface's.
Fan-out: the same lane, without a service, to several processes of the other host.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.benchmarks import report
from tests.hosts.bed import Bed, Host, why_not
from tests.hosts.cluster import Cluster
from tests.hosts.load import NUM_TURNS
from tests.hosts.test_hosts import NUM_SAMPLES, NUM_TASKS, Load, pushed, sent_to

NUM_PLACES = 192
IDLE_S = 15.0
NUM_STREAMS = 4
NUM_WORKERS = (1, 2, 4)
NUM_PARTS = (1, 16)
PIECE_BYTES = 1 << 20
SINK_PORT = 9000
OWN = "ray::ServeReplica:agentloop:"


def used_s(cluster: Cluster) -> dict[str, float]:
    """Return the CPU seconds so far of the service's processes, by their kind."""
    found: dict[str, float] = {}
    for host in cluster.hosts:
        for process in host.processes():
            kind = " ".join(process.cmdline()).partition(OWN)[2].partition(" ")[0]
            if kind:
                times = process.cpu_times()
                found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


def cpu_a_turn(num_hosts: int, num_rounds: int, folder: Path) -> dict[str, float]:
    """Return the CPU ms a turn by kind of process, in the median round by their sum."""
    with Bed() as bed:
        cluster = Cluster(bed, folder)
        for _ in range(1, num_hosts):
            cluster.add()
        workers = {"replicas": num_hosts, "capacity": NUM_PLACES // num_hosts, "allowed_imports": ["tests"]}
        with cluster.service(workers=workers, replicas=num_hosts):
            Load(cluster, folder / f"first-{num_hosts}").ended()
            time.sleep(2.0)
            before, began_at = used_s(cluster), time.monotonic()
            time.sleep(IDLE_S)
            idle_s = time.monotonic() - began_at
            idle = {kind: (used - before[kind]) / idle_s for kind, used in used_s(cluster).items()}
            rounds = []
            for number in range(num_rounds):
                before, began_at = used_s(cluster), time.monotonic()
                Load(cluster, folder / f"load-{num_hosts}-{number}").ended()
                lasted_s = time.monotonic() - began_at
                spent = {
                    kind: used - before[kind] - idle[kind] * lasted_s for kind, used in used_s(cluster).items()
                }
                num_turns = NUM_TASKS * NUM_SAMPLES * NUM_TURNS
                rounds.append({kind: 1000 * seconds / num_turns for kind, seconds in spent.items()})
    rounds.sort(key=lambda one: sum(one.values()))
    return rounds[len(rounds) // 2]


def plain_s(cluster: Cluster, receiver: Host, num_bytes: int) -> float:
    """Return the seconds that so many bytes take by plain sockets from the head, until the last has been read."""
    sink = receiver.start([sys.executable, "-m", "tests.benchmarks.hosts", "--sink"])
    assert sink.stdout is not None
    assert sink.stdout.readline() == "listening\n"
    source = [sys.executable, "-m", "tests.benchmarks.hosts", "--source", receiver.address, str(num_bytes)]
    seconds = float(cluster.head.run(source, 300.0))
    sink.wait(10.0)
    return seconds


def sink() -> None:
    """Read what comes by NUM_STREAMS connections, and say on each when that was all."""

    def read(connection: socket.socket) -> None:
        memory = bytearray(PIECE_BYTES)
        while connection.recv_into(memory):
            pass
        connection.sendall(b"!")

    with socket.create_server(("0.0.0.0", SINK_PORT)) as listener:
        print("listening", flush=True)
        readers = [threading.Thread(target=read, args=(listener.accept()[0],)) for _ in range(NUM_STREAMS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()


def source(address: str, num_bytes: int) -> None:
    """Send so many bytes, and print the seconds that it took."""
    connections = [socket.create_connection((address, SINK_PORT)) for _ in range(NUM_STREAMS)]

    def send(connection: socket.socket) -> None:
        data = memoryview(bytes(num_bytes // NUM_STREAMS))
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"!"

    began_at = time.monotonic()
    senders = [threading.Thread(target=send, args=(connection,)) for connection in connections]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    print(time.monotonic() - began_at)


def lane(num_mib: int, num_rounds: int, folder: Path) -> list[tuple[float, float, float]]:
    """Return, for each round, MB/s of plain sockets and of the lane, and the link's bytes by the weights'."""
    num_bytes, found = num_mib * 2**20, []
    with Bed() as bed:
        cluster = Cluster(bed, folder, head_cpus=0)
        receiver = cluster.add()
        with cluster.service(mode="standalone", replicas=1):
            for number in range(1, num_rounds + 2):
                plain = plain_s(cluster, receiver, num_bytes)
                before = receiver.received_bytes()
                (replica,) = pushed(cluster, number, num_mib)["replicas"]
                assert (replica["transport"], replica["error"]) == ("tcp", None)
                on_link = (receiver.received_bytes() - before) / replica["num_bytes"]
                rates = num_bytes / 1e6 / plain, replica["num_bytes"] / 1e3 / replica["transfer_ms"]
                found.append((*rates, on_link))
    return found[1:]  # the first one connects, and takes memory


def fan_out(num_mib: int, num_tensors: int, num_rounds: int, folder: Path) -> list[tuple[int, int, float, float]]:
    """Return workers of one other host, MiB of a tensor, the link's bytes by the weights', seconds (median)."""
    rows = []
    with Bed() as bed:
        sender, other = bed.add(), bed.add()
        for num_workers in NUM_WORKERS:
            found = []
            for _ in range(num_rounds):
                before = other.received_bytes()
                sent = sent_to([other] * num_workers, sender, folder, num_tensors, num_mib * 2**20 // num_tensors)
                assert (sent.transports, sent.num_receivers) == (("tcp",), num_workers)
                on_link = (other.received_bytes() - before) / sent.num_bytes
                found.append((on_link, sent.transfer_ms / 1000))
            rows.append((num_workers, num_mib // num_tensors, *map(statistics.median, zip(*found, strict=True))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--fan-out", type=int, default=128, help="MiB")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--source", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sink:
        return sink()
    if args.source is not None:
        return source(args.source[0], int(args.source[1]))
    if (reason := why_not()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        turns = {num: cpu_a_turn(num, args.rounds, Path(name)) for num in args.hosts}
        weights = lane(args.mib, args.rounds, Path(name)) if args.mib else []
        shared = [
            row for num in NUM_PARTS if args.fan_out for row in fan_out(args.fan_out, num, args.rounds, Path(name))
        ]
    tables = {}
    if turns:
        kinds = sorted({kind for one in turns.values() for kind in one})
        rows = [(num, *(one.get(kind) for kind in kinds), sum(one.values())) for num, one in turns.items()]
        tables["CPU ms a turn"] = report.table(("hosts", *kinds, "sum"), rows)
    if weights:
        columns = ("", "plain sockets, MB/s", "`tcp` lane, MB/s", "lane by plain", "link's bytes by weights'")
        cells = [(plain, tcp, tcp / plain, on_link) for plain, tcp, on_link in weights]
        rows = [("median", *map(statistics.median, zip(*cells, strict=True)))]
        rows += [("worst", *map(min, zip(*[cell[:3] for cell in cells], strict=True)), max(c[3] for c in cells))]
        tables[f"Weights of {args.mib} MiB between two hosts"] = report.table(columns, rows)
    if shared:
        columns = ("workers of the host", "MiB of a bucket", "link's bytes by weights'", "s")
        tables[f"Weights of {args.fan_out} MiB to one other host"] = report.table(columns, shared)
    found = {"turns": turns, "weights": weights, "fan_out": shared}
    report.finish("A service over hosts (CPU)", tables, found, args.out)


if __name__ == "__main__":
    main()
