"""Fencing: a command that arrives late, or twice, is refused.

A command whose caller has given up, a copy of one, or one of a process that was replaced may arrive at any time
later: a pause after its resume would freeze a replica for which nobody feels responsible.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from agentloop.errors import Conflict

EPOCH_HEADER = "x-agentloop-epoch"
ORDER_HEADER = "x-agentloop-order"


@dataclass(frozen=True, slots=True, order=True)
class FencingToken:
    """The place of a command among all of them: `number` grows within a process, `epoch` over processes."""

    epoch: int
    number: int


class CommandKind(StrEnum):
    """Commands that are counted together, because one may undo another."""

    FREEZE = "freeze"  # pause, resume, commit, sleep, wake
    STAGE = "stage"  # minutes long: what freezes and goes on meanwhile does not make it late


class FencingGuard:
    """Lets each command pass once, and none after a newer one of its kind."""

    def __init__(self) -> None:
        self._last: dict[CommandKind, FencingToken] = {}

    def admit(self, kind: CommandKind, token: FencingToken) -> None:
        """Raises Conflict if the command is late or was here before."""
        last = self._last.get(kind)
        if last is not None and token <= last:
            raise Conflict(f"order {token.epoch}.{token.number} came after {last.epoch}.{last.number}")
        self._last[kind] = token


class NumberedCommands:
    """The commands of one process, numbered in the order in which they are sent."""

    def __init__(self, epoch: int | None = None) -> None:
        """`epoch` is higher than that of any process before whose commands this one takes over; by default it is
        the time."""
        self._epoch = time.time_ns() if epoch is None else epoch
        self._num_sent = 0

    def next_headers(self) -> dict[str, str]:
        """Return the headers of the next command."""
        self._num_sent += 1
        return {EPOCH_HEADER: str(self._epoch), ORDER_HEADER: str(self._num_sent)}
