"""Catching up: one replica at a time is brought to the fleet's weights and into traffic, outside an update.

Its weights come from where the fleet's came from, or, if that was a push that is over, from another replica that
holds them. In a sleeping fleet it is put to sleep as it is, and brought up when the fleet has woken: until then its
memory is somebody else's.

Ownership: acts through the `FleetEngines` it is given; the replica is `busy` from the stage to the end.
"""

from __future__ import annotations

from dataclasses import replace

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from agentloop.engine import MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, Conflict
from agentloop.fleet.engines import FleetEngines
from agentloop.fleet.parallel_step import within
from agentloop.fleet.power import FleetPower
from agentloop.fleet.registry import Replica, ReplicaState
from agentloop.types import KVPolicy, PauseMode


class CatchUp:
    """Brings late replicas up."""

    def __init__(self, engines: FleetEngines, power: FleetPower) -> None:
        self._engines = engines
        self._power = power

    async def bring_up(self, replica_id: str) -> bool:
        """Bring a JOINING or QUARANTINED replica to the fleet's weights and into traffic, with retries.

        A replica that already holds them is only resumed (or paused, if the operator has paused the fleet). False
        if it is gone or asleep with all others, or if nothing can give it the weights (its `error` then says so):
        the next update will. Raises the last attempt's error.
        """
        config = self._engines.config
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Exception),
            stop=stop_after_attempt(config.max_catch_up_attempts),
            wait=wait_random_exponential(multiplier=config.backoff_s, max=config.max_backoff_s),
            sleep=self._engines.clock.sleep,
            reraise=True,
        )
        return await retrying(self._once, replica_id)

    async def _once(self, replica_id: str) -> bool:
        engines = self._engines
        await engines.idle()
        replica = engines.fleet.get(replica_id)
        if replica is None:
            return False
        if replica.state not in (ReplicaState.JOINING, ReplicaState.QUARANTINED):
            return replica.state is ReplicaState.READY
        if replica_id in engines.busy:
            raise Conflict(f"replica {replica_id} is being brought up already")
        engines.busy.add(replica_id)
        try:
            is_placed = await self._bring_up(replica)
        finally:
            engines.busy.discard(replica_id)
            engines.settle(replica, "bringing it up was cut short")
        now = engines.fleet.get(replica_id)
        if is_placed is None or now is None or now.state is ReplicaState.ASLEEP:
            return False
        if not is_placed:
            raise Conflict(f"the fleet has moved on while {replica_id} was brought up")
        return True

    async def _bring_up(self, replica: Replica) -> bool | None:
        """Whether it takes traffic now; None if there is nothing to be done for it yet."""
        engines = self._engines
        is_quarantined = replica.state is ReplicaState.QUARANTINED
        if engines.asleep and is_quarantined:
            await self._power.place_quarantined(replica)
            return None
        update = None
        if not engines.asleep and (is_quarantined or not engines.is_current(replica)):
            update = await self._offered(replica)
            if update is None:
                return None
            await self._stage(replica, update[0])
        if engines.fleet.begin_update(replica) is None:
            return False
        if update is not None:
            await self._commit(replica, *update)
        async with engines.gate:
            return await self._power.place(replica)

    async def _stage(self, replica: Replica, update: WeightUpdate) -> None:
        engine, config = self._engines.engine(replica), self._engines.config
        if replica.registration.info.can_sleep:  # it may have slept through the fleet's wake
            await within(config.wake_timeout_s, engine.wake(frozenset({MemoryTag.WEIGHTS})))
        await within(config.stage_timeout_s, engine.stage(update))

    async def _commit(self, replica: Replica, update: WeightUpdate, kv_policy: KVPolicy) -> None:
        engine, config, fleet = self._engines.engine(replica), self._engines.config, self._engines.fleet
        await within(config.pause_timeout_s, engine.pause(PauseMode.KEEP, kv_policy))
        fleet.forget_version(replica)
        await within(config.commit_timeout_s, engine.commit(update.version))
        fleet.committed(replica, update.version)

    # --- where its weights come from ---

    async def _offered(self, replica: Replica) -> tuple[WeightUpdate, KVPolicy] | None:
        """The fleet's weights from a source that is there; None if there is none now."""
        served = self._engines.served()
        if served is None or served[0].is_repeatable:
            return served
        update, kv_policy = served
        refusals = []
        for peer in self._peers(replica):
            try:
                return await self._relayed(update.version, peer, replica), kv_policy
            except (AgentLoopError, TimeoutError, OSError) as error:
                refusals.append(f"{peer.replica_id}: {error or 'no answer'}")
        if self._engines.served() != served:
            raise Conflict("the fleet has moved on while its replicas were asked for their weights")
        tried = "; ".join(refusals) or "no peer"
        reason = f"version {update.version} was pushed, and nobody can give it on ({tried})"
        self._engines.fleet.note(replica, reason)
        return None

    def _peers(self, replica: Replica) -> list[Replica]:
        """Who holds the fleet's weights in the form in which `replica` needs them."""
        info = replica.registration.info
        return [
            peer
            for peer in self._engines.fleet.placeable()
            if peer.replica_id != replica.replica_id
            and peer.registration.info.name == info.name
            and peer.registration.info.num_workers == info.num_workers
        ]

    async def _relayed(self, version: int, peer: Replica, replica: Replica) -> WeightUpdate:
        """Raises Conflict if the peer cannot give these weights, or what the call raised."""
        engines = self._engines
        offer = await within(engines.config.offer_timeout_s, engines.engine(peer).offer())
        if offer is None:
            raise Conflict("it cannot")
        now = engines.fleet.get(peer.replica_id)
        if now is None or now.weight_version != version or engines.fleet.weight_version != version:
            raise Conflict("its weights changed while it made the offer")
        return WeightUpdate(version, push=replace(offer, num_receivers=replica.registration.info.num_workers))
