"""The simulator that balancers are compared with.

Its cache and its engine are compared with slow, simple implementations, and a run must account for every request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.concurrency.clock import VirtualClock
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop.types import GenerateRequest, SamplingParams
from tests.benchmarks.balancer.compare import figures, ratio, student_t, tokens_per_s_between_quartiles
from tests.benchmarks.balancer.engine import INFINITY, Engine, Request
from tests.benchmarks.balancer.kv import END, Path, PrefixCache
from tests.benchmarks.balancer.policy import FleetShape, QuietPolicy, StepTimes, TurnAsk, TurnEnd
from tests.benchmarks.balancer.regimes import STEP_TIMES, fit_step_times
from tests.benchmarks.balancer.simulate import Disturbance, run
from tests.benchmarks.balancer.workload import ToolTimes, WorkloadParameters, generate

TIMES = StepTimes(0.006, 0.004, 1e-5, 1e-9, 0.003, 1e-5, 3e-8)


# The cache


class BlockByBlock:
    """A prefix cache of single blocks: a direct implementation of vLLM's rule."""

    def __init__(self) -> None:
        self.holders: dict[tuple[int, int], int] = {}
        self.idle: OrderedDict[tuple[int, int], None] = OrderedDict()

    def match(self, blocks: list[tuple[int, int]]) -> int:
        return next((n for n, block in enumerate(blocks) if block not in self.holders), len(blocks))

    def hold(self, blocks: Iterable[tuple[int, int]]) -> None:
        for block in blocks:
            self.holders[block] = self.holders.get(block, 0) + 1
            self.idle.pop(block, None)

    def release(self, blocks: list[tuple[int, int]]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.idle[block] = None

    def evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block, _ = self.idle.popitem(last=False)
            del self.holders[block]


def blocks_of(path: Path, num_blocks: int) -> list[tuple[int, int]]:
    return [(run, block) for run, first, end in path for block in range(first, min(end, num_blocks))]


TURNS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 12), st.booleans()), min_size=1, max_size=60
)


@given(TURNS)
@settings(max_examples=100, deadline=None)
def test_the_cache_by_runs_is_the_cache_by_blocks(turns: list[tuple[int, int, int, bool]]) -> None:
    """A trajectory's turn pins its cached prefix, computes the rest and grows while others are in flight."""
    cache, plain = PrefixCache(), BlockByBlock()
    lengths = dict.fromkeys(range(6), 5)
    in_flight: dict[int, tuple[Path, int]] = {}
    for number, num_grown, num_evicted, ends in turns:
        path = ((100, 0, 2), (200 + number % 2, 2, 4), (number, 4, END))
        if number in in_flight:
            cache.release(*in_flight[number])
            plain.release(blocks_of(*in_flight.pop(number)))
        num_blocks = lengths[number] = lengths[number] + num_grown
        num_matched, num_idle = cache.match(path, num_blocks)
        assert num_matched == plain.match(blocks_of(path, num_blocks))
        assert num_idle == sum(block in plain.idle for block in blocks_of(path, num_matched))
        cache.hold(path, num_matched)
        cache.store(path, num_matched, num_blocks)
        plain.hold(blocks_of(path, num_blocks))
        in_flight[number] = path, num_blocks
        if ends:
            cache.release(*in_flight[number])
            plain.release(blocks_of(*in_flight.pop(number)))
        num_evicted = min(num_evicted, len(plain.idle))
        cache.evict(num_evicted)
        plain.evict(num_evicted)
        assert (cache.num_blocks, cache.num_idle_blocks) == (len(plain.holders), len(plain.idle))


def test_no_more_is_evicted_than_is_idle() -> None:
    cache = PrefixCache()
    path: Path = ((1, 0, END),)
    cache.store(path, 0, 3)
    with pytest.raises(ValueError, match="0 idle"):
        cache.evict(1)
    with pytest.raises(ValueError, match="holds"):
        cache.clear()


# The engine


@dataclass(eq=False)
class PlainRequest:
    """A request of the engine below."""

    path: Path
    num_prompt: int
    num_outputs: int
    computed: int = 0
    sampled: int = 0
    num_private: int = 0
    num_shared: int = 0
    cached: int | None = None
    ended_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.sampled


