"""Leases of slots on replicas, and the process reports that renew them.

A lease belongs to one holder (a trajectory or session) and to the process that calls engines with it. Any report
of a process renews all its leases. A moved holder gets a new lease; reports with the old one count until its
process uses the new one.

Only the Balancer changes the table. It is synchronous; callers pass the time. Invariants: a holder has at most one
lease; lease ids are never reused, also after a coordinator restart; every index has exactly the current entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from uuid import uuid4

from agentloop.api.coordinator import LeaseReport, Prefix
from agentloop.errors import InvariantBroken
from agentloop.fleet.registry import ReplicaRecord
from agentloop.types import Lease
from agentloop.values.capabilities import NO_NEEDS, Needs


@dataclass(slots=True)
class _Process:
    seen_at: float
    sequence: int = 0  # number of the last report that counted
    needs_full_report: bool = True


class ReportDesk:
    """Deduplicates the lease reports of processes by their sequence numbers.

    A process sends one report at a time, and repeats it until it receives a response.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._processes: dict[str, _Process] = {}

    def is_news(self, report: LeaseReport, now: float) -> bool:
        """Return True if a report is new, and record its number."""
        process = self._processes.setdefault(report.process_id, _Process(now))
        process.seen_at = now
        if report.sequence <= process.sequence:
            return False
        # After a lost report, or from an unknown process, only a report with all leases restores the table.
        if report.leases is None and (process.needs_full_report or report.sequence != process.sequence + 1):
            process.needs_full_report = True
            return False
        process.sequence, process.needs_full_report = report.sequence, False
        return True

    def needs_full_report(self, process_id: str) -> bool:
        """Return True if the process's next report must have all its leases."""
        return process_id in self._processes and self._processes[process_id].needs_full_report

    def expire(self, now: float) -> None:
        """Remove the processes that are silent; their leases have ended."""
        silent = [name for name, process in self._processes.items() if now - process.seen_at >= self._ttl_s]
        for name in silent:
            del self._processes[name]


@dataclass(frozen=True, slots=True)
class Demand:
    """A request for a lease, for the trajectory or session `holder_id`."""

    holder_id: str
    process_id: str = ""  # the worker or ingress that uses the lease; empty: silence does not end it
    group_id: str = ""  # shared by the samples of a group; empty: no group
    num_prompt_tokens: int = 0
    group_size: int = 1
    is_session: bool = False
    expires_at: float | None = None  # when it ends unless its process reports it before
    needs: Needs = NO_NEEDS  # the known needs; an earlier turn's needs hold for later turns
    prefixes: tuple[Prefix, ...] = ()  # the prompt's prefixes, longest first

    def shared_prefixes(self, num_prompt_tokens: float) -> tuple[tuple[str, float], ...]:
        """Return the key and length of each prefix that its prompt may share, longest first.

        Engines share KV only within one adapter. The samples of a group share their whole prompt. An affinity
        may be longer than the prompt.
        """
        is_in_group = self.group_size > 1 and self.group_id
        whole = ((self.group_id, num_prompt_tokens),) if is_in_group else ()
        found = (*whole, *self.prefixes)
        return tuple((f"{self.needs.adapter} {key}", float(num_tokens)) for key, num_tokens in found)

    def shared_parts(self, num_prompt_tokens: float) -> Iterator[tuple[str, float]]:
        """Yield the key and length of each part of the prompt that an engine stores once, in prompt order."""
        begin = 0.0
        for key, length in reversed(self.shared_prefixes(num_prompt_tokens)):
            end = min(length, num_prompt_tokens)
            yield key, end - begin
            begin = end


