"""The order in which queued samples are dispatched: by priority, by users and shares, by groups within a flow.
flow.

A flow is served as one: the rollouts of an owner on equal terms, those of one run if they name a run, and a rollout
alone if it has a limit. A higher priority goes first. Within a priority users take turns by stride scheduling
(`concurrency/strides.py`), together with their sessions and calls, and a user's flows do the same.

Within a flow, samples that a worker had before go first, then groups of which a sample has begun, the one with the
fewest samples left first, because a trainer can use only whole groups. The other groups follow in their order.

The unit is a sample: samples of one group may run on different workers, so no group waits for a worker with room
for all of it. If replicas have no room (`NoPlace.FULL`), nothing overtakes. A group that waits for a reason other
than room (`NoPlace.LATER`) keeps its place, and up to `_MAX_ASIDE` such groups of a flow are overtaken.

Invariants: a flow is in its user's heap, or held back (`max_running` or its budget is reached), or empty. A step
costs O(users + log flows + log groups), plus the groups that are overtaken. `UserTurns` is one object per
coordinator, which samples, sessions and direct calls share.
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
_SLOT_S = 5.0  # tokens of one slot are counted together
_REPORT_COUNTS_S = 15.0  # without another one, a process is gone


class UserTurns:
    """The table of users, the order of their turns, and their use over all processes."""

    def __init__(self, read: Callable[[], UserTable] = UserTable, clock: Clock | None = None) -> None:
        """Raises what `read` does."""
        self._read = read
        self._clock = clock or RealClock()
        self._strides = Strides(lambda user: self.limits_of(user).share)
        self._tokens: dict[str, deque[tuple[float, int]]] = {}  # by user: a slot's beginning, and its tokens
        self._reports: dict[str, tuple[float, tuple[UserUsage, ...]]] = {}  # by process: time and contents
        self.read_again()

    def read_again(self) -> None:
        """Read the table again. If `read` raises, its error is raised and the old table stays."""
        self.table = self._read()
        self.generation = secrets.randbits(62)

    def name_of(self, owner: str) -> str:
        """Return a user's present name; an unknown owner's own name."""
        return self.table.names.get(owner, owner)

    def limits_of(self, user: str) -> UserLimits:
        return self.table.limits.get(user, NO_LIMITS)

    def pass_of(self, user: str) -> float:
        """Return a user's pass: the least of those that wait is next."""
        return self._strides.pass_of(user)

    def took(self, user: str) -> None:
        """Record a place that a user was given."""
        self._strides.took(user)

    # Use

    def count_tokens(self, user: str, num_tokens: int) -> None:
        """Count a turn's tokens, of its prompt and its answer."""
        slots, now = self._tokens.setdefault(user, deque()), self._clock.now()
        if not slots or now - slots[-1][0] >= _SLOT_S:
            slots.append((now, 0))
        slots[-1] = slots[-1][0], slots[-1][1] + num_tokens

    def tokens_of(self, user: str) -> int:
        """Return a user's tokens of the last minute."""
        slots = self._tokens.get(user, deque())
        while slots and self._clock.now() - slots[0][0] >= _WINDOW_S:
            slots.popleft()
        return sum(num_tokens for _, num_tokens in slots)

    def has_tokens(self, user: str) -> bool:
        """Return True if a user has tokens left in this minute."""
        most = self.limits_of(user).tokens_per_minute
        return most is None or self.tokens_of(user) < most

    def report(self, process_id: str, usage: tuple[UserUsage, ...]) -> UsersNews:
        """Take the use of one process. Returns the use over all processes."""
        self._reports[process_id] = self._clock.now(), usage
        return UsersNews(self.generation, self.usage(Counter(), Counter(), Counter()))

    def usage(self, running: Counter[str], queued: Counter[str], waiting: Counter[str]) -> tuple[UserUsage, ...]:
        """Return the use of each user; `running` and `queued` are its trajectories, `waiting` its calls."""
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


_MAX_ASIDE = 16  # groups of a flow that are passed by while they wait for their own sake
_MAX_OLD_ENTRIES = 64  # of a line's heaps, beside four for each group, before they are made anew

FlowKey: TypeAlias = tuple[RolloutTerms, str, bool]
_UserTurn: TypeAlias = tuple[int, str]  # minus the priority, and the user

TryToPlace: TypeAlias = Callable[[Sample], Lease | NoPlace]
"""Grant a lease to the sample whose turn it is, or say why there is none now."""

Placed: TypeAlias = tuple[Sample, Lease]


@dataclass(slots=True, eq=False)
class _WaitingGroup:
    """The samples of one group that wait and were never begun."""

    number: int  # of its arrival
    samples: OrderedDict[str, Sample]


