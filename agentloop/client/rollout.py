"""A submitted rollout on the client's side: reads every finished trajectory exactly once, and loads task files.

`Rollout` and `follow` own the cursors. They use the client's connection through the `Service` protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from agentloop.api.coordinator import Page, RolloutStatus
from agentloop.api.requests import TaskBody, parse_body
from agentloop.errors import Gone, InvalidRequest, NotFound, ServiceUnavailable
from agentloop.types import RolloutTask, Trajectory

_READ_WAIT_S = 20.0  # long-poll time of a read
_TURN_WAIT_S = 0.5  # the same with several live parts, which are read in rotation
_READ_GAP_S = 0.5  # between two reads that return no record without waiting


class Service(Protocol):
    """The part of `RolloutClient` that a rollout and its readers use."""

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """Return the status of one part."""

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """Cancel one part."""

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        """Allow the deletion of one part's records up to a cursor."""

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Return one part's records after a cursor."""


SampleKey: TypeAlias = tuple[str, int]
"""A sample of a part: its group's id and its index."""


@dataclass(frozen=True, slots=True)
class PartPosition:
    """The read position in one part: all records up to `cursor` were delivered, and the samples in `delivered`."""

    rollout_id: str
    num_samples: int
    num_trajectories: int
    batch: int
    cursor: int
    delivered: tuple[SampleKey, ...]


@dataclass(slots=True)
class _ReadPage:
    """A fetched page of records. It can be acknowledged once `num_left`, the undelivered records, is 0."""

    cursor: int
    num_left: int
    delivered: list[SampleKey]

    def deliver(self, trajectory: Trajectory) -> None:
        """Count one of its records as delivered."""
        self.num_left -= 1
        self.delivered.append(_key_of(trajectory))


@dataclass(slots=True)
class _Part:
    """One submitted part, which is a separate rollout of the service, and the read position in it."""

    rollout_id: str
    num_samples: int  # per group
    num_trajectories: int
    batch: int = 0  # the batch of `RolloutClient.batches` that it was submitted for
    cursor: int = 0
    pages: deque[_ReadPage] = field(default_factory=deque)  # unacknowledged pages in order
    acknowledged: int = 0  # the cursor of the last page that is no longer in `pages`
    earlier: set[SampleKey] = field(default_factory=set)  # delivered by an earlier process, not read again yet
    num_read: int = 0
    is_over: bool = False

    @property
    def is_delivered(self) -> bool:
        """True if every record was read and delivered."""
        return self.is_over and all(page.num_left == 0 for page in self.pages)

    @property
    def position(self) -> PartPosition:
        """The read position, for a later process."""
        complete = list(takewhile(lambda page: page.num_left == 0, self.pages))
        cursor = complete[-1].cursor if complete else self.acknowledged
        delivered = [key for page in list(self.pages)[len(complete) :] for key in page.delivered]
        keys = tuple(sorted((*self.earlier, *delivered)))
        return PartPosition(self.rollout_id, self.num_samples, self.num_trajectories, self.batch, cursor, keys)

    @classmethod
    def at(cls, position: PartPosition) -> _Part:
        """Return a part that continues after a position."""
        return cls(
            position.rollout_id,
            position.num_samples,
            position.num_trajectories,
            position.batch,
            cursor=position.cursor,
            acknowledged=position.cursor,
            earlier=set(position.delivered),
        )

    def add_page(self, page: Page) -> list[tuple[Trajectory, _ReadPage]]:
        """Add a fetched page. Return its records without those that an earlier process delivered."""
        self.cursor = page.cursor
        self.num_read += len(page.trajectories)
        # Records that retention deleted are never delivered, so an empty page of a finished rollout is the end too.
        is_empty_end = page.status.is_done and not page.trajectories
        self.is_over = is_empty_end or self.num_read >= self.num_trajectories
        if not page.trajectories:
            return []
        known = [key for key in map(_key_of, page.trajectories) if key in self.earlier]
        self.earlier.difference_update(known)
        read = _ReadPage(page.cursor, len(page.trajectories) - len(known), known)
        self.pages.append(read)
        return [(one, read) for one in page.trajectories if _key_of(one) not in known]


