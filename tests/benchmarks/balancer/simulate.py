"""One run: a policy, a fleet of simulated engines, a workload and what happens to the fleet, in virtual time.

The loop is a heap of events with sequence numbers, so a run is a function of its scenario, workload and policy.
Workers have places for `FleetShape.max_live` trajectories; a trajectory takes one when its first turn is placed.
Trajectories are offered all at once at time 0.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tests.benchmarks.balancer.engine import INFINITY, Engine, Progress, Request
from tests.benchmarks.balancer.kv import END, Path, Stored
from tests.benchmarks.balancer.policy import Arm, FleetShape, KVChange, Policy, QuietPolicy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Trajectory, Workload

_LOOK_S = 1.0
_REFUSALS = 4  # in a row end a round; after `look`, more
_REFUSALS_AFTER_LOOK = 64
_STARVED_S = 600.0  # a fleet idle for so long while turns wait is the policy's mistake
_NAME_BITS = 24  # of a block's name: its place in the context
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd: distinct names stay distinct


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to the fleet besides its work."""

    update_every_s: float | None = None  # from start to start of two updates
    first_update_s: float = 150.0  # when the burst of the start is over
    update_s: float = 2.0  # engines stand still
    is_flushed: bool = True
    loses_replica: bool = False  # when half of the turns have ended
    adds_replica: bool = False


@dataclass(slots=True)
class Happening:
    """A disturbance that took place; recovery is judged against the time before it."""

    kind: str  # update, loss, add
    at: float
    share_done: float  # of the turns


@dataclass(slots=True)
class Recording:
    """Everything a run leaves behind."""

    makespan_s: float = 0.0
    num_turns: int = 0
    num_input_tokens: int = 0  # prompts of all turns
    num_cached_tokens: int = 0  # of them, at a turn's first admission
    num_bound_tokens: int = 0  # of them, with one cache for the fleet that never evicts
    num_prefilled_tokens: int = 0  # computed, repetitions included
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_moves: int = 0  # turns that ran elsewhere than the turn before, retries left out
    busy_s: float = 0.0
    alive_s: float = 0.0  # of engines, pauses left out
    turn_s: list[float] = field(default_factory=list)  # asked to ended
    cycle_s: list[float] = field(default_factory=list)  # asked to the next turn's asking
    first_token_s: list[float] = field(default_factory=list)  # asked to first token
    trajectory_s: list[float] = field(default_factory=list)  # first placed to ended
    trajectory_ended_at: list[float] = field(default_factory=list)
    group_ended_at: list[float] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    tokens_by_second: list[list[float]] = field(default_factory=list)  # sampled, by replica
    policy_ns: int = 0  # CPU time in the policy
    place_ns: int = 0  # of it, in `place`
    num_places: int = 0


@dataclass(slots=True, eq=False)
class _Live:
    """A trajectory and where it stands."""

    trajectory: Trajectory
    num_prompt_tokens: int
    turn: int = 0
    epoch: int = -1  # of its blocks' names; -1: it was never asked
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    path: Path = ()
    replica: int | None = None
    ask: TurnAsk | None = None
    asked_at: float = 0.0
    began_at: float | None = None  # None: its first turn has no replica yet
    num_outputs: int = 0  # of this turn, that are not sampled yet
    num_cached_tokens: int | None = None  # of this turn's first attempt
    is_in_flight: bool = False
    first_token_turn: int = -1  # the last turn that had one
    has_ended: bool = False


def run(arm: Arm, shape: FleetShape, workload: Workload, disturbance: Disturbance, seed: int = 0) -> Recording:
    """Run a workload to its end. Raises RuntimeError if the policy lets a turn wait for ever."""
    if arm.has_infinite_kv:
        shape = replace(shape, capacity_blocks=END)
    return _Run(arm.make(shape, workload, seed), shape, workload, disturbance).run()


