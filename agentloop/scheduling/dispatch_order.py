"""The order in which queued samples are dispatched: by priority, user, flow and group.

A flow is a queue with one set of limits: an owner's rollouts with equal terms, or those of one run; a rollout with
its own limit is a flow alone. Higher priorities go first. Within a priority, stride scheduling
(`concurrency/strides.py`) chooses among users, whose sessions and calls count too, and then among a user's flows.

The unit is a sample, so the samples of a group may run on different workers. Invariants: each flow is in its
user's heap, held back by `max_running` or its budget, or empty. A step costs O(users + log flows + log groups),
plus the groups that are skipped. The coordinator has one `UserTurns` for samples, sessions and direct calls.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from agentloop.api.coordinator import RolloutTerms, group_key
from agentloop.api.owners import NO_LIMITS, UserLimits, UsersNews, UserTable, UserUsage
from agentloop.concurrency.clock import Clock, RealClock
from agentloop.concurrency.strides import Strides
from agentloop.scheduling.samples import LiveRollout, NoPlace, Sample
from agentloop.scheduling.staleness_budget import FleetVersions, StalenessBudget
from agentloop.types import Lease

_WINDOW_S = 60.0
_SLOT_S = 5.0  # tokens are counted per slot of this length
_REPORT_COUNTS_S = 15.0  # a process without a report for this long is gone


class UserTurns:
    """The table of users, their scheduling order, and their usage over all processes."""

    def __init__(self, read: Callable[[], UserTable] = UserTable, clock: Clock | None = None) -> None:
        """Load the table. Re-raises errors of `read`."""
        self._read = read
        self._clock = clock or RealClock()
        self._strides = Strides(lambda user: self.limits_of(user).share)
        self._tokens: dict[str, deque[tuple[float, int]]] = {}  # user -> start and tokens of each slot
        # Process -> time and content of its last report
        self._reports: dict[str, tuple[float, tuple[UserUsage, ...]]] = {}
        self.read_again()

    def read_again(self) -> None:
        """Load the table again. If `read` raises, the error is raised and the old table stays."""
        self.table = self._read()
        self.generation = secrets.randbits(62)

    def name_of(self, owner: str) -> str:
        """Return a user's current name; an unknown owner's name is returned unchanged."""
        return self.table.names.get(owner, owner)

    def limits_of(self, user: str) -> UserLimits:
        return self.table.limits.get(user, NO_LIMITS)

    def pass_of(self, user: str) -> float:
        """Return a user's pass value. The waiting user with the lowest value is next."""
        return self._strides.pass_of(user)

    def took(self, user: str) -> None:
        """Record a slot that was granted to a user."""
        self._strides.took(user)

    # Usage

    def count_tokens(self, user: str, num_tokens: int) -> None:
        """Count the tokens of a turn, in its prompt and its answer."""
        slots, now = self._tokens.setdefault(user, deque()), self._clock.now()
        if not slots or now - slots[-1][0] >= _SLOT_S:
            slots.append((now, 0))
        slots[-1] = slots[-1][0], slots[-1][1] + num_tokens

    def tokens_of(self, user: str) -> int:
        """Return a user's tokens in the last minute."""
        slots = self._tokens.get(user, deque())
        while slots and self._clock.now() - slots[0][0] >= _WINDOW_S:
            slots.popleft()
        return sum(num_tokens for _, num_tokens in slots)

    def has_tokens(self, user: str) -> bool:
        """Return True if a user is below its limit of tokens per minute."""
        most = self.limits_of(user).tokens_per_minute
        return most is None or self.tokens_of(user) < most

    def report(self, process_id: str, usage: tuple[UserUsage, ...]) -> UsersNews:
        """Store the usage report of a process. Returns the usage over all processes."""
        self._reports[process_id] = self._clock.now(), usage
        return UsersNews(self.generation, self.usage(Counter(), Counter(), Counter()))

    def usage(self, running: Counter[str], queued: Counter[str], waiting: Counter[str]) -> tuple[UserUsage, ...]:
        """Return the usage of each user.

        `running` and `queued` count its trajectories, `waiting` its waiting calls.
        """
        since = self._clock.now() - _REPORT_COUNTS_S
        self._reports = {name: one for name, one in self._reports.items() if one[0] >= since}
        calls, sessions = Counter[str](), Counter[str]()
        for _, reported in self._reports.values():
            for one in reported:
                calls[self.name_of(one.name)] += one.open_calls
                sessions[self.name_of(one.name)] += one.sessions
        names = {*self.table.limits, *calls, *sessions, *running, *queued, *waiting, *self._tokens} - {""}
        return tuple(
            UserUsage(
                name,
                calls[name],
                sessions[name],
                running[name],
                queued[name],
                self.tokens_of(name),
                waiting[name],
            )
            for name in sorted(names)
        )


