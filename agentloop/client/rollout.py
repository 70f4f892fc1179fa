"""A submitted rollout as its caller holds it: tasks read from a file, every finished trajectory read exactly once.

`Rollout` and `follow` own the cursors. The connection is the client's; `Service` is what is asked of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from agentloop.api.coordinator import Page, RolloutStatus
from agentloop.api.requests import TaskBody, parse_body
from agentloop.errors import Gone, InvalidRequest, NotFound, ServiceUnavailable
from agentloop.types import RolloutTask, Trajectory

_READ_WAIT_S = 20.0  # how long the service holds a read that finds nothing
_TURN_WAIT_S = 0.5  # the same, while other parts wait for their turn
_READ_GAP_S = 0.5  # between two reads that found nothing at once


class Service(Protocol):
    """The part of `RolloutClient` that a rollout and its readers use."""

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """Return one part's counts."""

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """End one part."""

    async def acknowledge(self, rollout_id: str, cursor: int) -> RolloutStatus:
        """Let one part's trajectories up to a cursor be deleted."""

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Return one part's trajectories after a cursor."""


@dataclass(slots=True)
class _ReadPage:
    """The count of one read's records that the caller has not got; without any the page may be acknowledged."""

    cursor: int
    num_left: int


@dataclass(slots=True)
class _Part:
    """One submit of a rollout, which is a rollout of its own to the service, and how far it was read."""

    rollout_id: str
    num_samples: int  # of each group
    num_trajectories: int
    batch: int = 0  # that it was submitted for, of `RolloutClient.batches`
    cursor: int = 0
    pages: deque[_ReadPage] = field(default_factory=deque)  # those not acknowledged, in order
    num_read: int = 0
    is_over: bool = False


class Rollout:
    """A submitted rollout. Iterate to get every finished trajectory exactly once, across lost connections.

    The iteration ends when all `num_trajectories` have ended; it may be left and continued. A large rollout has
    several parts, each a rollout to the service: `rollout_ids`.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parts: dict[str, _Part] = {}
        self._ready: deque[tuple[Trajectory, _ReadPage]] = deque()  # at most one page
        self._begun: dict[tuple[str, str], list[tuple[Trajectory, _ReadPage]]] = {}  # of groups that are not whole

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The ids by which the service knows this rollout; a large one is submitted in several parts."""
        return tuple(self._parts)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that were accepted: tasks times samples."""
        return sum(part.num_trajectories for part in self._parts.values())

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        while self._ready or await self._read_page():
            trajectory, page = self._ready.popleft()
            page.num_left -= 1
            yield trajectory

    async def groups(self) -> AsyncIterator[Sequence[Trajectory]]:
        """Yield each group once all its samples have ended. It may be left and continued, and ends as iterating the
        rollout itself does, which gives nothing of what this has read."""
        while self._ready or await self._read_page():
            trajectory, page = self._ready.popleft()
            key = trajectory.rollout_id, trajectory.group_id
            group = self._begun.setdefault(key, [])
            group.append((trajectory, page))
            if len(group) == self._parts[trajectory.rollout_id].num_samples:
                for _, page in self._begun.pop(key):
                    page.num_left -= 1
                yield [trajectory for trajectory, _ in group]

    async def acknowledge(self) -> None:
        """Let the service delete what was iterated so far, page by page: it is kept elsewhere."""
        for part in self._parts.values():
            given = list(takewhile(lambda page: page.num_left == 0, part.pages))
            if given:
                with suppress(Gone):  # an earlier try came through, and all was deleted
                    await self._service.acknowledge(part.rollout_id, given[-1].cursor)
                for _ in given:
                    part.pages.popleft()

    async def status(self) -> RolloutStatus:
        """The counts at this moment, under the first of `rollout_ids`."""
        return _sum([await self._service.rollout_status(name) for name in self.rollout_ids])

    async def cancel(self) -> RolloutStatus:
        """End what is queued or running; the iteration then delivers those records too."""
        return _sum([await self._service.cancel(name) for name in self.rollout_ids])

    def expect(self, rollout_id: str, num_groups: int, num_samples: int) -> None:
        """Add a part that is about to be sent."""
        self._parts[rollout_id] = _Part(rollout_id, num_samples, num_groups * num_samples)

    def drop(self, rollout_id: str) -> None:
        """Take out a part that was refused."""
        del self._parts[rollout_id]

    def join(self, other: Rollout, batch: int) -> None:
        """Take over the parts of a rollout of which nothing was read; they are a batch's."""
        for part in other._parts.values():
            self._parts[part.rollout_id] = replace(part, batch=batch)

    def batch_of(self, trajectory: Trajectory) -> int:
        """Return the batch that a trajectory's part was submitted for."""
        return self._parts[trajectory.rollout_id].batch

    def forget(self) -> None:
        """Take out the parts of which all was given to the caller."""
        for part in list(self._parts.values()):
            if part.is_over and all(page.num_left == 0 for page in part.pages):
                del self._parts[part.rollout_id]

    async def _read_page(self) -> bool:
        """Wait for trajectories; False if there are no more. Parts take turns, so that none waits for another."""
        is_waiting = False
        while live := [part for part in self._parts.values() if not part.is_over]:
            wait_s = _READ_WAIT_S if len(live) == 1 else _TURN_WAIT_S if is_waiting else 0.0
            for part in live:
                await self._read_part(part, wait_s)
                if self._ready:
                    self._parts[part.rollout_id] = self._parts.pop(part.rollout_id)  # to the end of the line
                    return True
                if is_waiting:
                    wait_s = 0.0  # one wait a round
            is_waiting = True
        return False

    async def _read_part(self, part: _Part, wait_s: float) -> None:
        name, cursor = part.rollout_id, part.cursor
        try:
            page = await self._service.read(name, after=cursor, wait_s=wait_s)
        except ServiceUnavailable as error:
            raise ServiceUnavailable(
                f"{error.message}. Nothing is lost: iterate this rollout again, or raise retry_timeout_s of "
                f"RolloutClient. Another process can read the records with client.read({name!r}, after={cursor}), "
                "but not by groups",
                details=error.details,
            ) from error
        part.cursor = page.cursor
        part.num_read += len(page.trajectories)
        if page.trajectories:
            part.pages.append(read := _ReadPage(page.cursor, len(page.trajectories)))
            self._ready.extend((trajectory, read) for trajectory in page.trajectories)
        # A record that retention deleted is never delivered: then an empty page of a finished rollout is the end.
        is_empty_end = page.status.is_done and not page.trajectories
        part.is_over = is_empty_end or part.num_read >= part.num_trajectories


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
    """Yield the records of a rollout in commit order, also those to come, until none is new for `idle_s`.

    With None it does not end. An unknown rollout has no records yet.
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
            if acknowledge:
                with suppress(Gone):
                    await service.acknowledge(rollout_id, after)
            last_at = loop.time()
        elif left_s <= 0:
            return
        else:
            # Where all that was accepted has ended, the service does not wait.
            await asyncio.sleep(min(_READ_GAP_S, left_s))


_EVERYWHERE = (Path("/"),)  # a task file is the user's own: it may show any image that this process may read


def load_tasks(path: str | Path) -> list[RolloutTask]:
    """Return the tasks of a JSONL file in order, without blank lines. Images may be local (`file:///...`).

    Raises InvalidRequest naming file and line for a line that is no task, a repeated task id, and a file that
    cannot be read or has no task.
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
        raise InvalidRequest(f"{path} holds no task")
    return list(tasks.values())
