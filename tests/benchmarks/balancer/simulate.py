"""One run: a policy, a fleet of simulated engines, a workload and its disturbances, in virtual time.

The loop is a heap of events with sequence numbers, so a run is a function of its scenario, workload and policy.
Workers have `FleetShape.max_live` trajectory slots; a trajectory takes a slot when its first turn is placed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tests.benchmarks.balancer.engine import INFINITY, Engine, Request
from tests.benchmarks.balancer.kv import END, Path
from tests.benchmarks.balancer.policy import ArmMaker, FleetShape, Policy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Trajectory, Workload

_T = TypeVar("_T")

_LOOK_S = 1.0
_REFUSALS = 4  # consecutive refusals that end a round; more after `look`
_REFUSALS_AFTER_LOOK = 64
_STARVED_S = 600.0  # a fleet that is idle for this long while turns wait is a fault of the policy


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Events that happen to the fleet in addition to its work."""

    update_every_s: float | None = None  # from the start of one update to the start of the next
    first_update_s: float = 150.0  # after the initial burst
    update_s: float = 2.0  # engines are paused
    is_flushed: bool = True
    loses_replica: bool = False  # when half of the turns have ended
    adds_replica: bool = False


@dataclass(slots=True)
class Recording:
    """All results of a run."""

    makespan_s: float = 0.0
    num_turns: int = 0
    num_input_tokens: int = 0  # prompts of all turns
    num_cached_tokens: int = 0  # cached prompt tokens, at a turn's first admission
    num_bound_tokens: int = 0  # cached prompt tokens if the replica of each turn had never evicted
    num_prefilled_tokens: int = 0  # computed, including repetitions
    num_sampled_tokens: int = 0
    num_preemptions: int = 0
    num_moves: int = 0  # turns on another replica than the previous turn, except retries
    num_updates: int = 0
    busy_s: float = 0.0
    alive_s: float = 0.0  # engine time, without pauses
    trajectory_ended_at: list[float] = field(default_factory=list)
    group_ended_at: list[float] = field(default_factory=list)
    tokens_by_second: list[list[float]] = field(default_factory=list)  # sampled, by replica
    policy_ns: int = 0  # CPU time in the policy


@dataclass(slots=True, eq=False)
class Live:
    """A trajectory and its state."""

    trajectory: Trajectory
    num_prompt_tokens: int
    turn: int = 0
    path: Path = ()  # names of its blocks; empty before its first turn is placed
    replica: int | None = None
    is_retry: bool = False  # the replica of this turn was lost
    num_outputs: int = 0  # tokens of this turn that are not sampled yet
    num_cached_tokens: int | None = None  # first attempt of this turn
    is_in_flight: bool = False
    has_ended: bool = False

    @property
    def ask(self) -> TurnAsk:
        one = self.trajectory
        return TurnAsk(one.number, one.group, self.turn, self.num_prompt_tokens, self.replica, self.is_retry)


def run(
    make: ArmMaker, shape: FleetShape, workload: Workload, disturbance: Disturbance, seed: int = 0
) -> Recording:
    """Run a workload to its end. Raises RuntimeError if the policy lets a turn wait forever."""
    return Run(make(shape, workload, seed), shape, workload, disturbance).run()


class _Names:
    """Names of runs of blocks: equal for equal content under equal epochs."""

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


