"""Time sharing of accelerators: one model is awake while the others sleep.

A model is wanted while calls, samples or a weight update wait for it. It replaces the awake model when that is
idle or has used its time. A sleep freezes running requests and the next wake continues them, so no call ends. The
awake model is read from the models themselves, so a new coordinator continues. If an operator or trainer puts a
model to sleep, all others sleep too until it is woken, because another program uses the accelerators.
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
IDLE_S = 1.0  # longer than the gaps between the turns of a few trajectories

_log = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True)
class TurnsModel:
    """A model that shares its accelerators: calls of its coordinator, and the number of its replicas."""

    status: Callable[[], Awaitable[ServiceStatus]]
    sleep: Callable[[int, str], Awaitable[None]]
    wake: Callable[[frozenset[MemoryTag]], Awaitable[None]]
    num_replicas: int


@dataclass(slots=True)
class _Turn:
    began_at: float
    busy_at: float  # the last time it had work


class ModelTurns:
    """The time sharing of a service's models by name, the policy first. `run` never returns."""

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
        self._next = next(iter(models))  # the last model that was woken

    async def run(self) -> None:
        """Start the models one after another, the policy last, then share the accelerators."""
        policy, *others = self._models
        for name in (*others, policy):
            await self._start(name)
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self._look()
            except AgentLoopError as error:  # the next poll retries
                _log.warning("turn_failed", code=error.code, error=str(error))

    async def _start(self, name: str) -> None:
        """Start a model's replicas while all others sleep, because loading may need all memory."""
        model, deadline_at = self._models[name], self._clock.now() + self._start_timeout_s
        while self._clock.now() < deadline_at:
            try:
                if len((await model.status()).replicas) >= model.num_replicas:
                    return
                await self._give(name)
            except AgentLoopError as error:  # its coordinator may not run yet
                _log.debug("model_not_started", model=name, code=error.code, error=str(error))
            await self._clock.sleep(LOOK_S)

    async def _look(self) -> None:
        """Wake another model if it is due."""
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
        if len(awake) != 1:  # a change failed halfway, or a new coordinator polls for the first time
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
        """Put all other models to sleep, then wake this one. The next poll retries after an error."""
        self._next, statuses = name, await self._statuses()
        # Also models that sleep, because a replica may have failed to. A sleep ordered by a trainer keeps its
        # reason.
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
    """Raise InvalidRequest if the host's memory cannot hold the weights of all models but the smallest one."""
    asleep = sum(weight_bytes.values()) - min(weight_bytes.values())
    if asleep > available_bytes:
        parts = " + ".join(f"{name} {size / 2**30:.1f}" for name, size in weight_bytes.items())
        raise InvalidRequest(
            f"the weights of sleeping models need {asleep / 2**30:.1f} GiB of host memory (all but the "
            f"smallest of {parts}), but {available_bytes / 2**30:.1f} GiB are free: use separate accelerators",
            param="turns",
        )


def _is_busy(status: ServiceStatus) -> bool:
    return any(one.load.num_running + one.load.num_waiting for one in status.replicas)


def _is_wanted(status: ServiceStatus) -> bool:
    """Return True if work waits for a sleeping model and can run once it is awake."""
    can_run = bool(status.starting) or (status.weight_version is not None and bool(status.replicas))
    # Held samples need new weights, so waking their model would not start them.
    num_ready = status.queue.num_queued - sum(one.num_held for one in status.rollouts)
    is_awaited = _is_busy(status) or num_ready + status.queue.num_waiting > 0
    return status.num_awaiting_turn > 0 or (can_run and is_awaited)
