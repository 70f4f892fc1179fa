"""The partition map of chat endpoint processes on several hosts: the owner of each session, and failover.

A session id that the service makes contains its process's number. A client's own id is hashed to one of
`NUM_SLOTS` slots, each owned by a process. Sessions on a process's disk stay with it: only the slots of lost hosts
move, and a host that returns no longer records sessions in them (`ShardRouter.check_may_record`). With sessions in
a shared database (`are_taken_over`), other processes take over the slots and numbers of a lost process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import EndpointTable, sessions_lease

NUM_SLOTS = 64
LOST_AFTER_S = 25.0
TAKEN_OVER_AFTER_S = 12.0  # longer than a process trusts its table (`shards.FRESH_S`)

_SETTLES_S = 60.0  # for the processes of all hosts to join, before slots are assigned


@dataclass(frozen=True, slots=True)
class SavedPlaces:
    """The partition map as it is stored for the next coordinator."""

    disks: dict[int, str]  # process number -> disk
    holders: tuple[int, ...] = ()  # slot -> process number; empty until the first assignment
    inherited: frozenset[int] = frozenset()  # slots whose earlier owner was lost together with its sessions
    failover_owners: dict[int, int] = field(default_factory=dict)  # number of a lost process -> its failover owner


class EndpointPlaces:
    """Assigns slots and numbers to processes. On one host it only stores their addresses."""

    def __init__(
        self,
        own_disk: str,
        num_processes: int,
        now: Callable[[], float],
        save: Callable[[SavedPlaces, Sequence[str]], Awaitable[None]],
        log: FilteringBoundLogger,
        *,
        are_taken_over: bool = False,
    ) -> None:
        """`num_processes` must join before slots are assigned at first.

        `save` stores the map and also revokes leases, by name. `are_taken_over` is True if sessions are in a
        shared database.
        """
        self._are_taken_over = are_taken_over
        self._own_disk = own_disk
        self._num_processes = num_processes
        self._now = now
        self._save = save
        self._log = log
        self._saved = SavedPlaces({0: own_disk} if num_processes else {})
        self._changing = asyncio.Lock()
        self._began_at = now()
        self._seen_at: dict[int, float] = {}
        self._urls: dict[int, str] = {}
        self._public_urls: dict[int, str] = {}
        self._lost: frozenset[int] = frozenset()

    @property
    def public_urls(self) -> tuple[str, ...]:
        """The public addresses for clients, one per host."""
        return tuple(sorted({url for number, url in self._public_urls.items() if number not in self._lost}))

    def restore(self, saved: SavedPlaces | None) -> None:
        """Load an earlier coordinator's map. Each process has time to join again."""
        self._saved = saved or self._saved
        self._seen_at = dict.fromkeys(self._saved.disks, self._now())

    async def endpoint_numbers(self, disk: str, num: int) -> tuple[int, ...]:
        """Return the numbers of the processes with a disk, and add numbers until there are `num`."""
        async with self._changing:
            disks, failover_owners = self._saved.disks, self._saved.failover_owners
            own = [
                number for number, its_disk in disks.items() if its_disk == disk and number not in failover_owners
            ]
            # It is starting
            self._seen_at.update((number, self._now()) for number in own if number in self._seen_at)
            new = range(len(disks), len(disks) + num - len(own))
            if new:
                await self._keep(replace(self._saved, disks={**disks, **dict.fromkeys(new, disk)}))
        return (*own, *new)

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        """Record that a process is alive, and its addresses."""
        self._seen_at[number] = self._now()
        self._urls[number], self._public_urls[number] = url, public_url
        saved = self._saved
        return EndpointTable(dict(self._urls), saved.holders, self._lost, saved.inherited, saved.failover_owners)

    async def look(self) -> None:
        """Detect lost processes, and assign their slots to others."""
        now, disks = self._now(), self._saved.disks
        lost_after_s = TAKEN_OVER_AFTER_S if self._are_taken_over else LOST_AFTER_S
        lost = frozenset(
            # A process on the coordinator's disk is not lost with its host: another process opens its files.
            number
            for number, seen_at in self._seen_at.items()
            if now - seen_at > lost_after_s and disks.get(number, self._own_disk) != self._own_disk
        )
        for number in sorted(lost - self._lost):
            self._log.error("endpoint_process_lost", number=number, url=self._urls.get(number))
        there = [number for number in disks if number in self._urls and number not in lost]
        async with self._changing:
            if self._are_taken_over and there:
                await self._leave_to_failover_owners(lost, there)
            self._lost = lost
            held = self._saved.holders
            if not there or (not held and len(there) < self._num_processes and now - self._began_at < _SETTLES_S):
                return
            orphans = [slot for slot in range(NUM_SLOTS) if not held or held[slot] in lost]
            if orphans:
                holders = list(held) or [-1] * NUM_SLOTS
                _give(orphans, holders, there, Counter(held))
                inherited = self._saved.inherited | set(orphans if held and not self._are_taken_over else ())
                await self._keep(replace(self._saved, holders=tuple(holders), inherited=inherited))

    async def _leave_to_failover_owners(self, lost: frozenset[int], there: list[int]) -> None:
        """Assign the numbers and slots of lost processes, and those that they had taken over, to other
        processes."""
        saved, gone = self._saved, lost - set(self._saved.failover_owners)
        orphans = [
            *sorted(gone),
            *(number for number, failover_owner in saved.failover_owners.items() if failover_owner in lost),
        ]
        slots = [slot for slot, number in enumerate(saved.holders) if number in lost]
        if not orphans and not slots:
            return
        failover_owners, holders = dict(saved.failover_owners), list(saved.holders)
        load = Counter([*failover_owners.values(), *holders])
        _give(orphans, failover_owners, there, load)
        _give(slots, holders, there, load)
        # The lost process's write lease is revoked in the same transaction, so it cannot write after the failover.
        leases = [sessions_lease(number) for number in gone]
        await self._keep(replace(saved, failover_owners=failover_owners, holders=tuple(holders)), leases)

    async def _keep(self, saved: SavedPlaces, revokes: Sequence[str] = ()) -> None:
        await self._save(saved, revokes)
        self._saved = saved


def _give(places: Sequence[int], holders: dict[int, int] | list[int], there: list[int], load: Counter[int]) -> None:
    """Assign each item to the process that has the fewest."""
    for place in places:
        holders[place] = holder = min(there, key=lambda number: (load[number], number))
        load[holder] += 1