class Rollout:
    """A submitted rollout. Iterate over it to get every finished trajectory exactly once, also after reconnects.

    The iteration ends when all `num_trajectories` have ended. It can be interrupted and continued. A large rollout
    has several parts, each of which is a rollout of the service (`rollout_ids`).
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parts: dict[str, _Part] = {}
        self._ready: deque[tuple[Trajectory, _ReadPage]] = deque()  # at most one page
        self._begun: dict[tuple[str, str], list[tuple[Trajectory, _ReadPage]]] = {}  # incomplete groups

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The ids of this rollout's parts in the service."""
        return tuple(self._parts)

    @property
    def num_trajectories(self) -> int:
        """The number of accepted trajectories: tasks times samples."""
        return sum(part.num_trajectories for part in self._parts.values())

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        while self._ready or await self._read_page():
            trajectory, page = self._ready.popleft()
            page.deliver(trajectory)
            yield trajectory

    async def groups(self) -> AsyncIterator[Sequence[Trajectory]]:
        """Yield each group once all its samples have ended. It can be interrupted and continued.

        Ends when every trajectory has ended. Trajectories read here, including those of incomplete groups, are not
        yielded again when the rollout is iterated.
        """
        while self._ready or await self._read_page():
            trajectory, page = self._ready.popleft()
            key = trajectory.rollout_id, trajectory.group_id
            group = self._begun.setdefault(key, [])
            group.append((trajectory, page))
            if len(group) == self._parts[trajectory.rollout_id].num_samples:
                for trajectory, page in self._begun.pop(key):
                    page.deliver(trajectory)
                yield [trajectory for trajectory, _ in group]

    async def acknowledge(self) -> None:
        """Allow the service to delete the records delivered so far, which the caller has stored.

        Only pages whose records were all delivered are acknowledged.
        """
        for part in self._parts.values():
            delivered = list(takewhile(lambda page: page.num_left == 0, part.pages))
            if delivered:
                with suppress(Gone):  # an earlier attempt succeeded, and all records were deleted
                    await self._service.acknowledge(part.rollout_id, delivered[-1].cursor)
                for _ in delivered:
                    part.acknowledged = part.pages.popleft().cursor

    async def status(self) -> RolloutStatus:
        """Return the summed status of the submits of this rollout, under the first of `rollout_ids`."""
        return _sum([await self._service.rollout_status(name) for name in self.rollout_ids])

    async def cancel(self) -> RolloutStatus:
        """Cancel queued and running samples. The iteration yields their records too."""
        return _sum([await self._service.cancel(name) for name in self.rollout_ids])

    @property
    def position(self) -> str:
        """The read position as JSON text, for a trainer's checkpoint. `RolloutClient.rollout` continues after it.

        All delivered records are before it: take it when the weights include the last delivered group.
        """
        return msgspec.json.encode(self.positions).decode()

    @property
    def positions(self) -> list[PartPosition]:
        """The read position in each part that has undelivered records."""
        return [part.position for part in self._parts.values() if not part.is_delivered]

    def continue_at(self, positions: Iterable[PartPosition]) -> None:
        """Add the parts of an earlier process, each after its position."""
        self._parts |= {position.rollout_id: _Part.at(position) for position in positions}

    async def find_parts(self, name: str, first: int, num_samples: int, batch: int) -> int:
        """Add the parts that an earlier process submitted after its position; return the number of their groups.

        Their ids are `name` and the number of their first task; `first` is that of the next one. Raises NotFound if
        the service does not have a part of the position.
        """
        for rollout_id in self.rollout_ids:
            await self._service.rollout_status(rollout_id)
        num_groups = 0
        with suppress(NotFound):
            while True:
                rollout_id = f"{name}-{first + num_groups}"
                num_accepted = (await self._service.rollout_status(rollout_id)).num_accepted
                self._parts[rollout_id] = _Part(rollout_id, num_samples, num_accepted, batch)
                num_groups += num_accepted // num_samples
        return num_groups

    def expect(self, rollout_id: str, num_groups: int, num_samples: int) -> None:
        """Add a part before it is sent."""
        self._parts[rollout_id] = _Part(rollout_id, num_samples, num_groups * num_samples)

    def drop(self, rollout_id: str) -> None:
        """Remove a part that the service refused."""
        del self._parts[rollout_id]

    def join(self, other: Rollout, batch: int) -> None:
        """Add the parts of an unread rollout, as parts of a batch."""
        for part in other._parts.values():
            self._parts[part.rollout_id] = replace(part, batch=batch)

    def batch_of(self, trajectory: Trajectory) -> int:
        """Return the batch that a trajectory's part was submitted for."""
        return self._parts[trajectory.rollout_id].batch

    def forget(self) -> None:
        """Remove the parts whose records were all delivered."""
        for part in list(self._parts.values()):
            if part.is_delivered:
                del self._parts[part.rollout_id]

    async def _read_page(self) -> bool:
        """Wait for a page of trajectories. Returns False at the end.

        Live parts are polled in rotation, so that a part with records does not wait for one without.
        """
        is_waiting = False
        while live := [part for part in self._parts.values() if not part.is_over]:
            wait_s = _READ_WAIT_S if len(live) == 1 else _TURN_WAIT_S if is_waiting else 0.0
            for part in live:
                await self._read_part(part, wait_s)
                if self._ready:
                    # Move to the end of the rotation.
                    self._parts[part.rollout_id] = self._parts.pop(part.rollout_id)
                    return True
                if is_waiting:
                    wait_s = 0.0  # only one waiting read per round
            is_waiting = True
        return False

    async def _read_part(self, part: _Part, wait_s: float) -> None:
        name, cursor = part.rollout_id, part.cursor
        try:
            page = await self._service.read(name, after=cursor, wait_s=wait_s)
        except ServiceUnavailable as error:
            raise ServiceUnavailable(
                f"{error.message}. No record is lost: iterate this rollout again, or raise retry_timeout_s of "
                f"RolloutClient. Another process can read the records with client.read({name!r}, after={cursor}), "
                "but not in groups",
                details=error.details,
            ) from error
        self._ready.extend(part.add_page(page))