@dataclass(slots=True, eq=False)
class Holding:
    """A lease entry: the lease of one holder, and the KV accounting of its trajectory."""

    demand: Demand
    lease: Lease
    prompt_tokens: float = 0.0  # prompt of its first turn; estimated until that has ended
    context_tokens: float = 0.0  # context at the end of its last turn
    counted_tokens: float = 0.0  # its tokens in the replica's account
    counted_parts: tuple[str, ...] = ()  # keys of the prompt parts that are counted once for all holders
    num_turns: int = 0  # finished turns
    idle_since: float | None = None  # end of its last turn, while its tools run
    is_counted: bool = True  # False after its replica was removed
    is_warm: bool = False  # its last turn ran on its lease's replica, and no flush followed
    is_flushed: bool = False  # an update flushed its KV, so the next turn computes it again
    is_kept: bool = True  # its KV reservation counts
    must_ask: bool = False  # its process must ask before the next turn
    earlier: tuple[str, ...] = ()  # earlier lease ids that its process may still use

    @property
    def num_tokens(self) -> float:
        """The known tokens of its KV."""
        return max(self.context_tokens, self.prompt_tokens)


class LeaseTable:
    """All lease entries, with indexes by holder, lease, process and replica."""

    def __init__(self) -> None:
        self._by_holder: dict[str, Holding] = {}
        self._by_lease: dict[str, Holding] = {}
        self._by_process: dict[str, set[Holding]] = {}
        self._by_replica: dict[str, set[Holding]] = {}
        self._ordered: dict[str, set[Holding]] = {}  # process -> entries with orders that it has not followed
        self._ending: set[Holding] = set()  # entries with `expires_at`
        self._seen_at: dict[str, float] = {}  # process with leases -> time of its last report
        self._num_granted = 0
        self._prefix = uuid4().hex[:12]

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._by_holder.values())

    def __len__(self) -> int:
        return len(self._by_holder)

    @property
    def holders(self) -> Iterable[str]:
        return self._by_holder

    def of_holder(self, holder_id: str) -> Holding | None:
        """Return the entry of a trajectory or session."""
        return self._by_holder.get(holder_id)

    def of_lease(self, lease_id: str) -> Holding | None:
        """Return the entry with this lease id, which may also be one of its `earlier` ids."""
        return self._by_lease.get(lease_id)

    def of_process(self, process_id: str) -> tuple[Holding, ...]:
        """Return the entries of a process."""
        return tuple(self._by_process.get(process_id, ()))

    def on_replica(self, replica_id: str) -> tuple[Holding, ...]:
        """Return the entries on a replica, also those that do not count."""
        return tuple(self._by_replica.get(replica_id, ()))

    def grant(self, replica: ReplicaRecord) -> Lease:
        """Return a lease with a new id on a replica."""
        self._num_granted += 1
        info = replica.registration.info
        lease_id = f"{self._prefix}-{self._num_granted}"
        return Lease(lease_id, replica.replica_id, replica.url, info.name, info.can, info.quantization)

    def hold(self, holding: Holding, now: float) -> None:
        """Add an entry for a holder without one."""
        self._by_holder[holding.demand.holder_id] = holding
        self._by_lease[holding.lease.lease_id] = holding
        self._by_replica.setdefault(holding.lease.replica_id, set()).add(holding)
        self._join_process(holding, now)

    def drop(self, holding: Holding) -> None:
        """Remove an entry."""
        self.obeyed(holding)
        del self._by_holder[holding.demand.holder_id]
        del self._by_lease[holding.lease.lease_id]
        self._leave_replica(holding)
        self._leave_process(holding)

    def ask_again(self, holding: Holding, demand: Demand, now: float) -> None:
        """Update the demand of a holder that asked again, perhaps from another process or with a later end."""
        self.obeyed(holding)
        self._leave_process(holding)
        holding.demand = demand
        self._join_process(holding, now)

    def change(self, holding: Holding, lease: Lease, *, is_told: bool) -> None:
        """Replace a holder's lease. Without `is_told` its process receives an order (`orders`)."""
        if is_told:
            self.obeyed(holding)
            del self._by_lease[holding.lease.lease_id]
        else:
            holding.earlier = (*holding.earlier, holding.lease.lease_id)
        self._leave_replica(holding)
        holding.lease, holding.must_ask = lease, False
        self._by_lease[lease.lease_id] = holding
        self._by_replica.setdefault(lease.replica_id, set()).add(holding)
        if not is_told:
            self._ordered.setdefault(holding.demand.process_id, set()).add(holding)

    def have_ask(self, holding: Holding) -> None:
        """Order the holder's process to ask before the next turn."""
        holding.must_ask = True
        self._ordered.setdefault(holding.demand.process_id, set()).add(holding)

    def obeyed(self, holding: Holding) -> None:
        """Record that the holder's process has followed its last order."""
        for lease_id in holding.earlier:
            del self._by_lease[lease_id]
        holding.earlier = ()
        holding.must_ask = False
        ordered = self._ordered.get(holding.demand.process_id)
        if ordered is not None:
            ordered.discard(holding)
            if not ordered:
                del self._ordered[holding.demand.process_id]

    def orders(self, process_id: str) -> tuple[tuple[str, Lease | None], ...]:
        """Return the orders that a process may not have received: lease id -> the new lease, or None to ask
        first."""
        found: list[tuple[str, Lease | None]] = []
        for holding in self._ordered.get(process_id, ()):
            lease = None if holding.must_ask else holding.lease
            found += [(lease_id, lease) for lease_id in holding.earlier]
            if holding.must_ask:
                found.append((holding.lease.lease_id, None))
        return tuple(found)

    def heard(self, holding: Holding, process_id: str, now: float) -> bool:
        """Record that a process reported the lease. Returns False if another process has it."""
        if holding.demand.process_id not in ("", process_id):
            return False
        if holding.demand.process_id != process_id or holding.demand.expires_at is not None:
            self.ask_again(holding, replace(holding.demand, process_id=process_id, expires_at=None), now)
        return True

    def renew(self, process_id: str, now: float) -> None:
        """Record a report of a process, if it has leases."""
        if process_id in self._by_process:
            self._seen_at[process_id] = now

    def expired(self, now: float, ttl_s: float) -> tuple[Holding, ...]:
        """Return the entries that have expired, and those of processes without a report for `ttl_s`."""
        silent = [name for name, seen_at in self._seen_at.items() if name and now - seen_at >= ttl_s]
        over = {holding for name in silent for holding in self._by_process[name]}
        return (*over, *(one for one in self._ending - over if _ends_at(one) <= now))

    def check(self) -> None:
        """Raise InvariantBroken unless all indexes have the same entries."""
        held = set(self._by_holder.values())
        by_process = [one for members in self._by_process.values() for one in members]
        by_replica = [one for members in self._by_replica.values() for one in members]
        num_leases = sum(1 + len(one.earlier) for one in held)
        if not len(held) == len(by_process) == len(by_replica) or num_leases != len(self._by_lease):
            raise InvariantBroken("lease table invariant violated: an index misses a lease or has it twice")
        if not held == set(by_process) == set(by_replica) == set(self._by_lease.values()):
            raise InvariantBroken("lease table invariant violated: the indexes have different leases")
        if self._seen_at.keys() != self._by_process.keys():
            raise InvariantBroken(
                "lease table invariant violated: report times differ from the processes with leases"
            )

    def _join_process(self, holding: Holding, now: float) -> None:
        demand = holding.demand
        self._by_process.setdefault(demand.process_id, set()).add(holding)
        if demand.expires_at is not None:
            self._ending.add(holding)
        self.renew(demand.process_id, now)

    def _leave_process(self, holding: Holding) -> None:
        self._ending.discard(holding)
        process_id = holding.demand.process_id
        of_process = self._by_process[process_id]
        of_process.remove(holding)
        if not of_process:
            del self._by_process[process_id]
            self._seen_at.pop(process_id, None)

    def _leave_replica(self, holding: Holding) -> None:
        replica_id = holding.lease.replica_id
        on_replica = self._by_replica[replica_id]
        on_replica.remove(holding)
        if not on_replica:
            del self._by_replica[replica_id]


def _ends_at(holding: Holding) -> float:
    return float("inf") if holding.demand.expires_at is None else holding.demand.expires_at
