"""The adapters that the fleet serves by name: pushes of their versions, and the places that they take.

    a push      an older adapter's place, if all are taken ─► load on all replicas at once ─► the fleet's version

Nothing pauses: calls in flight end under the version that they began with. A replica that fails where another one
succeeds joins anew. If all fail nothing has changed.

Ownership: one object of the `ReplicaSync`, whose fleet-wide procedures call `push` and `unload`. It alone writes
the adapters. Invariants: a replica that takes traffic holds all adapters that are served, but for those whose files
it found gone as it joined, and no others; the store names whatever else a replica may hold, before it holds that.
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

_MAX_ABSENT = 32  # processes that have left, and may come back with what they hold
_CLEAR = (InvalidRequest, AdaptersFull)  # an engine that answers so serves what it served


class AdapterSync:
    """The adapters by name. All but `bring` is called within a fleet-wide procedure."""

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
        """`save` writes what is owed, and logs an error; `takers` returns the replicas in service that no procedure
        has; `fell_behind` makes one join anew."""
        self._fleet = fleet
        self._steps = steps
        self._clock = clock
        self._save = save
        self._takers = takers
        self._fell_behind = fell_behind
        self._wall_time = wall_time
        self._log = log
        self.saved = SavedValue(FleetAdapters(), on_adapters)
        self.in_use: Callable[[], Collection[str]] = tuple  # those of unfinished rollouts, which no push takes away
        self.served: tuple[NamedAdapter, ...] = ()  # the one pushed longest ago first
        # What each process may hold, by its URL; None: a version that is not known.
        self._held: dict[str, dict[str, NamedAdapter | None]] = {}
        self._restored: dict[str, NamedAdapter | None] = {}

    def restore(self, adapters: FleetAdapters) -> None:
        """Take up the adapters that an earlier coordinator has stored. Call before replicas join."""
        self._restored = {**dict.fromkeys(adapters.strays), **{one.name: one for one in adapters.served}}
        self._set(adapters.served)

    async def push(self, push: AdapterPush) -> UpdateReport:
        """Serve a version of an adapter. A repeat (same version and content) changes nothing, and gets a report.

        Raises InvalidRequest (a version that does not grow), Conflict (the version is served with other content),
        NoHealthyReplica, AdaptersFull, CheckpointUnreadable, ServiceUnavailable (it cannot be recorded) or
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
        """Serve an adapter no more. Raises ModelNotFound, and AdapterInUse while calls or rollouts are under it."""
        if (adapter := self._of(name)) is None:
            raise ModelNotFound(f"no adapter {shown_id(name)!r} is served", param="name")
        if name in self.in_use() or not await self._unload_on_all(adapter):
            raise AdapterInUse(f"calls or rollouts are under adapter {shown_id(name)!r}", param="name")
        await self._serve(tuple(one for one in self.served if one != adapter))

    async def bring(self, replica: ReplicaRecord) -> None:
        """Have a replica hold what is served and nothing else, which may change meanwhile.

        An adapter whose files are gone costs no other's calls: the replica gets none under it, until it is pushed
        again. Raises what else an engine raises.
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
                        # Other content under this version: only an earlier coordinator knew.
                        await self._unload(replica, one.name)
                    self._fleet.note_adapter(replica, one.name, is_held=False)
            loaded = tuple(wanted.values())

    # --- inside ---

    def _of(self, name: str) -> NamedAdapter | None:
        return next((one for one in self.served if one.name == name), None)

    async def _next(self, push: AdapterPush, known: NamedAdapter | None) -> NamedAdapter:
        """Return what a push makes served: what is served already, if it has the same content."""
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
                    f"{found}: push it as a new version",
                    param="version",
                )
            if push.directory == known.directory:
                return known
            raise Conflict(f"version {version} of {name!r} is what is served", param="version")
        if version < least and not push.is_forced:
            message = f"versions grow: {version} after {least}; with `force` an adapter goes back"
            raise InvalidRequest(message, param="version")
        return NamedAdapter(push.name, version, push.directory, self._wall_time())

    async def _serve(self, served: tuple[NamedAdapter, ...]) -> None:
        """Set and save what is served. If the store fails, the fleet serves it all the same."""
        self._set(served)
        self.saved.owe(self._stored())
        await self._save(self.saved, "adapters_not_saved")

    def _set(self, served: tuple[NamedAdapter, ...]) -> None:
        self.served = served
        self._fleet.adapters = {one.name: one.version for one in served}

    def _stored(self, coming: str = "") -> FleetAdapters:
        """Return what the next coordinator needs: what is served, and other names that replicas may hold, with
        `coming`."""
        present = {one.url for one in self._fleet.replicas}
        for url in [url for url in self._held if url not in present][:-_MAX_ABSENT]:
            del self._held[url]
        names = {coming, *self._restored, *(name for held in self._held.values() for name in held)}
        return FleetAdapters(self.served, frozenset(names - {"", *(one.name for one in self.served)}))

    def _held_by(self, replica: ReplicaRecord) -> dict[str, NamedAdapter | None]:
        return self._held.setdefault(replica.url, dict(self._restored))

    async def _make_room(self, owner: str) -> NamedAdapter | None:
        """Take the place of the adapter that was pushed longest ago and is in no use, if all places are taken.

        Raises AdaptersFull, which names those that the owner of the new one sees, and NoHealthyReplica.
        """
        takers = self._takers()
        if not takers:
            # A replica that is joining without the files of some adapters would accept one more than its places.
            raise _refusal(())
        num_places = min(one.registration.info.max_loras or 0 for one in takers)
        if len(self.served) < num_places or num_places == 0:
            return None
        in_use = self.in_use()
        for one in self.served:
            if one.name not in in_use and await self._unload_on_all(one):
                return one
        names = ", ".join(one.name for one in seen_adapters(self.served, (owner,) if owner else None))
        raise AdaptersFull(f"all {num_places} places have adapters in use: {names or 'of others'}", param="name")

    async def _load_on_all(self, adapter: NamedAdapter) -> tuple[list[ReplicaProgress], NamedAdapter]:
        """Load a version on all replicas in service, also on those that join meanwhile. Adds its digest."""
        done: list[ReplicaProgress] = []
        while new := self._others(done):
            done += await self._load_at_once(new, adapter)
            digests = [one.staged.digest for one in unfailed(done) if one.staged is not None]
            adapter = replace(adapter, digest=next(filter(None, digests), adapter.digest))
            for one in unfailed(done):
                if one.staged is not None and one.staged.digest not in ("", adapter.digest):
                    one.error = f"load: it read digest {one.staged.digest}, and others {adapter.digest}"
        failed = [one for one in done if one.error is not None]
        is_refused = len(failed) == len(done)
        for one in failed:
            if not (is_refused and isinstance(one.failure, _CLEAR)):
                self._fell_behind(one)
        if is_refused:
            raise _refusal(failed)
        return done, adapter

    def _others(self, done: Sequence[ReplicaProgress]) -> list[ReplicaRecord]:
        """Return the replicas in service that a step has not reached: they came while it went on."""
        return [one for one in self._takers() if one.url not in {other.replica.url for other in done}]

    async def _load_again(self, replicas: Sequence[ReplicaRecord], adapter: NamedAdapter) -> None:
        """Load an adapter that was unloaded and is served on."""
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
        """Unload an adapter on all replicas in service, or on none: False while calls or rollouts are under it."""
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
    """Return the error of a push that every replica has refused."""
    if not failed:
        return NoHealthyReplica("no replica can take an adapter now")
    if all(isinstance(one.failure, CheckpointUnreadable) for one in failed):
        return CheckpointUnreadable(failures(failed), param="adapter")
    if all(isinstance(one.failure, AdaptersFull) for one in failed):
        return AdaptersFull("every place has an older version that calls in flight are under", param="name")
    return WeightUpdateFailed(f"nothing has changed: {failures(failed)}")