_MAX_ASIDE = 16  # groups of a flow that may be skipped while they wait for something only they need
_MAX_OLD_ENTRIES = 64  # obsolete entries of a heap, in addition to four per group, before it is rebuilt

FlowKey: TypeAlias = tuple[RolloutTerms, str, bool]
_UserTurn: TypeAlias = tuple[int, str]  # minus the priority, and the user

TryToPlace: TypeAlias = Callable[[Sample], Lease | NoPlace]
"""Grants a lease to the next sample, or returns the reason why it gets none now."""

Placed: TypeAlias = tuple[Sample, Lease]


@dataclass(slots=True, eq=False)
class _WaitingGroup:
    """The waiting samples of a group that have never started."""

    number: int  # in order of arrival
    samples: OrderedDict[str, Sample]


class _FlowLine:
    """The queue of one flow.

    The heap has one entry per change of a partially started group. Obsolete entries are dropped when they reach
    the top.
    """

    def __init__(self) -> None:
        self._again: OrderedDict[str, Sample] = OrderedDict()
        self._groups: OrderedDict[str, _WaitingGroup] = OrderedDict()  # oldest first, without empty groups
        self._begun: list[tuple[int, int, _WaitingGroup]] = []  # number of waiting samples, group number
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._groups)

    def __iter__(self) -> Iterator[Sample]:
        yield from self._again.values()
        for group in self._groups.values():
            yield from group.samples.values()

    def add_group(self, samples: Sequence[Sample]) -> None:
        """Queue samples of one group, which has no samples here yet."""
        self._num_groups += 1
        first, by_name = samples[0], OrderedDict((sample.assignment_id, sample) for sample in samples)
        group = _WaitingGroup(self._num_groups, by_name)
        self._groups[group_key(first.assignment_id)] = group
        if len(by_name) < first.group.num_samples:
            heapq.heappush(self._begun, (len(by_name), group.number, group))

    def add_again(self, sample: Sample) -> None:
        """Queue a sample that was dispatched before."""
        self._again[sample.assignment_id] = sample

    def remove(self, sample: Sample) -> None:
        """Remove a sample if it is queued here."""
        if self._again.pop(sample.assignment_id, None) is not None:
            return
        key = group_key(sample.assignment_id)
        group = self._groups.get(key)
        if group is None or group.samples.pop(sample.assignment_id, None) is None:
            return
        if group.samples:
            heapq.heappush(self._begun, (len(group.samples), group.number, group))
        else:
            del self._groups[key]
        if len(self._begun) > 4 * len(self._groups) + _MAX_OLD_ENTRIES:
            self._begun = [entry for entry in self._begun if entry[0] == len(entry[2].samples)]
            heapq.heapify(self._begun)

    def heads(self, num: int) -> list[Sample]:
        """Return the next sample, or with `num` above 1 the first samples of the next groups."""
        # Samples that were dispatched before go first, then partially started groups with the fewest samples left,
        # because a trainer can use only complete groups. The other groups follow in order of arrival.
        again = list(islice(self._again.values(), num))
        groups = dict.fromkeys([*self._top_begun(num), *islice(self._groups.values(), num)])
        return (again + [next(iter(group.samples.values())) for group in groups])[:num]

    def _top_begun(self, num: int) -> list[_WaitingGroup]:
        entries: list[tuple[int, int, _WaitingGroup]] = []
        while self._begun and len(entries) < num:
            entry = heapq.heappop(self._begun)
            if entry[0] == len(entry[2].samples):
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._begun, entry)
        return [group for _, _, group in entries]


