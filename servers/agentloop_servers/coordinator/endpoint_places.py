"""The chat endpoint's processes on several hosts: who has which sessions, and what went with a lost host.

An id that the service makes names its process by number. A client's own id falls into one of `NUM_SLOTS` slots, and
each slot has a holder. Sessions are on the disk of their process, so a slot never moves while its holder's host is
there: a process that joins takes over the slots of lost hosts alone, and gets new ids of its own.

A process is lost that has not joined for `LOST_AFTER_S`, unless it shares the coordinator's disk, where another one
opens its file. A host that comes back has its file, and the sessions that are named by its number; clients' own ids
are then another's, so it records nothing of them (`ShardRouter.check_may_record`).

Where sessions are in the run's database, all that a lost process has goes to others, after `TAKEN_OVER_AFTER_S`:
its slots, and its number to an heir. In the same transaction it loses its lease, so it writes nothing more; once it
ends itself, or comes back, its disk gets a new number.
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

_SETTLES_S = 60.0  # for the processes of all hosts to join, before slots are given out


@dataclass(frozen=True, slots=True)
class SavedPlaces:
    """The places as the store keeps them for later coordinators."""

    disks: dict[int, str]  # by the process's number
    holders: tuple[int, ...] = ()  # by slot; empty until the first are given out
    inherited: frozenset[int] = frozenset()  # slots whose earlier holder was lost, with the sessions there
    heirs: dict[int, int] = field(default_factory=dict)  # by the number of a lost process


class EndpointPlaces:
    """Slots and numbers of processes. On one host nobody asks for numbers, and it only knows who listens where."""

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
        """`num_processes` is the number that slots wait for, at first. `save` also revokes leases, by name.
        `are_taken_over`: sessions are in a database."""
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
        """The public addresses that a client may call, one a host."""
        return tuple(sorted({url for number, url in self._public_urls.items() if number not in self._lost}))

    def restore(self, saved: SavedPlaces | None) -> None:
        """Go on with what an earlier coordinator saved: each process has its time to join anew."""
        self._saved = saved or self._saved
        self._seen_at = dict.fromkeys(self._saved.disks, self._now())

    async def endpoint_numbers(self, disk: str, num: int) -> tuple[int, ...]:
        """Return the numbers of the processes with a disk, of which there are `num` at least."""
        async with self._changing:
            disks, heirs = self._saved.disks, self._saved.heirs
            own = [number for number, its_disk in disks.items() if its_disk == disk and number not in heirs]
            self._seen_at.update((number, self._now()) for number in own if number in self._seen_at)  # it starts
            new = range(len(disks), len(disks) + num - len(own))
            if new:
                await self._keep(replace(self._saved, disks={**disks, **dict.fromkeys(new, disk)}))
        return (*own, *new)

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        """Note that a process is there, and where it listens."""
        self._seen_at[number] = self._now()
        self._urls[number], self._public_urls[number] = url, public_url
        saved = self._saved
        return EndpointTable(dict(self._urls), saved.holders, self._lost, saved.inherited, saved.heirs)

    async def look(self) -> None:
        """Find out who is lost, and give their slots to others."""
        now, disks = self._now(), self._saved.disks
        lost_after_s = TAKEN_OVER_AFTER_S if self._are_taken_over else LOST_AFTER_S
        lost = frozenset(
            number
            for number, seen_at in self._seen_at.items()
            if now - seen_at > lost_after_s and disks.get(number, self._own_disk) != self._own_disk
        )
        for number in sorted(lost - self._lost):
            self._log.error("endpoint_process_lost", number=number, url=self._urls.get(number))
        there = [number for number in disks if number in self._urls and number not in lost]
        async with self._changing:
            if self._are_taken_over and there:
                await self._leave_to_heirs(lost, there)
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

    async def _leave_to_heirs(self, lost: frozenset[int], there: list[int]) -> None:
        """Give the numbers of lost processes, and those that they were heirs of, to others, and their slots."""
        saved, gone = self._saved, lost - set(self._saved.heirs)
        orphans = [*sorted(gone), *(number for number, heir in saved.heirs.items() if heir in lost)]
        slots = [slot for slot, number in enumerate(saved.holders) if number in lost]
        if not orphans and not slots:
            return
        heirs, holders = dict(saved.heirs), list(saved.holders)
        load = Counter([*heirs.values(), *holders])
        _give(orphans, heirs, there, load)
        _give(slots, holders, there, load)
        leases = [sessions_lease(number) for number in gone]
        await self._keep(replace(saved, heirs=heirs, holders=tuple(holders)), leases)

    async def _keep(self, saved: SavedPlaces, revokes: Sequence[str] = ()) -> None:
        await self._save(saved, revokes)
        self._saved = saved


def _give(places: Sequence[int], holders: dict[int, int] | list[int], there: list[int], load: Counter[int]) -> None:
    """Give each place to the process that has the fewest then."""
    for place in places:
        holders[place] = holder = min(there, key=lambda number: (load[number], number))
        load[holder] += 1