class _FlowLine:
    """The samples that wait in one flow.

    The heap has an entry for each change of a group of which a sample has begun; an entry that is not the group's
    present one is thrown away at the top.
    """

    def __init__(self) -> None:
        self._again: OrderedDict[str, Sample] = OrderedDict()
        self._groups: OrderedDict[str, _WaitingGroup] = OrderedDict()  # the oldest first; none without samples
        self._begun: list[tuple[int, int, _WaitingGroup]] = []  # samples left, number
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._groups)

    def __iter__(self) -> Iterator[Sample]:
        yield from self._again.values()
        for group in self._groups.values():
            yield from group.samples.values()

    def add_group(self, samples: Sequence[Sample]) -> None:
        """Queue samples of one group, none of which waits here."""
        self._num_groups += 1
        first, by_name = samples[0], OrderedDict((sample.assignment_id, sample) for sample in samples)
        group = _WaitingGroup(self._num_groups, by_name)
        self._groups[group_key(first.assignment_id)] = group
        if len(by_name) < first.group.num_samples:
            heapq.heappush(self._begun, (len(by_name), group.number, group))

    def add_again(self, sample: Sample) -> None:
        """Queue a sample that a worker had before."""
        self._again[sample.assignment_id] = sample

    def remove(self, sample: Sample) -> None:
        """Take a sample out, if it is here."""
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
        """Return the next sample, and with `num` above 1 those of the groups after it; one a group."""
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
    number: int  # of its creation: among equals the older goes first
    line: _FlowLine
    num_rollouts: int = 0
    num_running: int = 0
    pass_value: float = 0.0
    is_offered: bool = False  # it is in the heap

    def admits(self, versions: FleetVersions) -> bool:
        if self.terms.max_running is not None and self.num_running >= self.terms.max_running:
            return False
        return self.budget is None or self.budget.room(versions) > 0


class DispatchOrder:
    """Queued samples in their flows. After a sample is taken out, its caller calls `begun`, and later `ended`."""

    def __init__(self, users: UserTurns | None = None) -> None:
        self._users = users or UserTurns()
        self._flows: dict[FlowKey, _Flow] = {}
        self._heaps: dict[_UserTurn, list[tuple[float, int, _Flow]]] = {}
        self._running: Counter[str] = Counter()  # samples of each user
        self._held: defaultdict[StalenessBudget, set[_Flow]] = defaultdict(set)  # by budget: flows without room
        self._passes: dict[_UserTurn, float] = {}  # the pass of the flow that was served last
        self._num_flows = 0

    def join(self, rollout: LiveRollout) -> None:
        """Add a rollout to its flow, which is made for the first. `leave` follows."""
        key = _key(rollout)
        flow = self._flows.get(key)
        if flow is None:
            self._num_flows += 1
            self._flows[key] = flow = _Flow(rollout.terms, rollout.budget, self._num_flows, _FlowLine())
        flow.num_rollouts += 1

    def leave(self, rollout: LiveRollout) -> None:
        """Remove a rollout of which nothing is queued or runs, and its flow with the last one."""
        flow = self._flows[_key(rollout)]
        flow.num_rollouts -= 1
        if flow.num_rollouts == 0:
            del self._flows[_key(rollout)]
            if flow.budget is not None:
                self._release(flow.budget, flow)

    def add_group(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of a group that was accepted, or what is left of it after a restart."""
        first = samples[0]
        flow = self._flows[_key(first.rollout)]
        flow.line.add_group(samples)
        self._offer(flow)

    def add_again(self, sample: Sample) -> None:
        """Queue a sample that a worker had before: ahead of its flow, behind earlier ones of this kind."""
        flow = self._flows[_key(sample.rollout)]
        flow.line.add_again(sample)
        self._offer(flow)

    def discard(self, sample: Sample) -> None:
        """Take a sample out of its turn, if it is queued here."""
        self._flows[_key(sample.rollout)].line.remove(sample)

    def next(self, versions: FleetVersions, try_to_place: TryToPlace, later: set[str]) -> Placed | None:
        """Take out the next sample that its limits admit and `try_to_place` grants a lease; None if there is none.

        The keys of groups that got `NoPlace.LATER` are added to `later`; groups in it are passed by.
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
        """Take out the next sample of a user; the flag: nothing at all may begin."""
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
        """Tell if a sample's limits would let it run now, whatever its turn."""
        flow = self._flows[_key(sample.rollout)]
        return flow.admits(versions) and self._has_place(self._users.name_of(flow.terms.owner))

    def begun(self, sample: Sample) -> None:
        """Count a sample as running."""
        self._flows[_key(sample.rollout)].num_running += 1
        self._running[self._users.name_of(sample.rollout.terms.owner)] += 1

    def ended(self, sample: Sample) -> None:
        """Count a sample as running no more, and offer again the flows that its place or budget held back."""
        flow = self._flows[_key(sample.rollout)]
        flow.num_running -= 1
        self._running[self._users.name_of(flow.terms.owner)] -= 1
        self._offer(flow)
        if flow.budget is not None:
            self._release(flow.budget)

    def versions_changed(self) -> None:
        """Offer again the flows that staleness limits held back."""
        for budget in list(self._held):
            self._release(budget)

    def __iter__(self) -> Iterator[Sample]:
        """Yield everything queued, in no order."""
        for flow in self._flows.values():
            yield from flow.line

    # --- inside ---

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
    """Take out the first sample of a line that gets a lease; the flag: nothing at all may begin."""
    for num in (1, _MAX_ASIDE):
        for sample in line.heads(num):
            key = group_key(sample.assignment_id)
            lease = NoPlace.LATER if key in later else try_to_place(sample)
            if not isinstance(lease, NoPlace):
                line.remove(sample)
                return (sample, lease), False
            if lease is NoPlace.FULL:
                return None, True
            later.add(key)
    return None, False


def _key(rollout: LiveRollout) -> FlowKey:
    terms, budget = rollout.terms, rollout.budget
    if budget is not None:
        return terms, budget.limit.run_id or rollout.rollout_id, True
    is_alone = not terms.run_id and terms.max_running is not None
    return terms, rollout.rollout_id if is_alone else "", False