class _Names:
    """Names of runs of blocks and of blocks: equal for equal content under equal epochs."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int, int], int] = {}

    def path(self, trajectory: Trajectory, epoch: int, block_size: int) -> Path:
        system = trajectory.num_system_tokens // block_size
        group = trajectory.num_group_tokens // block_size
        runs = []
        if system:
            runs.append((self._run("system", trajectory.system, epoch), 0, system))
        if group > system:
            runs.append((self._run("group", trajectory.group, epoch), system, group))
        runs.append((self._run("trajectory", trajectory.number, epoch), group, END))
        return tuple(runs)

    def _run(self, kind: str, number: int, epoch: int) -> int:
        return self._runs.setdefault((kind, number, epoch), len(self._runs))


def block_names(run: int, first: int, end: int) -> array[int]:
    """Return the names of a run's blocks."""
    numbers = np.arange((run << _NAME_BITS) + first, (run << _NAME_BITS) + end, dtype=np.uint64)
    names = array("Q")
    names.frombytes((numbers * _MIX).tobytes())
    return names


def extend_names(names: array[int], path: Path, num_blocks: int) -> None:
    """Append the names of a path's blocks that are not there yet."""
    for run, first, end in path:
        start = max(first, len(names))
        stop = min(end, num_blocks)
        if start < stop:
            names.extend(block_names(run, start, stop))