@dataclass(slots=True, eq=False)
class _Flow:
    terms: RolloutTerms
    budget: StalenessBudget | None
    number: int  # in order of creation; among equals the oldest goes first
    line: _FlowLine
    num_rollouts: int = 0
    num_running: int = 0
    pass_value: float = 0.0
    is_offered: bool = False  # True if it is in the heap

    def admits(self, versions: FleetVersions) -> bool:
        if self.terms.max_running is not None and self.num_running >= self.terms.max_running:
            return False
        return self.budget is None or self.budget.room(versions) > 0


class DispatchOrder:
    """The queued samples in their flows. The caller of `next` also calls `begun`, and `ended` later."""

    def __init__(self, users: UserTurns | None = None) -> None:
        self._users = users or UserTurns()
        self._flows: dict[FlowKey, _Flow] = {}
        self._heaps: dict[_UserTurn, list[tuple[float, int, _Flow]]] = {}
        self._running: Counter[str] = Counter()  # user -> running samples
        # Budget -> flows that it holds back
        self._held: defaultdict[StalenessBudget, set[_Flow]] = defaultdict(set)
        self._passes: dict[_UserTurn, float] = {}  # the pass value of the flow that was served last
        self._num_flows = 0

    def join(self, rollout: LiveRollout) -> None:
        """Add a rollout to its flow, and create the flow if needed. Paired with `leave`."""
        key = _key(rollout)
        flow = self._flows.get(key)
        if flow is None:
            self._num_flows += 1
            self._flows[key] = flow = _Flow(rollout.terms, rollout.budget, self._num_flows, _FlowLine())
        flow.num_rollouts += 1

    def leave(self, rollout: LiveRollout) -> None:
        """Remove a rollout without queued or running samples. The last one removes its flow."""
        flow = self._flows[_key(rollout)]
        flow.num_rollouts -= 1
        if flow.num_rollouts == 0:
            del self._flows[_key(rollout)]
            if flow.budget is not None:
                self._release(flow.budget, flow)

    def add_group(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of an accepted group, or the remaining ones after a restart."""
        first = samples[0]
        flow = self._flows[_key(first.rollout)]
        flow.line.add_group(samples)
        self._offer(flow)

    def add_again(self, sample: Sample) -> None:
        """Queue a sample that was dispatched before, ahead of its flow's new samples."""
        flow = self._flows[_key(sample.rollout)]
        flow.line.add_again(sample)
        self._offer(flow)

    def discard(self, sample: Sample) -> None:
        """Remove a sample if it is queued here."""
        self._flows[_key(sample.rollout)].line.remove(sample)

    def next(self, versions: FleetVersions, try_to_place: TryToPlace, later: set[str]) -> Placed | None:
        """Remove and return the next sample that its limits admit and `try_to_place` grants a lease; None if there
        is no such sample.

        Groups that got `NoPlace.LATER` are added to `later`, and groups in it are skipped.
        """
        for turn in sorted(self._heaps, key=lambda turn: (turn[0], self._users.pass_of(turn[1]))):
            if not self._has_place(turn[1]):
                continue
            found, is_full = self._next_of(turn, versions, try_to_place, later)
            if found is not None:
                self._users.took(turn[1])
            if found is not None or is_full:
                return found
        return None

    def _next_of(
        self, turn: _UserTurn, versions: FleetVersions, try_to_place: TryToPlace, later: set[str]
    ) -> tuple[Placed | None, bool]:
        """Remove and return a user's next sample. The flag is True if no sample of any user may start."""
        heap, passed = self._heaps[turn], list[tuple[float, int, _Flow]]()
        found, is_full = None, False
        while heap and found is None and not is_full:
            entry = pass_value, number, flow = heapq.heappop(heap)
            if not flow.line:
                flow.is_offered = False
                continue
            if not flow.admits(versions):
                flow.is_offered = False
                if flow.budget is not None:
                    self._held[flow.budget].add(flow)
                continue
            found, is_full = _place_first(flow.line, try_to_place, later)
            if found is not None:
                self._passes[turn] = pass_value
                flow.pass_value = pass_value + 1 / flow.terms.share
                entry = flow.pass_value, number, flow
            passed.append(entry)
        for entry in passed:
            heapq.heappush(heap, entry)
        if not heap:
            del self._heaps[turn]
        return found, is_full

    def _has_place(self, user: str) -> bool:
        most = self._users.limits_of(user).live_trajectories
        return (most is None or self._running[user] < most) and self._users.has_tokens(user)

    def admits(self, sample: Sample, versions: FleetVersions) -> bool:
        """Return True if a sample's limits admit it now, regardless of its position."""
        flow = self._flows[_key(sample.rollout)]
        return flow.admits(versions) and self._has_place(self._users.name_of(flow.terms.owner))

    def begun(self, sample: Sample) -> None:
        """Count a sample as running."""
        self._flows[_key(sample.rollout)].num_running += 1
        self._running[self._users.name_of(sample.rollout.terms.owner)] += 1

    def ended(self, sample: Sample) -> None:
        """Stop counting a sample as running, and requeue the flows that its slot or budget held back."""
        flow = self._flows[_key(sample.rollout)]
        flow.num_running -= 1
        self._running[self._users.name_of(flow.terms.owner)] -= 1
        self._offer(flow)
        if flow.budget is not None:
            self._release(flow.budget)

    def versions_changed(self) -> None:
        """Requeue the flows that staleness limits held back."""
        for budget in list(self._held):
            self._release(budget)

    def __iter__(self) -> Iterator[Sample]:
        """Yield all queued samples, in no particular order."""
        for flow in self._flows.values():
            yield from flow.line

    def _release(self, budget: StalenessBudget, without: _Flow | None = None) -> None:
        for flow in self._held.pop(budget, set()):
            if flow is not without:
                self._offer(flow)

    def _offer(self, flow: _Flow) -> None:
        if flow.is_offered or not flow.line:
            return
        turn = -flow.terms.priority, self._users.name_of(flow.terms.owner)
        flow.is_offered = True
        flow.pass_value = max(flow.pass_value, self._passes.get(turn, 0.0))
        heapq.heappush(self._heaps.setdefault(turn, []), (flow.pass_value, flow.number, flow))


def _place_first(line: _FlowLine, try_to_place: TryToPlace, later: set[str]) -> tuple[Placed | None, bool]:
    """Remove and return the first sample of a queue that gets a lease. The flag is True if no sample may start."""
    for num in (1, _MAX_ASIDE):
        for sample in line.heads(num):
            key = group_key(sample.assignment_id)
            lease = NoPlace.LATER if key in later else try_to_place(sample)
            if not isinstance(lease, NoPlace):
                line.remove(sample)
                return (sample, lease), False
            # Without free capacity nothing may overtake this sample, or long prompts would wait forever.
            if lease is NoPlace.FULL:
                return None, True
            # The group keeps its position; up to _MAX_ASIDE such groups may be overtaken.
            later.add(key)
    return None, False


def _key(rollout: LiveRollout) -> FlowKey:
    terms, budget = rollout.terms, rollout.budget
    if budget is not None:
        return terms, budget.limit.run_id or rollout.rollout_id, True
    is_alone = not terms.run_id and terms.max_running is not None
    return terms, rollout.rollout_id if is_alone else "", False
