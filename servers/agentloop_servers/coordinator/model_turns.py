"""Models that share their accelerators take turns: one is awake, all others sleep.

    look at all models ─► another one is wanted, and the one awake is idle or has had its time ─► sleep ─► wake

A model is wanted while calls, samples or a weight update wait for it, frozen calls too: a sleep freezes running
requests, and the next wake continues them, so no call ends by a switch. Only times are kept here: the awake model
is read from the models themselves, so a new coordinator continues where the last one was.

A model that an operator or a trainer has put to sleep stays asleep until it is woken by them, and all others sleep
as long: the accelerators are somebody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from agentloop.api.coordinator import ServiceStatus
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.fleet.desired_state import TURN_REASON

LOOK_S = 0.25
IDLE_S = 1.0  # an engine's pauses between the turns of a few trajectories are shorter

_log = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True)
class TurnsModel:
    """A model that takes turns: calls of its coordinator, and the number of its replicas."""

    status: Callable[[], Awaitable[ServiceStatus]]
    sleep: Callable[[int, str], Awaitable[None]]
    wake: Callable[[frozenset[MemoryTag]], Awaitable[None]]
    num_replicas: int


@dataclass(slots=True)
class _Turn:
    began_at: float
    busy_at: float  # the last time that the model had work


class ModelTurns:
    """The turns of the models of a service, by name: the policy first. `run` goes on for ever."""

    def __init__(
        self,
        models: Mapping[str, TurnsModel],
        clock: Clock,
        *,
        min_stay_s: float,
        max_wait_s: float,
        start_timeout_s: float,
    ) -> None:
        self._models = models
        self._clock = clock
        self._min_stay_s = min_stay_s
        self._max_wait_s = max_wait_s
        self._start_timeout_s = start_timeout_s
        self._turns: dict[str, _Turn] = {}
        self._wanted_since: dict[str, float] = {}
        self._next = next(iter(models))  # the model that the last switch was to

    async def run(self) -> None:
        """Start the models one after the other, the policy last; then let them take turns."""
        policy, *others = self._models
        for name in (*others, policy):
            await self._start(name)
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self._look()
            except AgentLoopError as error:  # the next look is another attempt
                _log.warning("turn_failed", code=error.code, error=str(error))

    async def _start(self, name: str) -> None:
        """Have a model's replicas start, unless they have, while all others sleep: each needs the memory alone."""
        model, deadline_at = self._models[name], self._clock.now() + self._start_timeout_s
        while self._clock.now() < deadline_at:
            try:
                if len((await model.status()).replicas) >= model.num_replicas:
                    return
                await self._give(name)
            except AgentLoopError as error:  # its coordinator may not be there yet
                _log.debug("model_not_started", model=name, code=error.code, error=str(error))
            await self._clock.sleep(LOOK_S)

    async def _look(self) -> None:
        """Let another model have its turn if it is due."""
        statuses = await self._statuses()
        awake = [name for name, status in statuses.items() if not status.asleep]
        if any(status.asleep and status.sleep_reason != TURN_REASON for status in statuses.values()):
            await self._sleep(awake)
            return
        now = self._clock.now()
        for name, status in statuses.items():
            if name in awake or not _is_wanted(status):
                self._wanted_since.pop(name, None)
            else:
                self._wanted_since.setdefault(name, now)
        if len(awake) != 1:  # a switch has failed halfway, or it is a new coordinator's first look
            await self._give(awake[0] if awake else self._next)
            return
        turn = self._turns.setdefault(awake[0], _Turn(now, now))
        turn.busy_at = now if _is_busy(statuses[awake[0]]) else turn.busy_at
        if not self._wanted_since:
            return
        since, wanted = min((since, name) for name, since in self._wanted_since.items())
        is_idle = now - turn.busy_at >= IDLE_S
        has_had_its_time = now - turn.began_at >= self._min_stay_s and now - since >= self._max_wait_s
        if is_idle or has_had_its_time:
            await self._give(wanted)
            times = {"waited_s": now - since, "stayed_s": now - turn.began_at, "switch_s": self._clock.now() - now}
            _log.info("model_turn", model=wanted, **{name: round(value, 3) for name, value in times.items()})

    async def _give(self, name: str) -> None:
        """Put all other models to sleep, then wake this one. If this raises, the next look repeats it."""
        self._next, statuses = name, await self._statuses()
        # Those that sleep already too: a replica may not have followed. The sleep of a trainer keeps its reason.
        others = [
            one for one, status in statuses.items() if not status.asleep or status.sleep_reason == TURN_REASON
        ]
        await self._sleep([one for one in others if one != name])
        if statuses[name].asleep:
            await self._models[name].wake(ALL_MEMORY)
        now = self._clock.now()
        self._turns = {name: _Turn(now, now)}

    async def _sleep(self, names: list[str]) -> None:
        await asyncio.gather(*(self._models[name].sleep(1, TURN_REASON) for name in names))

    async def _statuses(self) -> dict[str, ServiceStatus]:
        found = await asyncio.gather(*(model.status() for model in self._models.values()))
        return dict(zip(self._models, found, strict=True))


def check_turns(weight_bytes: Mapping[str, int], available_bytes: int) -> None:
    """Raise InvalidRequest if the host cannot take the weights of all models but one, which sleep in its memory."""
    asleep = sum(weight_bytes.values()) - min(weight_bytes.values())
    if asleep > available_bytes:
        parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in weight_bytes.items())
        raise InvalidRequest(
            f"the weights of the models that sleep need {asleep / 2**30:.1f} GiB of the host's memory (all but the "
            f"least of {parts}), and {available_bytes / 2**30:.1f} are free: give models accelerators of their own",
            param="turns",
        )


def _is_busy(status: ServiceStatus) -> bool:
    return any(one.load.num_running + one.load.num_waiting for one in status.replicas)


def _is_wanted(status: ServiceStatus) -> bool:
    """Return True if calls, samples or a weight update wait for a model that sleeps, and its turn helps them."""
    can_run = bool(status.starting) or (status.weight_version is not None and bool(status.replicas))
    # Samples that are held need new weights: the turn of their model would not start them.
    num_ready = status.queue.num_queued - sum(one.num_held for one in status.rollouts)
    is_awaited = _is_busy(status) or num_ready + status.queue.num_waiting > 0
    return status.num_awaiting_turn > 0 or (can_run and is_awaited)