class _Run:
    """The state of one run."""

    def __init__(self, policy: Policy, shape: FleetShape, workload: Workload, disturbance: Disturbance) -> None:
        self._policy = policy
        self._shape = shape
        self._disturbance = disturbance
        self._engines = [Engine(number, shape, 0.0, policy.hears_kv) for number in range(shape.num_replicas)]
        self._lost: dict[int, float] = {}  # replica -> when
        self._live = [_Live(one, one.num_group_tokens, num_outputs=one.outputs[0]) for one in workload.trajectories]
        self._num_siblings: dict[int, int] = {}
        for one in workload.trajectories:
            self._num_siblings[one.group] = self._num_siblings.get(one.group, 0) + 1
        self._num_turns = workload.num_turns
        self._num_left = len(self._live)
        self._num_begun = 0  # trajectories that have a worker's place now
        self._events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._num_events = 0
        self._versions: list[int] = []
        self._first_turns: list[tuple[float, int, _Live]] = []
        self._later_turns: list[tuple[float, int, _Live]] = []
        self._has_ranks = getattr(type(policy), "rank", None) is not QuietPolicy.rank
        self._epoch = 0
        self._names = _Names()
        self._touched: dict[Engine, None] = {}  # engines that got something during this event
        self._known: dict[int, int] = {}  # run -> end of its blocks that were ever computed
        self._num_timers = 0  # tools that run
        self._idle_since: float | None = None
        self._is_half = False
        self._is_updating = False
        self._record = Recording()

    def run(self) -> Recording:
        self._versions = [-1] * len(self._engines)
        for live in self._live:
            self._wait(live, 0.0)
        self._at(0.0, self._on_look, 0)
        if self._disturbance.update_every_s is not None:
            self._at(self._disturbance.first_update_s, self._on_update, 0)
        while self._num_left:
            now, _, action, argument = heapq.heappop(self._events)
            action(now, argument)
            if self._touched:
                touched, self._touched = self._touched, {}
                for engine in touched:
                    self._schedule(engine, now)
        return self._finish(now)

    # --- events ---

    def _at(self, when: float, action: Callable[[float, int], None], argument: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action, argument))

    def _schedule(self, engine: Engine, now: float) -> None:
        """Have an engine begin what it can, and its next event on the heap."""
        engine.plan(now)
        if self._policy.hears_kv and engine.cache.events:
            self._tell_kv(engine, now)
        if engine.version != self._versions[engine.number]:
            self._versions[engine.number] = engine.version
            if engine.ends_at != INFINITY:
                self._num_events += 1
                argument = engine.version << 16 | engine.number
                heapq.heappush(self._events, (engine.ends_at, self._num_events, self._on_engine, argument))

    def _on_engine(self, now: float, argument: int) -> None:
        engine = self._engines[argument & 0xFFFF]
        if engine.version != argument >> 16:
            return
        progress = engine.complete(now)
        if self._policy.hears_kv and engine.cache.events:
            self._tell_kv(engine, now)
        self._tell(engine, progress, now)
        if (progress.prefilled or progress.finished) and (self._later_turns or self._first_turns):
            self._round(now, _REFUSALS)
        self._touched[engine] = None

    def _tell(self, engine: Engine, progress: Progress, now: float) -> None:
        for request in progress.prefilled:
            live = self._live[request.trajectory]
            assert live.ask is not None
            if live.first_token_turn != live.turn:
                live.first_token_turn = live.turn
                self._record.first_token_s.append(now - live.asked_at)
            self._timed(self._policy.prefilled, live.ask, engine.number, now)
        for request in progress.finished:
            self._turn_ended(self._live[request.trajectory], request, engine.number, now)
        if not self._is_half and self._record.num_turns * 2 >= self._num_turns:
            self._is_half = True
            if self._disturbance.loses_replica:
                self._at(now, self._on_loss, len(self._engines) // 2)
            if self._disturbance.adds_replica:
                self._at(now, self._on_add, len(self._engines))

    def _on_ready(self, now: float, number: int) -> None:
        self._num_timers -= 1
        live = self._live[number]
        self._prepare(live, now)
        if not self._try(live, now):
            self._wait(live, now)

    def _on_look(self, now: float, _: int) -> None:
        loads = [None if engine.number in self._lost else engine.load() for engine in self._engines]
        self._timed(self._policy.look, loads, now)
        if self._has_ranks:
            for turns in (self._first_turns, self._later_turns):
                turns[:] = [(self._rank(live, now), number, live) for _, number, live in turns]
                heapq.heapify(turns)
        is_idle = not self._num_timers and not self._is_updating
        is_idle = is_idle and not any(engine.has_work for engine in self._engines)
        self._round(now, len(self._live) if is_idle else _REFUSALS_AFTER_LOOK)
        if not is_idle or any(engine.has_work for engine in self._engines):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > _STARVED_S:
            raise RuntimeError(f"{self._num_left} trajectories wait and no turn is placed")
        self._at(now + _LOOK_S, self._on_look, 0)

    def _on_update(self, now: float, _: int) -> None:
        self._is_updating = True
        for engine in self._engines:
            if engine.number not in self._lost:
                engine.pause(now)
                self._touched[engine] = None
        self._record.happenings.append(Happening("update", now, self._record.num_turns / self._num_turns))
        self._at(now + self._disturbance.update_s, self._on_updated, 0)
        assert self._disturbance.update_every_s is not None
        self._at(now + self._disturbance.update_every_s, self._on_update, 0)

    def _on_updated(self, now: float, _: int) -> None:
        engines = [engine for engine in self._engines if engine.number not in self._lost]
        last = max((engine.ends_at for engine in engines if engine.ends_at != INFINITY), default=now)
        if last > now:  # a long step is not over
            self._at(last, self._on_updated, 0)
            return
        self._is_updating = False
        self._epoch += 1
        if self._disturbance.is_flushed:
            self._flush(engines)
        self._timed(self._policy.updated, self._disturbance.is_flushed, now)
        for engine in engines:
            if self._policy.hears_kv and self._disturbance.is_flushed:
                self._timed(self._policy.kv_changed, engine.number, KVChange(is_cleared=True), now)
            engine.resume(now)
            self._touched[engine] = None
        for _, _, live in (*self._first_turns, *self._later_turns):
            if live.began_at is None or self._disturbance.is_flushed:
                self._renew(live)
        self._round(now, _REFUSALS_AFTER_LOOK)

    def _flush(self, engines: list[Engine]) -> None:
        for live in self._live:
            if live.began_at is not None and not live.has_ended:
                self._rename(live)
                if live.is_in_flight:
                    assert live.ask is not None
                    extend_names(live.hashes, live.path, live.num_prompt_tokens // self._shape.block_size)
                    live.ask = replace(live.ask, hashes=live.hashes)
                    self._bound(live)  # it is computed once more, for all that comes after
        paths = {live.trajectory.number: live.path for live in self._live}
        for engine in engines:
            engine.flush(paths)

    def _on_loss(self, now: float, number: int) -> None:
        engine = self._engines[number]
        requests = engine.lose(now)
        self._lost[number] = now
        self._record.happenings.append(Happening("loss", now, self._record.num_turns / self._num_turns))
        self._timed(self._policy.replica_lost, number, now)
        for request in requests:
            live = self._live[request.trajectory]
            live.is_in_flight = False
            live.num_outputs -= request.num_sampled
            live.num_prompt_tokens += request.num_sampled
            if live.num_cached_tokens is None:
                live.num_cached_tokens = request.num_cached_tokens
            self._renew(live, is_retry=True)
            if not self._try(live, now):
                self._wait(live, now)
        self._round(now, _REFUSALS_AFTER_LOOK)

    def _on_add(self, now: float, number: int) -> None:
        engine = Engine(number, self._shape, now, self._policy.hears_kv)
        self._engines.append(engine)
        self._versions.append(-1)
        if self._is_updating:
            engine.pause(now)
        self._record.happenings.append(Happening("add", now, self._record.num_turns / self._num_turns))
        self._timed(self._policy.replica_added, number, now)
        self._round(now, _REFUSALS_AFTER_LOOK)

    # --- turns ---

    def _prepare(self, live: _Live, now: float) -> None:
        """Make the ask of a turn that begins."""
        live.asked_at = now
        live.num_cached_tokens = None
        live.num_outputs = live.trajectory.outputs[live.turn]
        self._renew(live)

    def _renew(self, live: _Live, is_retry: bool = False) -> None:
        """Make the ask anew: under today's names if it never ran."""
        if live.began_at is None and live.epoch != self._epoch:
            self._rename(live)
        extend_names(live.hashes, live.path, live.num_prompt_tokens // self._shape.block_size)
        one = live.trajectory
        prompt = live.num_prompt_tokens
        is_retry = is_retry or (live.ask is not None and live.ask.turn == live.turn and live.ask.is_retry)
        live.ask = TurnAsk(
            one.number, one.group, one.sample, live.turn, prompt, live.hashes, live.replica, is_retry
        )

    def _rename(self, live: _Live) -> None:
        live.epoch = self._epoch
        live.path = self._names.path(live.trajectory, live.epoch, self._shape.block_size)
        live.hashes = array("Q")

    def _wait(self, live: _Live, now: float) -> None:
        if live.ask is None:
            self._prepare(live, now)
        self._num_events += 1
        turns = self._first_turns if live.began_at is None else self._later_turns
        heapq.heappush(turns, (self._rank(live, now), self._num_events, live))

    def _rank(self, live: _Live, now: float) -> float:
        assert live.ask is not None
        return float(self._timed(self._policy.rank, live.ask, now)) if self._has_ranks else 0.0

    def _round(self, now: float, max_refusals: int) -> None:
        """Ask for turns that wait, later turns first."""
        for turns in (self._later_turns, self._first_turns):
            refused = []
            while turns and len(refused) < max_refusals:
                if turns is self._first_turns and self._num_begun >= self._shape.max_live:
                    break
                entry = heapq.heappop(turns)
                if not self._try(entry[2], now):
                    refused.append(entry)
            for entry in refused:
                heapq.heappush(turns, entry)

    def _try(self, live: _Live, now: float) -> bool:
        """Ask the policy for a replica, and send the turn there. Returns False if it has to wait."""
        ask = live.ask
        assert ask is not None
        before = time.thread_time_ns()
        number = self._policy.place(ask, now)
        spent = time.thread_time_ns() - before
        record = self._record
        record.policy_ns += spent
        record.place_ns += spent
        record.num_places += 1
        if number is None:
            return False
        if number in self._lost or not 0 <= number < len(self._engines):
            raise RuntimeError(f"there is no replica {number}")
        if not ask.is_retry:
            record.num_input_tokens += ask.num_prompt_tokens
            record.num_bound_tokens += self._bound(live)
            record.num_moves += live.replica is not None and live.replica != number
        if live.began_at is None:
            live.began_at = now
            self._num_begun += 1
        live.replica = number
        live.is_in_flight = True
        request = Request(ask.trajectory, live.path, live.num_prompt_tokens, live.num_outputs)
        engine = self._engines[number]
        engine.submit(request, now)
        self._touched[engine] = None
        self._timed(self._policy.began, ask, number, now)
        return True

    def _turn_ended(self, live: _Live, request: Request, replica: int, now: float) -> None:
        one, record, ask = live.trajectory, self._record, live.ask
        assert ask is not None
        assert request.num_cached_tokens is not None
        if live.num_cached_tokens is None:  # a turn counts by its first attempt
            live.num_cached_tokens = request.num_cached_tokens
        num_sampled = one.outputs[live.turn]
        num_context = live.num_prompt_tokens + live.num_outputs
        extend_names(live.hashes, live.path, num_context // self._shape.block_size)
        run, first, _ = live.path[-1]
        self._known[run] = max(self._known.get(run, first), (num_context - 1) // self._shape.block_size)
        is_last = live.turn + 1 == one.num_turns
        tool, tool_s = ("", 0.0) if is_last else one.tools[live.turn]
        record.num_turns += 1
        record.num_cached_tokens += live.num_cached_tokens
        record.turn_s.append(now - live.asked_at)
        end = TurnEnd(replica, live.num_cached_tokens, num_sampled, num_context, tool)
        self._timed(self._policy.ended, ask, end, now)
        if is_last:
            self._trajectory_ended(live, now)
            return
        record.cycle_s.append(now + tool_s - live.asked_at)
        live.is_in_flight = False
        live.num_prompt_tokens = num_context + one.observations[live.turn]
        live.turn += 1
        self._num_timers += 1
        self._at(now + tool_s, self._on_ready, one.number)

    def _trajectory_ended(self, live: _Live, now: float) -> None:
        record, group = self._record, live.trajectory.group
        assert live.began_at is not None
        live.has_ended = True
        live.hashes = array("Q")
        self._num_left -= 1
        self._num_begun -= 1
        record.trajectory_s.append(now - live.began_at)
        record.trajectory_ended_at.append(now)
        self._num_siblings[group] -= 1
        if not self._num_siblings[group]:
            record.group_ended_at.append(now)
        self._timed(self._policy.finished, live.trajectory.number, now)

    def _bound(self, live: _Live) -> int:
        """Count tokens of a prompt that one cache without end would have, and put the prompt into it."""
        size = self._shape.block_size
        num_full = live.num_prompt_tokens // size
        num_known, is_chain = 0, True
        for run, first, end in live.path:
            known = self._known.get(run, first)
            if is_chain:
                num_known = min(known, end)
                is_chain = known >= end
            self._known[run] = max(known, min(end, num_full))
        return min(num_known, (live.num_prompt_tokens - 1) // size) * size

    # --- telling ---

    def _timed(self, method: Callable[..., object], *arguments: object) -> object:
        before = time.thread_time_ns()
        answer = method(*arguments)
        self._record.policy_ns += time.thread_time_ns() - before
        return answer

    def _tell_kv(self, engine: Engine, now: float) -> None:
        events, engine.cache.events = engine.cache.events, []
        for event in events:
            names = block_names(event.run, event.first, event.end)
            if isinstance(event, Stored):
                parent = event.parent
                before = None if parent is None else block_names(parent[0], parent[1], parent[1] + 1)[0]
                change = KVChange(stored=names, parent=before)
            else:
                change = KVChange(removed=names)
            self._timed(self._policy.kv_changed, engine.number, change, now)

    def _finish(self, now: float) -> Recording:
        record = self._record
        record.makespan_s = now
        for engine in self._engines:
            record.num_prefilled_tokens += engine.num_prefilled_tokens
            record.num_sampled_tokens += engine.num_sampled_tokens
            record.num_preemptions += engine.num_preemptions
            record.busy_s += engine.busy_s
            record.alive_s += self._lost.get(engine.number, now) - engine.started_at - engine.paused_s
            record.tokens_by_second.append(engine.tokens_by_second)
        return record
