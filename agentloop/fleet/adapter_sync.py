"""The adapters that the fleet serves by name: pushes of versions, and the slots that they use.

    a push      evict the oldest unused adapter if all slots are used ─► load on all replicas ─► the fleet's version

Nothing pauses: calls in flight finish with the version that they started with. A replica that fails while another
succeeds joins again; if all fail, nothing changes.

`ReplicaSync` owns the one object, and only it writes the adapters. Invariants: a replica in traffic holds exactly
the served adapters, except those whose files were missing when it joined; a name is stored before a replica may
hold it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import AdapterPush, NamedAdapter, UpdateReport, seen_adapters
from agentloop.api.owners import owner_of, shown_id
from agentloop.concurrency.clock import Clock
from agentloop.engine.interface import Adapter, StageReport, WeightUpdate
from agentloop.engine.weight_digest import are_comparable
from agentloop.errors import (
    AdapterInUse,
    AdaptersFull,
    AgentLoopError,
    CheckpointUnreadable,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    NoHealthyReplica,
    WeightUpdateFailed,
    error_line,
)
from agentloop.fleet.desired_state import FleetAdapters, SavedValue
from agentloop.fleet.registry import Fleet, ReplicaRecord
from agentloop.fleet.replica_steps import ReplicaProgress, ReplicaSteps, StepLimits, failures, on_all, unfailed
from agentloop.fleet.weight_update import READ_SLOWNESS
from agentloop.types import KVPolicy

_MAX_ABSENT = 32  # departed processes that may return with their adapters
_CLEAR = (InvalidRequest, AdaptersFull)  # after these errors the engine's adapters are unchanged


class AdapterSync:
    """The named adapters. All methods except `bring` are called within a fleet-wide procedure."""

    def __init__(
        self,
        fleet: Fleet,
        steps: ReplicaSteps,
        clock: Clock,
        on_adapters: Callable[[FleetAdapters], Awaitable[None]] | None,
        *,
        save: Callable[[SavedValue[FleetAdapters], str], Awaitable[None]],
        takers: Callable[[], Sequence[ReplicaRecord]],
        fell_behind: Callable[[ReplicaProgress], None],
        wall_time: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        """`save` writes a pending value and logs errors.

        `takers` returns the replicas in service that no procedure has locked; `fell_behind` makes one join again.
        """
        self._fleet = fleet
        self._steps = steps
        self._clock = clock
        self._save = save
        self._takers = takers
        self._fell_behind = fell_behind
        self._wall_time = wall_time
        self._log = log
        self.saved = SavedValue(FleetAdapters(), on_adapters)
        self.in_use: Callable[[], Collection[str]] = tuple  # adapters of unfinished rollouts, which no push evicts
        self.served: tuple[NamedAdapter, ...] = ()  # in push order, oldest first
        # Process URL -> the adapters that it may hold; None: of an unknown version.
        self._held: dict[str, dict[str, NamedAdapter | None]] = {}
        self._restored: dict[str, NamedAdapter | None] = {}

    def restore(self, adapters: FleetAdapters) -> None:
        """Load the adapters that an earlier coordinator stored. Call before replicas join."""
        self._restored = {**dict.fromkeys(adapters.strays), **{one.name: one for one in adapters.served}}
        self._set(adapters.served)

    async def push(self, push: AdapterPush) -> UpdateReport:
        """Serve a version of an adapter. A repeated push (same version and content) only returns a report.

        Raises InvalidRequest (the version does not increase), Conflict (the version is served with other content),
        NoHealthyReplica, AdaptersFull, CheckpointUnreadable, ServiceUnavailable (it cannot be stored) or
        WeightUpdateFailed.
        """
        started_at, began_at, known = self._clock.now(), self._wall_time(), self._of(push.name)
        adapter = await self._next(push, known)
        evicted = await self._make_room(owner_of(push.name)) if known is None else None
        try:
            coming, before = self._stored(adapter.name), self._stored()
            await self.saved.save_first(coming, before, self._steps.config.save_timeout_s)
            progress, adapter = await self._load_on_all(adapter)
        except Exception:
            if evicted is not None:
                await self._load_again(self._takers(), evicted)
            raise
        if adapter != known:
            kept = (one for one in self.served if one.name != adapter.name and one != evicted)
            await self._serve((*kept, adapter))
        return UpdateReport(
            version=adapter.version,
            previous_version=None if known is None else known.version,
            kv_policy=KVPolicy.FRESH,
            replicas=tuple(one.report() for one in progress),
            total_ms=(self._clock.now() - started_at) * 1000.0,
            began_at=began_at,
            adapter=adapter.name,
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter.

        Raises ModelNotFound if it is not served, and AdapterInUse while calls or rollouts use it.
        """
        if (adapter := self._of(name)) is None:
            raise ModelNotFound(
                f"unknown adapter {shown_id(name)!r}: it is not served; push it first", param="name"
            )
        if name in self.in_use() or not await self._unload_on_all(adapter):
            raise AdapterInUse(
                f"adapter {shown_id(name)!r} is used by calls or rollouts: retry after they finish", param="name"
            )
        await self._serve(tuple(one for one in self.served if one != adapter))

    async def bring(self, replica: ReplicaRecord) -> None:
        """Load the served adapters on a replica and unload all others. Repeats while the served ones change.

        If an adapter's files are gone, the replica gets no calls of this adapter until it is pushed again, and
        serves all others. Re-raises other errors of the engine.
        """
        held, loaded = self._held_by(replica), None
        while loaded != self.served:
            wanted = {one.name: one for one in self.served}
            for name, known in tuple(held.items()):
                new = wanted.get(name)
                if new is None or (known != new and (known is None or known.version == new.version)):
                    await self._unload(replica, name)
            for one in wanted.values():
                try:
                    await self._load(replica, one)
                except Exception as error:
                    self._log.warning(
                        "adapter_not_loaded",
                        replica=replica.replica_id,
                        adapter=one.name,
                        version=one.version,
                        error=error_line(error),
                    )
                    if not isinstance(error, CheckpointUnreadable):
                        raise
                    if (known := held.get(one.name)) is not None and known.version == one.version:
                        # The replica has other content under this version, which an earlier coordinator loaded.
                        await self._unload(replica, one.name)
                    self._fleet.note_adapter(replica, one.name, is_held=False)
            loaded = tuple(wanted.values())

    def _of(self, name: str) -> NamedAdapter | None:
        return next((one for one in self.served if one.name == name), None)

    async def _next(self, push: AdapterPush, known: NamedAdapter | None) -> NamedAdapter:
        """Return the adapter after the push: the served one if the content is equal."""
        least = -1 if known is None else known.version
        version = least + 1 if push.version is None else push.version
        if known is not None and version == known.version:
            found, name = "", shown_id(push.name)
            if known.digest and (takers := self._takers()):
                probe = WeightUpdate(version, adapter=push.directory, is_probe=True)
                found = await self._steps.digest_of(takers[0], probe)
            if are_comparable(found, known.digest) and found != known.digest:
                raise Conflict(
                    f"version {version} of {name!r} is served with digest {known.digest}, and {push.directory} has "
                    f"{found}: push it with a new version",
                    param="version",
                )
            if push.directory == known.directory:
                return known
            raise Conflict(
                f"version {version} of {name!r} is already served from {known.directory}: push a new version",
                param="version",
            )
        if version < least and not push.is_forced:
            message = (
                f"version {version} is lower than the served version {least}: push a higher one or use `force`"
            )
            raise InvalidRequest(message, param="version")
        return NamedAdapter(push.name, version, push.directory, self._wall_time())

    async def _serve(self, served: tuple[NamedAdapter, ...]) -> None:
        """Set and save the served adapters. The fleet serves them even if the store fails."""
        self._set(served)
        self.saved.owe(self._stored())
        await self._save(self.saved, "adapters_not_saved")

    def _set(self, served: tuple[NamedAdapter, ...]) -> None:
        self.served = served
        self._fleet.adapters = {one.name: one.version for one in served}

    def _stored(self, coming: str = "") -> FleetAdapters:
        """Return the value to store: the served adapters, and the other names that replicas may hold, with
        `coming`."""
        present = {one.url for one in self._fleet.replicas}
        for url in [url for url in self._held if url not in present][:-_MAX_ABSENT]:
            del self._held[url]
        names = {coming, *self._restored, *(name for held in self._held.values() for name in held)}
        return FleetAdapters(self.served, frozenset(names - {"", *(one.name for one in self.served)}))

    def _held_by(self, replica: ReplicaRecord) -> dict[str, NamedAdapter | None]:
        return self._held.setdefault(replica.url, dict(self._restored))

    async def _make_room(self, owner: str) -> NamedAdapter | None:
        """Evict the adapter that was pushed longest ago and is not in use, if all slots are used.

        Raises AdaptersFull, with the names that the new adapter's owner may see, and NoHealthyReplica.
        """
        takers = self._takers()
        if not takers:
            # A joining replica that skipped some adapters would accept more than the number of slots.
            raise _refusal(())
        num_places = min(one.registration.info.max_loras or 0 for one in takers)
        if len(self.served) < num_places or num_places == 0:
            return None
        in_use = self.in_use()
        for one in self.served:
            if one.name not in in_use and await self._unload_on_all(one):
                return one
        names = ", ".join(one.name for one in seen_adapters(self.served, (owner,) if owner else None))
        raise AdaptersFull(
            f"all {num_places} adapter slots are in use: {names or 'by adapters of other owners'}; unload one, "
            "or raise max_loras",
            param="name",
        )

    async def _load_on_all(self, adapter: NamedAdapter) -> tuple[list[ReplicaProgress], NamedAdapter]:
        """Load a version on all replicas in service, including replicas that join during the load.

        Returns each replica's progress, and a copy of `adapter` with the digest of the loaded weights.
        """
        done: list[ReplicaProgress] = []
        while new := self._others(done):
            done += await self._load_at_once(new, adapter)
            digests = [one.staged.digest for one in unfailed(done) if one.staged is not None]
            adapter = replace(adapter, digest=next(filter(None, digests), adapter.digest))
            for one in unfailed(done):
                if one.staged is not None and one.staged.digest not in ("", adapter.digest):
                    one.error = (
                        f"load: it read content with digest {one.staged.digest}, other replicas {adapter.digest}"
                    )
        failed = [one for one in done if one.error is not None]
        is_refused = len(failed) == len(done)
        for one in failed:
            if not (is_refused and isinstance(one.failure, _CLEAR)):
                self._fell_behind(one)
        if is_refused:
            raise _refusal(failed)
        return done, adapter

    def _others(self, done: Sequence[ReplicaProgress]) -> list[ReplicaRecord]:
        """Return the replicas in service that joined after the step began."""
        return [one for one in self._takers() if one.url not in {other.replica.url for other in done}]

    async def _load_again(self, replicas: Sequence[ReplicaRecord], adapter: NamedAdapter) -> None:
        """Load an adapter again that was unloaded but stays served."""
        for one in await self._load_at_once(replicas, adapter):
            if one.error is not None:
                self._fell_behind(one)

    async def _load_at_once(
        self, replicas: Sequence[ReplicaRecord], adapter: NamedAdapter
    ) -> list[ReplicaProgress]:
        progress = [ReplicaProgress(one) for one in replicas]
        started_at, config = self._clock.now(), self._steps.config

        async def load(one: ReplicaProgress) -> None:
            one.staged = await self._load(one.replica, adapter)
            one.stage_s = self._clock.now() - started_at

        limits = StepLimits(config.stage_timeout_s, config.straggler_grace_s, slowness=READ_SLOWNESS)
        await on_all(progress, "load", load, limits)
        return progress

    async def _load(self, replica: ReplicaRecord, adapter: NamedAdapter) -> StageReport:
        held = self._held_by(replica)
        before = {name: known for name, known in held.items() if name == adapter.name}
        held[adapter.name] = None
        try:
            wanted = Adapter(adapter.name, adapter.version, adapter.directory, adapter.digest)
            report = await self._steps.load_adapter(replica, wanted)
        except _CLEAR:
            held.pop(adapter.name, None)
            held.update(before)
            raise
        held[adapter.name] = replace(adapter, digest=report.digest)
        self._fleet.note_adapter(replica, adapter.name, is_held=True)
        return report

    async def _unload_on_all(self, adapter: NamedAdapter) -> bool:
        """Unload an adapter on all replicas in service. Returns False, and loads it again, if it is in use."""
        progress: list[ReplicaProgress] = []

        async def unload(one: ReplicaProgress) -> None:
            await self._unload(one.replica, adapter.name)

        while new := [ReplicaProgress(one) for one in self._others(progress)]:
            progress += new
            await on_all(new, "unload", unload)
        is_in_use = any(isinstance(one.failure, AdapterInUse) for one in progress) or adapter.name in self.in_use()
        for one in progress:
            if one.error is not None and not isinstance(one.failure, AdapterInUse):
                self._fell_behind(one)
        if is_in_use:
            await self._load_again([one.replica for one in unfailed(progress)], adapter)
        return not is_in_use

    async def _unload(self, replica: ReplicaRecord, name: str) -> None:
        await self._steps.unload_adapter(replica, name)
        self._held_by(replica).pop(name, None)


def _refusal(failed: Sequence[ReplicaProgress]) -> AgentLoopError:
    """Return the error for a push that failed on every replica."""
    if not failed:
        return NoHealthyReplica("no healthy replica can load an adapter now: retry later")
    if all(isinstance(one.failure, CheckpointUnreadable) for one in failed):
        return CheckpointUnreadable(failures(failed), param="adapter")
    if all(isinstance(one.failure, AdaptersFull) for one in failed):
        return AdaptersFull(
            "every adapter slot has an older version that calls in flight use: retry after they finish",
            param="name",
        )
    return WeightUpdateFailed(
        f"no replica could load the adapter, and the served adapters are unchanged: {failures(failed)}"
    )
