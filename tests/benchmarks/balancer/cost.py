"""Costs of leases: CPU per turn, a placement, leases per second, and memory per live trajectory.

    python -m tests.benchmarks.balancer.cost [--out FILE]

A turn is followed from the ids that the engine returned to the coordinator's state, through the service's
components: a worker's `LeaseHolder` records it, its `LeaseReporter` collects reports, `codec` encodes and decodes
them, and the `Balancer` applies them. Everything runs in one process: encoding and decoding count, the network does
not. CPU seconds are those of this process, the best of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentloop.api.coordinator import LeaseOrders, LeaseReport, ReplicaRegistration, TurnEnded
from agentloop.engine.interface import EngineInfo
from agentloop.fleet.registry import Fleet
from agentloop.generation.leases import LeaseHolder, LeaseReporter, ReportConfig
from agentloop.scheduling.balancer import Balancer
from agentloop.scheduling.lease_table import Demand
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease, SamplingParams, WeightVersionSpan
from agentloop.values import codec
from tests.benchmarks import report

NUM_REPLICAS = 64
BLOCK_SIZE = 16
KV_TOKENS = 1_048_576  # per replica
NUM_SAMPLED, NUM_OBSERVED = 256, 768  # new tokens per turn
CONTEXTS = {8192: 100.0, 32768: 300.0}  # tokens -> goal in microseconds per turn
NUM_LIVE = 2 * NUM_REPLICAS
NUM_ROUNDS = 5
GROUP_SIZE = 8
LIVE_PER_REPLICA = 16  # in the placement benchmark
NUM_PLACED = 4000
GOAL_LEASES = 5000.0  # acquired and released per second
REPORT = ReportConfig(coalesce_s=0.01, heartbeat_s=60.0)


@dataclass(slots=True)
class TurnCost:
    """CPU seconds of some turns, by component."""

    num_turns: int = 0
    note_s: float = 0.0  # worker: recording a turn
    report_s: float = 0.0  # worker: collecting and encoding
    take_s: float = 0.0  # coordinator: decoding
    balance_s: float = 0.0  # coordinator: placement and orders

    @property
    def parts_us(self) -> list[float]:
        parts = (self.note_s, self.report_s, self.take_s, self.balance_s)
        return [1e6 * part / self.num_turns for part in parts]


def fleet_of(num_replicas: int) -> Fleet:
    fleet = Fleet()
    for number in range(num_replicas):
        info = EngineInfo("cost", 131_072, 32_000, BLOCK_SIZE, KV_TOKENS, 256)
        replica = fleet.register(ReplicaRegistration(f"r{number}", f"http://r{number}", info, 0), 0.0)
        fleet.begin_update(replica)
        fleet.admit(replica)
    return fleet


@dataclass(slots=True, eq=False)
class _Trajectory:
    holder: LeaseHolder
    ids: tuple[int, ...]
    number: int


@dataclass(slots=True)
class Service:
    """A worker's reporter and the coordinator's balancer, connected by the encoded reports."""

    balancer: Balancer
    rng: random.Random
    vocab: list[int]  # one object per id, as a growing path shares them
    now: float = 0.0
    cost: TurnCost = field(default_factory=TurnCost)
    live: list[_Trajectory] = field(default_factory=list)
    num_held: int = 0  # leases in the first report

    async def report(self, news: LeaseReport) -> LeaseOrders:
        """Transfer a report to the balancer, and apply it."""
        begun = time.process_time()
        data = codec.encode(news)
        written = time.process_time()
        received = codec.decode(data, LeaseReport)
        read = time.process_time()
        orders = self.balancer.took(received, self.now)
        self.num_held += len(received.leases or ())
        self.cost.num_turns += sum(isinstance(turn, TurnEnded) for turn in received.turns)
        self.cost.report_s += written - begun
        self.cost.take_s += read - written
        self.cost.balance_s += time.process_time() - read
        return orders

    async def reported(self) -> None:
        """Wait until the turns of all trajectories are applied."""
        async with asyncio.timeout(60.0):
            while self.cost.num_turns < len(self.live):
                await asyncio.sleep(REPORT.coalesce_s)

    async def begin(self, reporter: LeaseReporter, num_live: int, num_tokens: int) -> None:
        """Start trajectories with first prompts of `num_tokens` tokens, and report their leases."""
        for number in range(num_live):
            name, group = f"run/{number // GROUP_SIZE}/{number % GROUP_SIZE}", f"run/{number // GROUP_SIZE}"
            demand = Demand(name, reporter.process_id, group, num_tokens, GROUP_SIZE)
            lease = self.balancer.acquire(demand, self.now)
            holder = LeaseHolder(reporter, self, name, lease)  # type: ignore[arg-type] # nothing is asked of it
            self.live.append(_Trajectory(holder, self.ids(num_tokens), number))
        async with asyncio.timeout(60.0):
            while self.num_held < num_live:
                await asyncio.sleep(REPORT.coalesce_s)

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(self.vocab, k=num_tokens))

    def turns(self) -> float:
        """Run one turn and its observation for every trajectory. Returns the worker's CPU seconds."""
        answers = [(one, *self._answer(one)) for one in self.live]
        gc.collect()  # creating the engine's answers is not a cost of leases
        begun = time.process_time()
        for one, request, generation in answers:
            one.holder.enter()
            one.holder.begin()
            one.holder.leave(one.holder.lease, request, generation)
        spent = time.process_time() - begun
        for one, _, generation in answers:
            one.ids = (*one.ids, *generation.token_ids, *self.ids(NUM_OBSERVED))
        gc.collect()
        return spent

    def _answer(self, one: _Trajectory) -> tuple[GenerateRequest, Generation]:
        request = GenerateRequest(
            f"{one.number}-{len(one.ids)}", one.ids, SamplingParams(NUM_SAMPLED), kv_version=0
        )
        sampled = self.ids(NUM_SAMPLED)
        generation = Generation(
            request.request_id,
            sampled,
            (0.0,) * len(sampled),
            (WeightVersionSpan(0, 0, len(sampled)),),
            FinishReason.STOP,
            cached_tokens=len(one.ids) - NUM_OBSERVED,
        )
        return request, generation