@dataclass
class StepByStep:
    """The engine's rules, step by step and block by block, without closed forms."""

    shape: FleetShape
    cache: BlockByBlock = field(default_factory=BlockByBlock)
    running: list[PlainRequest] = field(default_factory=list)
    waiting: list[PlainRequest] = field(default_factory=list)
    num_preemptions: int = 0

    def free(self) -> int:
        private = sum(request.num_private for request in self.running)
        return self.shape.capacity_blocks - len(self.cache.holders) + len(self.cache.idle) - private

    def missing(self, request: PlainRequest, num_tokens: int) -> int:
        size = self.shape.block_size
        return -(-(request.computed + num_tokens) // size) - -(-request.computed // size)

    def preempt(self) -> PlainRequest:
        victim = self.running.pop()
        self.leave(victim)
        victim.computed = 0
        self.waiting.insert(0, victim)
        self.num_preemptions += 1
        return victim

    def leave(self, request: PlainRequest) -> None:
        self.store(request, request.computed)
        self.cache.release(blocks_of(request.path, request.num_shared))
        request.num_private = request.num_shared = 0

    def schedule(self, request: PlainRequest, num: int) -> None:
        request.num_private += self.missing(request, num)
        self.store(request, request.computed + num)

    def store(self, request: PlainRequest, num_tokens: int) -> None:
        num_full = max(request.num_shared, num_tokens // self.shape.block_size)
        self.cache.hold(blocks_of(request.path, num_full)[request.num_shared :])
        request.num_private -= num_full - request.num_shared
        request.num_shared = num_full

    def step(self, now: float) -> float:
        """Run one step and return its end time."""
        times, size = self.shape.step_times, self.shape.block_size
        budget, has_preempted = self.shape.max_batched_tokens, False
        plan: list[tuple[PlainRequest, int]] = []
        decoding = [request for request in self.running if request.computed == request.num_tokens - 1]
        decoding = [request for request in decoding if request.sampled]
        while sum(self.missing(request, 1) for request in decoding) > self.free():
            victim, has_preempted = self.preempt(), True
            decoding = [request for request in decoding if request is not victim]
        for request in decoding:
            request.num_private += self.missing(request, 1)
            plan.append((request, 1))
            budget -= 1
        for request in [request for request in self.running if request not in decoding]:
            num = min(budget, request.num_tokens - request.computed)
            while num > 0 and request in self.running and self.missing(request, num) > self.free():
                self.preempt()
                has_preempted = True
            if num > 0 and request in self.running:
                self.schedule(request, num)
                plan.append((request, num))
                budget -= num
        while not has_preempted and self.waiting and budget > 0:
            request = self.waiting[0]
            blocks = blocks_of(request.path, (request.num_tokens - 1) // size)
            num_matched = self.cache.match(blocks)
            idle = sum(block in self.cache.idle for block in blocks[:num_matched])
            if -(-request.num_tokens // size) - num_matched > self.free() - idle:
                break
            self.running.append(self.waiting.pop(0))
            self.cache.hold(blocks[:num_matched])
            request.num_shared, request.computed = num_matched, num_matched * size
            request.cached = request.computed if request.cached is None else request.cached
            num = min(budget, request.num_tokens - request.computed)
            self.schedule(request, num)
            plan.append((request, num))
            budget -= num
        self.cache.evict(max(0, -(self.free() - len(self.cache.idle))))
        plan = [(request, num) for request, num in plan if request in self.running]
        decoding = [request for request in decoding if request in self.running]
        num_decoding, num_context = len(decoding), sum(request.computed for request in decoding)
        chunks = [(request, num) for request, num in plan if request not in decoding]
        if chunks:
            seconds = max(times.prefill_s, times.step_s if num_decoding else 0.0)
            seconds += times.step_sequence_s * num_decoding + times.step_token_s * num_context
            for request, num in chunks:
                start, end = request.computed, request.computed + num
                seconds += times.prefill_token_s * num + times.prefill_pair_s * (end**2 - start**2)
            seconds = max(seconds, times.prefill_floor_s)
        else:
            seconds = times.step_s + times.step_sequence_s * num_decoding + times.step_token_s * num_context
        ended = []
        for request, num in plan:
            request.computed += num
            if request.computed == request.num_tokens:
                request.sampled += 1
            if request.sampled == request.num_outputs:
                ended.append(request)
        for request in ended:
            request.ended_at = now + seconds
            self.running.remove(request)
            self.leave(request)
        return now + seconds


def play_plain(shape: FleetShape, arrivals: list[tuple[float, PlainRequest]]) -> StepByStep:
    engine, now, queue = StepByStep(shape), 0.0, list(arrivals)
    while queue or engine.running or engine.waiting:
        if not engine.running and not engine.waiting:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now + 1e-9:
            engine.waiting.append(queue.pop(0)[1])
        now = engine.step(now)
    return engine


def play(shape: FleetShape, arrivals: list[tuple[float, Request]]) -> tuple[Engine, dict[int, float]]:
    engine, queue, ended = Engine(0, shape), list(arrivals), {}
    while queue or engine.has_work:
        if queue and queue[0][0] <= engine.ends_at:
            now, request = queue.pop(0)
            engine.submit(request, now)
        else:
            now = engine.ends_at
            for request in engine.complete(now):
                ended[request.trajectory] = now
        engine.plan(now)
    assert engine.num_held_blocks == 0
    return engine, ended


def random_arrivals(seed: int, num: int, is_short: bool) -> list[tuple[float, int, Path, int, int]]:
    """Return requests of three groups that share prompts, with times that never coincide with a step's end."""
    rng, now, found = random.Random(seed), 0.0, []
    for number in range(num):
        now += rng.expovariate(4.0 if is_short else 12.0)
        group = rng.randrange(3)
        path: Path = ((1000, 0, 3), (2000 + group, 3, 8 + group), (number, 8 + group, END))
        num_prompt = (8 + group) * 16 + rng.randrange(1, 60 if is_short else 300)
        found.append((now, number, path, num_prompt, rng.randrange(1, 20 if is_short else 150)))
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("capacity_blocks", "max_batched_tokens"), [(4000, 8192), (4000, 160), (60, 160)])
def test_going_from_event_to_event_is_going_step_by_step(
    seed: int, capacity_blocks: int, max_batched_tokens: int
) -> None:
    shape = FleetShape(1, capacity_blocks, 16, TIMES, max_batched_tokens, max_running=10_000)
    arrivals = random_arrivals(seed, 60, is_short=False)
    plain = [(at, PlainRequest(path, prompt, outputs)) for at, _, path, prompt, outputs in arrivals]
    fast = [(at, Request(number, path, prompt, outputs)) for at, number, path, prompt, outputs in arrivals]
    expected = play_plain(shape, plain)
    engine, ended = play(shape, fast)
    assert [request.num_cached_tokens for _, request in fast] == [request.cached for _, request in plain]
    assert list(dict(sorted(ended.items())).values()) == pytest.approx([one.ended_at for _, one in plain], abs=1e-6)
    assert engine.num_preemptions == expected.num_preemptions
    assert bool(expected.num_preemptions) == (capacity_blocks == 60)
    assert engine.num_sampled_tokens == sum(outputs for *_, outputs in arrivals)


def test_decode_by_hand() -> None:
    """Two requests of 3 and 5 tokens: a step with both prompts, two with both decodes, two with one."""
    times = StepTimes(0.0, 0.5, 0.01, 0.001, 0.1, 0.02, 0.001)
    shape = FleetShape(1, 100, 4, times)
    first, second = Request(1, ((1, 0, END),), 10, 3), Request(2, ((2, 0, END),), 20, 5)
    engine = Engine(0, shape)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    _, ended = play(shape, [(0.0, Request(1, ((1, 0, END),), 10, 3))])
    assert ended[1] == pytest.approx(0.5 + 0.1 + 0.1 + 2 * (0.1 + 0.02) + 0.001 * (10 + 11))
    engine.plan(0.0)
    prefill_s = 0.5 + 0.01 * 30 + 0.001 * (100 + 400)
    assert engine.ends_at == pytest.approx(prefill_s)
    assert engine.complete(prefill_s) == []
    engine.plan(prefill_s)
    both_s = 2 * (0.1 + 0.04) + 0.001 * (30 + 32)
    assert engine.ends_at == pytest.approx(prefill_s + both_s)
    assert engine.complete(engine.ends_at) == [first]
    engine.plan(prefill_s + both_s)
    assert engine.ends_at == pytest.approx(prefill_s + both_s + 2 * (0.1 + 0.02) + 0.001 * (22 + 23))


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    """vLLM shares blocks as soon as they are scheduled, also with later requests of the same step."""
    shape = FleetShape(1, 100, 4, TIMES)
    path: Path = ((1, 0, 5),)
    requests = [Request(number, (*path, (10 + number, 5, END)), 21, 2) for number in range(3)]
    engine = Engine(0, shape)
    for request in requests:
        engine.submit(request, 0.0)
    engine.plan(0.0)
    engine.complete(engine.ends_at)
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20]
    assert engine.num_prefilled_tokens == 21 + 1 + 1


def test_of_a_prompt_in_chunks_the_chunks_scheduled_so_far_are_shared() -> None:
    shape = FleetShape(1, 100, 4, TIMES, max_batched_tokens=15)
    first, second = (Request(number, ((1, 0, 5), (10 + number, 5, END)), 21, 2) for number in range(2))
    late = Request(2, ((1, 0, 5), (12, 5, END)), 21, 2)
    engine = Engine(0, shape)
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    engine.plan(0.0)  # the first request takes the step's complete budget
    engine.complete(engine.ends_at)
    engine.submit(late, 1.0)
    engine.plan(1.0)  # 6 tokens are left for it; then the others find all five blocks
    assert (first.num_cached_tokens, second.num_cached_tokens, late.num_cached_tokens) == (0, 20, 20)


def test_a_request_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Engine(0, FleetShape(1, 10, 4, TIMES)).submit(Request(0, ((1, 0, END),), 40, 1), 0.0)


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 4000), (1, 4000), (2, 90), (3, 90)])
def test_it_times_and_caches_as_the_simulated_engine_does(seed: int, num_blocks: int) -> None:
    """Trajectories of several turns, on both engines with one latency model, with and without eviction."""
    latency = LatencyModel(0.0, 1e-4, 0.003, 1e-4, 1e-6)
    shape = FleetShape(1, num_blocks, 4, StepTimes(0.0, 0.0, 1e-4, 0.0, 0.003, 1e-4, 1e-6), 100_000)
    rng = random.Random(seed)
    scripts = [
        [(rng.uniform(0.02, 0.4), rng.randrange(3, 12), rng.randrange(2, 12)) for _ in range(rng.randrange(1, 6))]
        for _ in range(6)
    ]
    clock = VirtualClock()
    theirs = clock.run(_simulated(clock, scripts, latency, num_blocks))
    mine = _fast(scripts, shape)
    assert [cached for cached, _ in mine] == [cached for cached, _ in theirs]
    assert [at for _, at in mine] == pytest.approx([at for _, at in theirs], abs=1e-6)
    assert any(cached for cached, _ in mine)