class Run:
    """The state of one run."""

    def __init__(self, policy: Policy, shape: FleetShape, workload: Workload, disturbance: Disturbance) -> None:
        self._policy = policy
        self._shape = shape
        self._disturbance = disturbance
        self._engines = [Engine(number, shape) for number in range(shape.num_replicas)]
        self._lost: dict[int, float] = {}  # replica -> time of its loss
        self._live = [Live(one, one.num_group_tokens, num_outputs=one.outputs[0]) for one in workload.trajectories]
        self._num_siblings: dict[int, int] = {}
        for one in workload.trajectories:
            self._num_siblings[one.group] = self._num_siblings.get(one.group, 0) + 1
        self._num_turns = workload.num_turns
        self._num_left = len(self._live)
        self._num_begun = 0  # trajectories that occupy a worker's slot
        self._events: list[tuple[float, int, Callable[[float, int], None], int]] = []
        self._num_events = 0
        self._versions = [-1] * len(self._engines)
        self._first_turns: list[tuple[float, int, Live]] = []
        self._later_turns: list[tuple[float, int, Live]] = []
        self._epoch = 0
        self._names = _Names()
        self._touched: dict[Engine, None] = {}  # engines that received work during this event
        self._known: dict[tuple[int, int], int] = {}  # replica, run -> end of the blocks ever computed there
        self._num_timers = 0  # running tools, and trajectories with an arrival time
        self._idle_since: float | None = None
        self._is_half = False
        self._is_updating = False
        self._record = Recording()
        self.is_over = False

    def run(self) -> Recording:
        for live in self._live:
            if live.trajectory.arrives_at < INFINITY:
                self._come(live, live.trajectory.arrives_at)
        self._at(0.0, self._on_look, 0)
        if self._disturbance.update_every_s is not None:
            self._at(self._disturbance.first_update_s, self._on_update, 0)
        while self._num_left and not self.is_over:
            now, _, action, argument = heapq.heappop(self._events)
            action(now, argument)
            if self._touched:
                touched, self._touched = self._touched, {}
                for engine in touched:
                    self._schedule(engine, now)
        return self._finish(now)

    def group_ended(self, group: int, now: float) -> None:
        """Called when all trajectories of a group have ended."""

    def arrive(self, group: int, when: float) -> None:
        """Schedule the arrival of a group without an arrival time in the workload (infinity)."""
        for live in self._live:
            if live.trajectory.group == group:
                self._come(live, when)

    # Events

    def _at(self, when: float, action: Callable[[float, int], None], argument: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action, argument))

    def _come(self, live: Live, when: float) -> None:
        self._num_timers += 1
        self._at(when, self._on_arrival, live.trajectory.number)

    def _schedule(self, engine: Engine, now: float) -> None:
        """Start the engine's next step, and put its next event on the heap."""
        engine.plan(now)
        if engine.version != self._versions[engine.number]:
            self._versions[engine.number] = engine.version
            if engine.ends_at != INFINITY:
                self._at(engine.ends_at, self._on_engine, engine.version << 16 | engine.number)

    def _on_engine(self, now: float, argument: int) -> None:
        engine = self._engines[argument & 0xFFFF]
        if engine.version != argument >> 16:
            return
        finished = engine.complete(now)
        for request in finished:
            self._turn_ended(self._live[request.trajectory], request, engine.number, now)
        if not self._is_half and self._record.num_turns * 2 >= self._num_turns:
            self._is_half = True
            if self._disturbance.loses_replica:
                self._at(now, self._on_loss, len(self._engines) // 2)
            if self._disturbance.adds_replica:
                self._at(now, self._on_add, len(self._engines))
        if finished:
            self._round(now, _REFUSALS)
        self._touched[engine] = None

    def _on_arrival(self, now: float, number: int) -> None:
        self._num_timers -= 1
        self._wait(self._live[number], now)
        if now > 0.0:
            self._round(now, _REFUSALS)

    def _on_ready(self, now: float, number: int) -> None:
        self._num_timers -= 1
        live = self._live[number]
        live.num_cached_tokens = None
        live.is_retry = False
        live.num_outputs = live.trajectory.outputs[live.turn]
        if not self._try(live, now):
            self._wait(live, now)

    def _on_look(self, now: float, _: int) -> None:
        loads = [None if engine.number in self._lost else engine.load() for engine in self._engines]
        self._timed(self._policy.look, loads, now)
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
        self._record.num_updates += 1
        self._at(now + self._disturbance.update_s, self._on_updated, 0)
        assert self._disturbance.update_every_s is not None
        self._at(now + self._disturbance.update_every_s, self._on_update, 0)

    def _on_updated(self, now: float, _: int) -> None:
        engines = [engine for engine in self._engines if engine.number not in self._lost]
        last = max((engine.ends_at for engine in engines if engine.ends_at != INFINITY), default=now)
        if last > now:  # a long step is still running
            self._at(last, self._on_updated, 0)
            return
        self._is_updating = False
        self._epoch += 1
        if self._disturbance.is_flushed:
            self._flush(engines)
        self._timed(self._policy.updated, self._disturbance.is_flushed, now)
        for engine in engines:
            engine.resume(now)
            self._touched[engine] = None
        self._round(now, _REFUSALS_AFTER_LOOK)

    def _flush(self, engines: list[Engine]) -> None:
        for live in self._live:
            if live.path and not live.has_ended:
                self._rename(live)
                if live.is_in_flight:
                    self._bound(live)  # it is computed again, for all later turns
        paths = {live.trajectory.number: live.path for live in self._live}
        for engine in engines:
            engine.flush(paths)

    def _on_loss(self, now: float, number: int) -> None:
        engine = self._engines[number]
        requests = engine.lose(now)
        self._lost[number] = now
        self._timed(self._policy.replica_lost, number, now)
        for request in requests:
            live = self._live[request.trajectory]
            live.is_in_flight = False
            live.is_retry = True
            live.num_outputs -= request.num_sampled
            live.num_prompt_tokens += request.num_sampled
            if live.num_cached_tokens is None:
                live.num_cached_tokens = request.num_cached_tokens
            if not self._try(live, now):
                self._wait(live, now)
        self._round(now, _REFUSALS_AFTER_LOOK)

    def _on_add(self, now: float, number: int) -> None:
        engine = Engine(number, self._shape, now)
        self._engines.append(engine)
        self._versions.append(-1)
        if self._is_updating:
            engine.pause(now)
        self._timed(self._policy.replica_added, number, now)
        self._round(now, _REFUSALS_AFTER_LOOK)

    # Turns

    def _rename(self, live: Live) -> None:
        live.path = self._names.path(live.trajectory, self._epoch, self._shape.block_size)

    def _wait(self, live: Live, now: float) -> None:
        self._num_events += 1
        rank = self._timed(self._policy.rank, live.ask, now)
        heapq.heappush(self._later_turns if live.path else self._first_turns, (rank, self._num_events, live))

    def _round(self, now: float, max_refusals: int) -> None:
        """Place waiting turns, later turns first."""
        for turns in (self._later_turns, self._first_turns):
            refused: list[tuple[float, int, Live]] = []
            while turns and len(refused) < max_refusals:
                if turns is self._first_turns and self._num_begun >= self._shape.max_live:
                    break
                entry = heapq.heappop(turns)
                if not self._try(entry[2], now):
                    refused.append(entry)
            for entry in refused:
                heapq.heappush(turns, entry)

    def _try(self, live: Live, now: float) -> bool:
        """Place a turn and send it to its replica. Returns False if it has to wait."""
        ask, record = live.ask, self._record
        number = self._timed(self._policy.place, ask, now)
        if number is None:
            return False
        if number in self._lost or not 0 <= number < len(self._engines):
            raise RuntimeError(f"there is no replica {number}")
        if not live.path:
            self._rename(live)
            self._num_begun += 1
        has_moved = live.replica not in (None, number)
        live.replica = number
        num_bound = self._bound(live)
        if not ask.is_retry:
            record.num_input_tokens += ask.num_prompt_tokens
            record.num_bound_tokens += num_bound
            record.num_moves += has_moved
        live.is_in_flight = True
        request = Request(ask.trajectory, live.path, live.num_prompt_tokens, live.num_outputs)
        engine = self._engines[number]
        engine.submit(request, now)
        self._touched[engine] = None
        self._timed(self._policy.began, ask, number, now)
        return True

    def _turn_ended(self, live: Live, request: Request, replica: int, now: float) -> None:
        one, record = live.trajectory, self._record
        assert request.num_cached_tokens is not None
        if live.num_cached_tokens is None:  # a turn counts by its first attempt
            live.num_cached_tokens = request.num_cached_tokens
        num_context = live.num_prompt_tokens + live.num_outputs
        run, first, _ = live.path[-1]
        known = self._known.get((replica, run), first)
        self._known[replica, run] = max(known, (num_context - 1) // self._shape.block_size)
        record.num_turns += 1
        record.num_cached_tokens += live.num_cached_tokens
        end = TurnEnd(replica, live.num_cached_tokens, one.outputs[live.turn], num_context)
        self._timed(self._policy.ended, live.ask, end, now)
        live.is_in_flight = False
        if live.turn + 1 == one.num_turns:
            self._trajectory_ended(live, now)
            return
        tool_s = one.tools[live.turn]
        live.num_prompt_tokens = num_context + one.observations[live.turn]
        live.turn += 1
        self._num_timers += 1
        self._at(now + tool_s, self._on_ready, one.number)

    def _trajectory_ended(self, live: Live, now: float) -> None:
        record, group = self._record, live.trajectory.group
        live.has_ended = True
        self._num_left -= 1
        self._num_begun -= 1
        record.trajectory_ended_at.append(now)
        self._num_siblings[group] -= 1
        if not self._num_siblings[group]:
            record.group_ended_at.append(now)
            self.group_ended(group, now)
        self._timed(self._policy.finished, live.trajectory.number, now)

    def _bound(self, live: Live) -> int:
        """Count the prompt tokens that its replica would have without evictions, and record that it has them."""
        size, replica = self._shape.block_size, live.replica
        assert replica is not None
        num_full = live.num_prompt_tokens // size
        num_known, is_chain = 0, True
        for run, first, end in live.path:
            known = self._known.get((replica, run), first)
            if is_chain:
                num_known = min(known, end)
                is_chain = known >= end
            self._known[replica, run] = max(known, min(end, num_full))
        return min(num_known, (live.num_prompt_tokens - 1) // size) * size

    def _timed(self, method: Callable[..., _T], *arguments: object) -> _T:
        before = time.thread_time_ns()
        answer = method(*arguments)
        self._record.policy_ns += time.thread_time_ns() - before
        return answer

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