def _key_of(trajectory: Trajectory) -> SampleKey:
    return trajectory.group_id, trajectory.sample_index


def _sum(statuses: list[RolloutStatus]) -> RolloutStatus:
    return RolloutStatus(
        rollout_id=statuses[0].rollout_id,
        num_accepted=sum(status.num_accepted for status in statuses),
        num_finished=sum(status.num_finished for status in statuses),
        num_running=sum(status.num_running for status in statuses),
        num_queued=sum(status.num_queued for status in statuses),
        num_held=sum(status.num_held for status in statuses),
    )


async def follow(
    service: Service,
    rollout_id: str,
    *,
    after: int = 0,
    idle_s: float | None = None,
    acknowledge: bool = False,
) -> AsyncIterator[Trajectory]:
    """Yield the records of a rollout in commit order, including future ones.

    Ends after `idle_s` without a new record; None: never. An unknown rollout is treated as one without records.
    """
    loop = asyncio.get_running_loop()
    last_at = loop.time()
    while True:
        left_s = _READ_WAIT_S if idle_s is None else last_at + idle_s - loop.time()
        wait_s = min(max(left_s, 0.0), _READ_WAIT_S)
        try:
            page = await service.read(rollout_id, after=after, wait_s=wait_s)
        except NotFound:
            page = None
        if page is not None and page.trajectories:
            after = page.cursor
            for trajectory in page.trajectories:
                yield trajectory
            # The caller requests the next record, so it has finished with this page.
            if acknowledge:
                with suppress(Gone):
                    await service.acknowledge(rollout_id, after)
            last_at = loop.time()
        elif left_s <= 0:
            return
        else:
            # If all accepted trajectories have ended, the service returns without waiting.
            await asyncio.sleep(min(_READ_GAP_S, left_s))


_EVERYWHERE = (Path("/"),)  # task files are the user's own: they may refer to any image that this process can read


def load_tasks(path: str | Path) -> list[RolloutTask]:
    """Load the tasks of a JSONL file in order. Blank lines are ignored. Images may be local (`file:///...`).

    Raises InvalidRequest for a file that cannot be read or has no task and, with the line number, for an invalid
    task or a duplicate task id.
    """
    tasks: dict[str, RolloutTask] = {}
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read tasks from {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = parse_body(line.strip(), TaskBody).to_task(_EVERYWHERE)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}, line {number}: {error.message}", param=error.param) from error
        if task.task_id in tasks:
            raise InvalidRequest(f"{path}, line {number}: task_id {task.task_id!r} occurs twice", param="task_id")
        tasks[task.task_id] = task
    if not tasks:
        raise InvalidRequest(f"{path} contains no task: it must have one JSON object per line")
    return list(tasks.values())