_Script = list[tuple[float, int, int]]  # wait, new tokens, outputs


async def _simulated(
    clock: VirtualClock, scripts: list[_Script], latency: LatencyModel, num_blocks: int
) -> list[tuple[int, float]]:
    spec = SimulatedSpec(max_context_tokens=300, block_size=4, num_blocks=num_blocks, latency=latency)
    engine = SimulatedEngine(spec, clock=clock)
    await engine.start()
    found: dict[tuple[int, int], tuple[int, float]] = {}

    async def trajectory(number: int, script: _Script) -> None:
        tokens = list(range(20))
        for turn, (wait_s, num_new, num_outputs) in enumerate(script):
            await clock.sleep(wait_s)
            tokens += [1000 * (number + 1) + turn * 40 + n for n in range(num_new)]
            sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0)
            generation = await engine.generate(GenerateRequest(f"{number} {turn}", tuple(tokens), sampling))
            tokens += generation.token_ids
            found[number, turn] = generation.cached_tokens, clock.now()

    start = clock.now()
    await asyncio.gather(*itertools.starmap(trajectory, enumerate(scripts)))
    await engine.close()
    return [(cached, at - start) for _, (cached, at) in sorted(found.items())]


def _fast(scripts: list[_Script], shape: FleetShape) -> list[tuple[int, float]]:
    engine, found = Engine(0, shape), {}
    turns = dict.fromkeys(range(len(scripts)), 0)
    lengths = dict.fromkeys(range(len(scripts)), 20)
    due = {number: script[0][0] for number, script in enumerate(scripts)}
    requests: dict[int, Request] = {}
    while due or engine.has_work:
        number = min(due, key=due.__getitem__) if due else -1
        if due and due[number] <= engine.ends_at:
            now = due.pop(number)
            _, num_new, num_outputs = scripts[number][turns[number]]
            lengths[number] += num_new
            requests[number] = Request(number, ((99, 0, 5), (number, 5, END)), lengths[number], num_outputs)
            engine.submit(requests[number], now)
        else:
            now = engine.ends_at
            for request in engine.complete(now):
                number = request.trajectory
                assert request.num_cached_tokens is not None
                found[number, turns[number]] = request.num_cached_tokens, now
                lengths[number] += request.num_outputs
                turns[number] += 1
                if turns[number] < len(scripts[number]):
                    due[number] = now + scripts[number][turns[number]][0]
        engine.plan(now)
    assert engine.ends_at == INFINITY
    return [entry for _, entry in sorted(found.items())]