async def measure_turns(num_tokens: int) -> TurnCost:
    """Return the cost of the cheapest round: one turn per trajectory, with contexts of about `num_tokens`."""
    rng = random.Random(num_tokens)
    service = Service(Balancer(fleet_of(NUM_REPLICAS)), rng, list(range(1000, 33_000)))
    reporter = LeaseReporter("worker", service.report, REPORT)
    num_new = NUM_SAMPLED + NUM_OBSERVED
    await service.begin(reporter, NUM_LIVE, num_tokens - (NUM_ROUNDS + 1) * num_new)
    rounds = []
    for _ in range(NUM_ROUNDS + 1):
        service.cost, service.now = TurnCost(), service.now + 20.0
        worker_s = service.turns()
        begun = time.process_time()
        await service.reported()
        cost = service.cost
        cost.note_s = worker_s
        cost.report_s = time.process_time() - begun - cost.take_s - cost.balance_s
        rounds.append(cost)
    await reporter.close()
    return min(rounds[1:], key=lambda cost: sum(cost.parts_us))  # the first round warms up


def measure_placement(num_replicas: int) -> tuple[float, float, float]:
    """Return the seconds of an acquire, of a release, and of both in sequence, at a steady load."""
    balancer = Balancer(fleet_of(num_replicas))
    best = (float("inf"), float("inf"), float("inf"))
    held: list[Lease] = []
    for number in range(num_replicas * LIVE_PER_REPLICA):
        held.append(balancer.acquire(_demand(number), 0.0))
    number = len(held)
    for _ in range(NUM_ROUNDS):
        begun = time.process_time()
        held.extend(balancer.acquire(_demand(number + index), 1.0) for index in range(NUM_PLACED))
        acquired = time.process_time()
        for lease in held[:NUM_PLACED]:
            balancer.release(lease, 9000, 2.0)
        released = time.process_time()
        number, held = number + NUM_PLACED, held[NUM_PLACED:]
        for index in range(NUM_PLACED):
            held.append(balancer.acquire(_demand(number + index), 3.0))
            balancer.release(held[index], 9000, 3.0)
        done = time.process_time()
        number, held = number + NUM_PLACED, held[NUM_PLACED:]
        times = [spent / NUM_PLACED for spent in (acquired - begun, released - acquired, done - released)]
        best = min(best[0], times[0]), min(best[1], times[1]), min(best[2], times[2])
    return best


