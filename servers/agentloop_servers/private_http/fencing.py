"""Fencing: a command that arrives late, or twice, is refused.

An epoch comes from a counter that is stored (`TrajectoryStore.take_over`), never from a clock: clocks go back.
Where the counter was lost, a refusal tells the epoch to outrun, and only the store's owner is given a greater one.

A command whose caller has given up, a copy of one, or one of a process that was replaced may arrive at any time
later: a pause after its resume would freeze a replica that no process would resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from agentloop.errors import Conflict

EPOCH_HEADER = "x-agentloop-epoch"
ORDER_HEADER = "x-agentloop-order"


class Fenced(Conflict):
    """A command that came after a newer one."""

    code = "fenced"


@dataclass(frozen=True, slots=True, order=True)
class FencingToken:
    """A command's place in the order of all commands: `number` grows within a process, `epoch` over processes."""

    epoch: int
    number: int


class CommandKind(StrEnum):
    """Commands that are counted together, because one may undo another."""

    FREEZE = "freeze"  # pause, resume, commit, sleep, wake
    STAGE = "stage"  # minutes long: what freezes and goes on meanwhile does not make it late


class FencingGuard:
    """A guard that lets each command pass once, and none after a newer one of its kind."""

    def __init__(self) -> None:
        self._last: dict[CommandKind, FencingToken] = {}

    def admit(self, kind: CommandKind, token: FencingToken) -> None:
        """Raises Fenced if the command is late, or passed before."""
        last = self._last.get(kind)
        if last is not None and token <= last:
            raise Fenced(f"order {token.epoch}.{token.number} came after {last.epoch}.{last.number}")
        self._last[kind] = token

    @property
    def newest_epoch(self) -> int:
        """The greatest epoch of a command that passed; 0 before the first."""
        return max((token.epoch for token in self._last.values()), default=0)


class NumberedCommands:
    """The commands of one process, numbered in the order in which they are sent."""

    def __init__(self, epoch: int, raise_epoch: Callable[[int], Awaitable[int]] | None = None) -> None:
        """`epoch` is greater than that of any process before whose commands this one takes over. `raise_epoch`
        gives one above its argument, or raises if another process has taken over."""
        self._epoch = epoch
        self._raise_epoch = raise_epoch
        self._raising = asyncio.Lock()
        self._num_sent = 0

    async def outrun(self, epoch: int) -> bool:
        """Take an epoch above the one that a command was refused for. False: the command itself was late.

        Raises what `raise_epoch` raises.
        """
        if epoch <= self._epoch or self._raise_epoch is None:
            return False
        async with self._raising:
            if epoch >= self._epoch:  # another command may have outrun it meanwhile
                self._epoch = await self._raise_epoch(epoch)
        return True

    def next_headers(self) -> dict[str, str]:
        """Return the headers of the next command."""
        self._num_sent += 1
        return {EPOCH_HEADER: str(self._epoch), ORDER_HEADER: str(self._num_sent)}