# Complete runs


class Checked(QuietPolicy):
    """A balancer that places at random, sometimes refuses, and checks the reported events."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self.shape = shape
        self.rng = random.Random(seed)
        self.alive = set(range(shape.num_replicas))
        self.in_flight: dict[int, int] = {}
        self.num_finished = 0
        self.num_retries = 0

    def rank(self, turn: TurnAsk, now: float) -> float:
        return self.rng.random()

    def place(self, turn: TurnAsk, now: float) -> int | None:
        assert turn.trajectory not in self.in_flight
        if self.rng.random() < 0.3:
            return None
        self.num_retries += turn.is_retry
        if turn.last_replica in self.alive and self.rng.random() < 0.7:
            return turn.last_replica
        return self.rng.choice(sorted(self.alive))

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        self.in_flight[turn.trajectory] = replica

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        assert self.in_flight.pop(turn.trajectory) == end.replica
        assert end.num_cached_tokens < turn.num_prompt_tokens

    def finished(self, trajectory: int, now: float) -> None:
        self.num_finished += 1

    def replica_lost(self, replica: int, now: float) -> None:
        self.alive.remove(replica)
        self.in_flight = {one: where for one, where in self.in_flight.items() if where != replica}

    def replica_added(self, replica: int, now: float) -> None:
        assert replica == self.shape.num_replicas
        self.alive.add(replica)


SMALL = WorkloadParameters(
    num_groups=6, num_samples=4, turns=(5.0, 0.6), prompt=(600.0, 0.5), system_tokens=300, max_context=9000
)
DISTURBANCES = [
    Disturbance(),
    Disturbance(7.0, 3.0),
    Disturbance(7.0, 3.0, is_flushed=False),
    Disturbance(loses_replica=True),
    Disturbance(adds_replica=True),
    Disturbance(9.0, 5.0, loses_replica=True, adds_replica=True),
]


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("capacity_blocks", [3000, 800])
def test_all_trajectories_end_and_tokens_add_up(disturbance: Disturbance, capacity_blocks: int) -> None:
    workload = generate(replace(SMALL, tools=ToolTimes(shares=(1.0, 0.0, 0.0))), 3)
    shape = FleetShape(3, capacity_blocks, 16, TIMES, max_live=12)
    policies: list[Checked] = []

    def make(shape: FleetShape, workload: object, seed: int) -> Checked:
        policies.append(Checked(shape, seed))
        return policies[-1]

    record = run(make, shape, workload, disturbance, seed=1)
    policy = policies[0]
    assert policy.num_finished == len(workload.trajectories) == len(record.trajectory_ended_at)
    assert not policy.in_flight
    assert record.num_turns == workload.num_turns
    assert record.num_sampled_tokens == workload.num_sampled_tokens
    assert sum(map(sum, record.tokens_by_second)) == pytest.approx(workload.num_sampled_tokens)
    assert record.num_input_tokens == workload.num_input_tokens
    assert record.num_cached_tokens <= record.num_bound_tokens < record.num_input_tokens
    assert record.num_prefilled_tokens >= record.num_input_tokens - record.num_cached_tokens
    assert len(record.group_ended_at) == SMALL.num_groups
    assert 0.0 < record.busy_s < record.alive_s
    assert figures(record)["makespan_s"] == max(record.trajectory_ended_at)
    assert bool(record.num_updates) == (disturbance.update_every_s is not None)
    assert bool(policy.num_retries) == disturbance.loses_replica
    again = run(make, shape, workload, disturbance, seed=1)
    assert again.trajectory_ended_at == record.trajectory_ended_at


class Nowhere(QuietPolicy):
    """A balancer that places nothing."""

    def place(self, turn: TurnAsk, now: float) -> int | None:
        return None


def test_a_policy_that_starves_turns_is_told_so() -> None:
    shape = FleetShape(2, 3000, 16, TIMES)
    with pytest.raises(RuntimeError, match="no turn is placed"):
        run(lambda *_: Nowhere(), shape, generate(SMALL, 0), Disturbance())


class OneReplica(QuietPolicy):
    """A balancer that places everything on replica 0."""

    def place(self, turn: TurnAsk, now: float) -> int | None:
        return 0


def test_the_bound_is_what_one_replica_without_end_reaches() -> None:
    """One trajectory after another on a replica that never evicts."""
    shape = FleetShape(1, 100_000, 16, TIMES, max_live=1)
    record = run(lambda *_: OneReplica(), shape, generate(SMALL, 0), Disturbance())
    assert record.num_cached_tokens == record.num_bound_tokens > 0
    assert record.num_prefilled_tokens == record.num_input_tokens - record.num_cached_tokens
    assert record.num_moves == record.num_preemptions == 0


def test_trajectories_begin_when_they_arrive() -> None:
    workload = generate(replace(SMALL, arrive_over_s=500.0), 0)
    record = run(lambda *_: OneReplica(), FleetShape(1, 3000, 16, TIMES), workload, Disturbance())
    arrivals = [one.arrives_at for one in workload.trajectories]
    assert record.makespan_s > max(arrivals) > 300.0
    sampled = record.tokens_by_second[0]
    assert not sum(sampled[: int(min(arrivals))])
    assert sum(sampled) == pytest.approx(workload.num_sampled_tokens)


# Metrics


def test_the_rate_between_quartiles_leaves_the_ends_out() -> None:
    ramp, tail = [10.0] * 10, [1.0] * 100
    assert tokens_per_s_between_quartiles([[*ramp, *[100.0] * 8, *tail]]) == pytest.approx(100.0)
    assert tokens_per_s_between_quartiles([[60.0] * 5, [40.0] * 5]) == pytest.approx(100.0)


def test_ratios_are_paired_by_seed_and_have_students_interval() -> None:
    assert student_t(19) == pytest.approx(2.093, abs=0.001)
    assert student_t(9) == pytest.approx(2.262, abs=0.01)
    mean, least, most = ratio({0: 9.0, 1: 18.0, 7: 1.0}, {0: 10.0, 1: 20.0, 3: 5.0})
    assert mean == least == most == pytest.approx(0.9)
    mean, least, most = ratio({0: 1.0, 1: 4.0}, {0: 2.0, 1: 2.0})
    assert mean == pytest.approx(1.0)
    assert least * most == pytest.approx(1.0)
    assert least < 0.01


@pytest.mark.parametrize(("name", "error"), [("h200-qwen3-4b", 0.08), ("h200-qwen3-8b", 0.03)])
def test_the_fitted_times_of_prefills_are_near_the_measured_ones(name: str, error: float) -> None:
    measured = json.loads((STEP_TIMES / f"{name}.json").read_text())
    times, budget = fit_step_times(measured), measured["batched_tokens"]
    for num_tokens, seconds in measured["prefill"]["points"]:
        starts = range(0, num_tokens, budget)
        fitted = sum(times.step_with_prefill([(start, min(num_tokens, start + budget))]) for start in starts)
        assert fitted == pytest.approx(seconds, rel=error)
    for num_decoding, num_tokens, seconds in measured["decode"]["points"]:
        assert times.step(num_decoding, num_tokens) == pytest.approx(seconds, rel=0.1)