def _demand(number: int) -> Demand:
    group = f"run/{number // GROUP_SIZE}"
    return Demand(f"{group}/{number % GROUP_SIZE}", f"w{number % 32}", group, 2000, GROUP_SIZE)


async def measure_memory(num_tokens: int) -> float:
    """Return the coordinator's memory in bytes per live trajectory with a context of `num_tokens`."""
    with _traced() as used:
        balancer = Balancer(fleet_of(NUM_REPLICAS))
        empty = used()
        rng = random.Random(0)
        service = Service(balancer, rng, list(range(1000, 33_000)))
        reporter = LeaseReporter("worker", service.report, REPORT)
        await service.begin(reporter, NUM_LIVE, num_tokens - NUM_SAMPLED - NUM_OBSERVED)
        service.turns()
        await service.reported()
        await reporter.close()
        service.live.clear()
        del service, reporter
        return (used() - empty) / NUM_LIVE


@contextmanager
def _traced() -> Iterator[Callable[[], int]]:
    def used() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        yield used
    finally:
        tracemalloc.stop()


def turn_table(costs: dict[int, TurnCost]) -> str:
    """Return the table of a turn's cost by component, with its goal."""
    columns = ["context tokens", "note µs", "report µs", "read µs", "balance µs", "in all µs", "goal", "is met"]
    rows = []
    for num_tokens, cost in costs.items():
        total, goal = sum(cost.parts_us), CONTEXTS[num_tokens]
        rows.append((num_tokens, *cost.parts_us, total, goal, "yes" if total <= goal else "no"))
    return report.table(columns, rows)


def main() -> None:
    """Run all measurements, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    turns = {num_tokens: asyncio.run(measure_turns(num_tokens)) for num_tokens in CONTEXTS}
    placements = {num: measure_placement(num) for num in (NUM_REPLICAS, 8 * NUM_REPLICAS)}
    memory = {num_tokens: asyncio.run(measure_memory(num_tokens)) for num_tokens in CONTEXTS}
    small, large = (placements[num][0] for num in placements)
    tables = {
        f"A turn of {NUM_SAMPLED} + {NUM_OBSERVED} new tokens, {NUM_REPLICAS} replicas": turn_table(turns),
        "A lease": report.table(
            ["replicas", "acquire µs", "release µs", "both, a second", "goal", "is met"],
            [
                (
                    num,
                    1e6 * acquire,
                    1e6 * release,
                    1 / both,
                    GOAL_LEASES,
                    "yes" if 1 / both >= GOAL_LEASES else "no",
                )
                for num, (acquire, release, both) in placements.items()
            ],
        )
        + f"\n\nA placement at 512 replicas costs {large / small:.2f} times one at 64; the goal is at most 2.",
        "Memory of the coordinator": report.table(
            ["of", "bytes"],
            [(f"a live trajectory of {num_tokens} tokens", num_bytes) for num_tokens, num_bytes in memory.items()],
        ),
    }
    results = {"turns": turns, "placements": placements, "memory": memory}
    report.finish("Costs of the balancer", tables, results, args.out)


if __name__ == "__main__":
    main()
