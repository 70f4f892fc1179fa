"""The whole service in virtual time, with adapters by name instead of updates of its weights.

A trainer pushes versions of the adapters that clients use, and of others, which compete for the same slots.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from agentloop.api.coordinator import AdapterPush, NamedAdapter
from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import ALL_MEMORY, Adapter, StageReport, WeightUpdate
from agentloop.errors import AdapterInUse, AdaptersFull, ModelNotFound
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from tests.support.fleet.schedules import REFUSALS, Process
from tests.support.fleet.whole_world import WholeWorld

USED = ("a", "b", "c")  # used by clients
OTHERS = ("x", "y", "z")
NUM_PLACES = 4


class HoldingEngine(SimulatedEngine):
    """Reports the adapters that it serves by name."""

    def __init__(self, spec: SimulatedSpec, **parts: Any) -> None:
        super().__init__(spec, **parts)
        self.held: dict[str, int] = {}
        self.digests: dict[str, str] = {}

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        report = await super().load_adapter(adapter)
        self.held[adapter.name], self.digests[adapter.name] = adapter.version, report.digest
        return report

    async def unload_adapter(self, name: str) -> None:
        await super().unload_adapter(name)
        self.held.pop(name, None)


class AdapterWorld(WholeWorld):
    """The complete state of one schedule. The base weights are always version 0."""

    make_engine = HoldingEngine

    def __init__(self, seed: int, clock: VirtualClock, checkpoint: Path, folder: Path) -> None:
        super().__init__(seed, clock, checkpoint, folder, has_words=True)
        self.initial_version = 0
        self.config = replace(self.config, initial_weights=WeightUpdate(0, self.checkpoint))
        self.sleep_levels = (1,)
        self.boot_versions = (0,)
        self.pushed: dict[str, set[int]] = {}

    def spec(self, version: int | None) -> SimulatedSpec:
        return replace(super().spec(version), lora_rank=8, max_loras=NUM_PLACES)

    def adapter_of(self, name: str) -> str:
        return Random(f"adapter of {name} {self.seed}").choice(("", *USED, *USED))

    def known_versions(self, adapter: str) -> set[int]:
        return self.pushed.get(adapter, set()) if adapter else {0}

    def served_version(self, adapter: str) -> int | None:
        return self.coordinator.replicas.fleet.version_of(adapter)

    async def push(self, is_readable: bool = True) -> None:
        """Push the next version of an adapter, an end, or an older version."""
        rng, replicas = self.rng, self.coordinator.replicas
        name = rng.choice((*USED, *OTHERS))
        if name in OTHERS and rng.random() < 0.3:
            await self._refused_or(name, self.ask(lambda c: c.replicas.unload_adapter(name)))
            return
        for known in replicas.sync.adapters.served:
            if known.name == name and self.may_rewrite(known.directory):
                await self.push_rewritten(known.directory, self._push(name, known.version, known.directory))
                return
        served = replicas.fleet.version_of(name)
        version = max(0, (0 if served is None else served) + rng.choice((-1, 0, 1, 1, 1, 2)))
        directory = self.folders.folder_of(f"{name}-{version}") if is_readable else self.checkpoint + "-missing"
        self.maybe_rewrite_during_read(directory)
        await self._push(name, version, directory)

    async def _push(self, name: str, version: int, directory: str) -> None:
        self.pushed.setdefault(name, set()).add(version)
        push = AdapterPush(name, directory, version)
        await self._refused_or(name, self.ask(lambda c: c.replicas.push_adapter(push)))

    async def _refused_or(self, name: str, command) -> None:
        replicas = self.coordinator.replicas
        before = {*replicas.fleet.adapters}
        try:
            report = await command
        except (AdapterInUse, AdaptersFull, ModelNotFound) as error:
            self.history.counts[type(error).__name__] += 1
        else:
            self.history.counts["unloaded" if report is None else "adapter pushed"] += 1
            self.history.counts["evicted"] += report is not None and bool(before - {name, *replicas.fleet.adapters})
            if report is not None:
                self.history.counts["replica failed"] += any(one.error for one in report.replicas)

    def watch(self) -> None:
        """Check that no serving engine has an outdated adapter."""
        super().watch()
        served = {} if self._is_down else self.coordinator.replicas.fleet.adapters
        for process in self.placeable():
            held = held_by(process)
            record = self.coordinator.replicas.fleet.get(process.replica_id)
            lacks = record.lacks if record is not None else frozenset()  # it gets no calls under these adapters
            behind = {name for name, version in served.items() if held.get(name, version) < version} - lacks
            assert not behind, f"{process.url} takes traffic under {served}, and has {held}"
            for one in self.coordinator.replicas.sync.adapters.served if served else ():
                digest = digest_of(process, one)
                assert digest in ("", one.digest), f"{process.url} has {digest} as {one}"

    def served_digest(self, directory: str) -> str:
        served = self.coordinator.replicas.sync.adapters.served
        return next((one.digest for one in served if one.directory == directory), "")

    def restore_folders(self) -> None:
        for one in self.coordinator.replicas.sync.adapters.served:
            self.folders.restore(one.directory, one.digest)

    async def needs_a_push(self) -> bool:
        self.restore_folders()
        replicas = self.coordinator.replicas
        is_complete = set(USED) <= replicas.fleet.adapters.keys() and not self._missing()
        return bool(replicas.sync.desired.orders.asleep) or not is_complete

    def _missing(self) -> list[NamedAdapter]:
        """Return the served adapters that a serving replica does not have, because it could not read them."""
        replicas = self.coordinator.replicas
        lacks = {name for one in replicas.fleet.placeable() for name in one.lacks}
        return [one for one in replicas.sync.adapters.served if one.name in lacks]

    async def push_until_done(self) -> None:
        """Push all adapters that clients use, and no others."""
        await self.wake(ALL_MEMORY)
        for _ in range(200):
            unserved = {*USED} - self.coordinator.replicas.fleet.adapters.keys()
            pushes = [(one.name, one.version, one.directory) for one in self._missing()]
            pushes += [(name, 0, self.folders.folder_of(f"{name}-0")) for name in USED if name in unserved]
            for name, version, directory in pushes:
                with suppress(*REFUSALS):
                    await self._push(name, version, directory)
            if not await self.needs_a_push():
                return
            await self.clock.sleep(0.5)
        raise AssertionError("not all adapters could be pushed")


def digest_of(process: Process, adapter: NamedAdapter) -> str:
    """Return the digest of an adapter's version in an engine; empty if the engine does not serve it."""
    is_held = held_by(process).get(adapter.name) == adapter.version
    return process.engine.digests[adapter.name] if is_held and isinstance(process.engine, HoldingEngine) else ""


def held_by(process: Process) -> dict[str, int]:
    """Return the adapters that an engine serves, with their versions."""
    return process.engine.held if isinstance(process.engine, HoldingEngine) else {}
