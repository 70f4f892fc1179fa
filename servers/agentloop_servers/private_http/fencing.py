"""Fencing: refuses commands that arrive late or twice.

A command of a caller that has given up or was replaced may arrive at any time later. Without fencing a pause could
arrive after its resume and freeze a replica forever. The epoch comes from a stored counter
(`TrajectoryStore.take_over`), never from a clock, because clocks may go back. If the counter was lost, a refusal
names the epoch to exceed, and only the store's owner gets a higher one.
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
    """A command that arrived after a newer one."""

    code = "fenced"


@dataclass(frozen=True, slots=True, order=True)
class FencingToken:
    """A command's position among all commands: `number` increases within a process, `epoch` over processes."""

    epoch: int
    number: int


class CommandKind(StrEnum):
    """The groups of commands that are ordered among each other, because one may undo another."""

    FREEZE = "freeze"  # pause, resume, commit, sleep, wake
    STAGE = "stage"  # takes minutes, so FREEZE commands in between do not make it late


class FencingGuard:
    """Admits each command once, and none after a newer one of its kind."""

    def __init__(self) -> None:
        self._last: dict[CommandKind, FencingToken] = {}

    def admit(self, kind: CommandKind, token: FencingToken) -> None:
        """Raise Fenced if the command is late or was admitted before."""
        last = self._last.get(kind)
        if last is not None and token <= last:
            raise Fenced(
                f"command {token.epoch}.{token.number} arrived after {last.epoch}.{last.number}, so it is refused"
            )
        self._last[kind] = token

    @property
    def newest_epoch(self) -> int:
        """The highest epoch of an admitted command; 0 before the first."""
        return max((token.epoch for token in self._last.values()), default=0)


class NumberedCommands:
    """The commands of one process, numbered in the order of sending."""

    def __init__(self, epoch: int, raise_epoch: Callable[[int], Awaitable[int]] | None = None) -> None:
        """`epoch` is higher than that of all processes whose commands this one replaces.

        `raise_epoch` returns an epoch above its argument, or raises if another process has taken over.
        """
        self._epoch = epoch
        self._raise_epoch = raise_epoch
        self._raising = asyncio.Lock()
        self._num_sent = 0

    async def outrun(self, epoch: int) -> bool:
        """Raise the epoch above the one that refused a command. Returns False if the command itself was late.

        Re-raises the error of `raise_epoch`.
        """
        if epoch <= self._epoch or self._raise_epoch is None:
            return False
        async with self._raising:
            if epoch >= self._epoch:  # another command may have raised it already
                self._epoch = await self._raise_epoch(epoch)
        return True

    def next_headers(self) -> dict[str, str]:
        """Return the headers of the next command."""
        self._num_sent += 1
        return {EPOCH_HEADER: str(self._epoch), ORDER_HEADER: str(self._num_sent)}
