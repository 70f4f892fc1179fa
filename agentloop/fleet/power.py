"""The operator's orders: the whole fleet frozen, asleep, or going on; and each late replica as all the others.

Ownership: acts through the `FleetEngines` it is given, always under its gate. A replica that did not follow an
order joins anew: bringing it up gives it the order again, so no replica is forgotten frozen or asleep.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agentloop.engine import ALL_MEMORY, EngineControl, MemoryTag
from agentloop.errors import EngineLost, InvalidRequest
from agentloop.fleet.engines import FleetEngines
from agentloop.fleet.parallel_step import Track, live, named, on_all, within
from agentloop.fleet.registry import Replica, ReplicaState
from agentloop.types import PauseMode


class FleetPower:
    """Pause and resume, sleep and wake."""

    def __init__(self, engines: FleetEngines) -> None:
        self._engines = engines

    async def pause(self, mode: PauseMode) -> None:
        """Pause every replica until `resume`; replicas that join or update meanwhile end paused. Idempotent.

        Raises EngineLost naming those that did not follow; the pause holds for all others.
        """
        engines = self._engines
        async with engines.gate:
            engines.operator_mode = mode
            await self._order("pause", lambda engine: engine.pause(mode), engines.config.operator_pause_timeout_s)

    async def resume(self) -> None:
        """Undo `pause`. Idempotent. Raises EngineLost naming those that did not follow."""
        engines = self._engines
        async with engines.gate:
            engines.operator_mode = None
            await self._order("resume", lambda engine: engine.resume(), engines.config.resume_timeout_s)

    async def sleep(self, level: int) -> None:
        """Freeze every replica and give its memory back; those that join meanwhile follow. Idempotent.

        Raises InvalidRequest, with nothing touched, if a replica cannot sleep; EngineLost naming those that did not
        follow. Waits for a weight update to end.
        """
        engines = self._engines
        if level not in (1, 2):
            raise InvalidRequest(f"sleep levels are 1 and 2, not {level}", param="level")
        await engines.idle()
        with engines.fleet_wide("a sleep"):
            async with engines.gate:
                replicas = engines.fleet.replicas
                if unable := [one.replica_id for one in replicas if not one.registration.info.can_sleep]:
                    raise InvalidRequest(f"cannot sleep: {', '.join(unable)}")
                has_weights = MemoryTag.WEIGHTS not in engines.asleep
                engines.sleep_level = level if has_weights else max(level, engines.sleep_level)
                engines.asleep = ALL_MEMORY
                await self._sleep_all()

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back whose contents are still there; once all of it is, go on. Idempotent. Call it as a
        fleet-wide procedure. Replicas of unknown weights keep their KV cache asleep until a commit has ended that.

        Raises EngineLost naming those that did not follow; all others are awake.
        """
        engines, config = self._engines, self._engines.config
        async with engines.gate:
            engines.asleep -= tags
            tracks = [Track(replica) for replica in engines.free(ReplicaState.ASLEEP)]

            async def wake(track: Track) -> None:
                await engines.engine(track.replica).wake(self._wakeable(track.replica, tags))

            try:
                await on_all(tracks, "wake", wake, config.wake_timeout_s)
                if not engines.asleep:
                    engines.sleep_level = 0
                    await self._go_on_all(live(tracks))
                self._raise_failed(tracks)
            finally:
                for track in tracks:
                    engines.settle(track.replica, "the wake was cut short")

    async def place(self, replica: Replica) -> bool:
        """Make an UPDATING replica what all others are: asleep, paused or serving. True if it takes traffic now.

        Call it under the gate.
        """
        engines = self._engines
        if engines.asleep:
            await self._lull(replica)
            engines.fleet.fall_asleep(replica)
            return False
        if replica.registration.info.can_sleep:
            await within(engines.config.wake_timeout_s, engines.engine(replica).wake(ALL_MEMORY))
        return await self._go_on(replica)

    async def place_quarantined(self, replica: Replica) -> None:
        """Give back the memory of a replica that is not to be brought up before the fleet wakes."""
        async with self._engines.gate:
            if self._engines.asleep:
                await self._lull(replica)

    # --- inside, under the gate ---

    async def _sleep_all(self) -> None:
        engines = self._engines
        states = (ReplicaState.READY, ReplicaState.SUSPECT, ReplicaState.JOINING, ReplicaState.ASLEEP)
        tracks = [Track(replica) for replica in engines.free(*states)]
        for track in tracks:
            engines.fleet.begin_update(track.replica)
        quarantined = [Track(replica) for replica in engines.free(ReplicaState.QUARANTINED)]

        async def sleep(track: Track) -> None:
            await self._lull(track.replica)
            engines.fleet.fall_asleep(track.replica)  # not those in quarantine

        try:
            await on_all([*tracks, *quarantined], "sleep", sleep, engines.config.sleep_timeout_s)
            self._raise_failed([*tracks, *quarantined])
        finally:
            for track in tracks:
                engines.settle(track.replica, "the sleep was cut short")

    async def _lull(self, replica: Replica) -> None:
        """Have it give back what the fleet has given back."""
        engines, config = self._engines, self._engines.config
        engine = engines.engine(replica)
        if engines.sleep_level == 2:
            engines.fleet.forget_version(replica)
        await within(config.sleep_timeout_s, engine.sleep(engines.sleep_level))
        if awake := self._wakeable(replica, ALL_MEMORY - engines.asleep):
            await within(config.wake_timeout_s, engine.wake(awake))

    def _wakeable(self, replica: Replica, tags: frozenset[MemoryTag]) -> frozenset[MemoryTag]:
        """What a replica can take back now: a KV cache is of known weights."""
        now = self._engines.fleet.get(replica.replica_id)
        is_known = now is not None and now.weight_version is not None
        return tags if is_known else tags - {MemoryTag.KV_CACHE}

    async def _go_on_all(self, tracks: Sequence[Track]) -> None:
        """Those that do not follow are left in UPDATING, with an error."""
        engines = self._engines
        for track in tracks:
            engines.fleet.begin_update(track.replica)

        async def go_on(track: Track) -> None:
            await self._go_on(track.replica)

        await on_all(tracks, "resume", go_on, self._go_on_timeout_s)

    @property
    def _go_on_timeout_s(self) -> float:
        config = self._engines.config
        is_paused = self._engines.operator_mode is not None
        return config.operator_pause_timeout_s if is_paused else config.resume_timeout_s

    async def _go_on(self, replica: Replica) -> bool:
        """Back to work, unless its weights are not the fleet's: then it stays frozen until it is brought up."""
        engines, mode = self._engines, self._engines.operator_mode
        now = engines.fleet.get(replica.replica_id)
        if now is not None and engines.is_current(now):
            engine = engines.engine(replica)
            await within(self._go_on_timeout_s, engine.resume() if mode is None else engine.pause(mode))
        return engines.fleet.admit(replica)

    async def _order(self, verb: str, ask: Callable[[EngineControl], Awaitable[None]], timeout_s: float) -> None:
        engines = self._engines
        states = (ReplicaState.READY, ReplicaState.SUSPECT)
        tracks = [Track(replica) for replica in engines.fleet.replicas if replica.state in states]

        async def follow(track: Track) -> None:
            await ask(engines.engine(track.replica))

        await on_all(tracks, verb, follow, timeout_s)
        self._raise_failed(tracks)

    def _raise_failed(self, tracks: Sequence[Track]) -> None:
        """Have those that did not follow join anew. Raises EngineLost naming them."""
        failed = [track for track in tracks if track.error is not None]
        for track in failed:
            self._engines.fleet.rejoin(track.replica, track.error or "")
        if failed:
            raise EngineLost(named(failed))
