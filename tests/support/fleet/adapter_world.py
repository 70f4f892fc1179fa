"""The whole service in virtual time, with adapters by name in place of updates of its weights.

A trainer pushes versions of the adapters that clients use, and of others, for which there are no places of their
own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from agentloop.api.coordinator import AdapterPush
from agentloop.clock import VirtualClock
from agentloop.engine import ALL_MEMORY, Adapter, StageReport, WeightUpdate
from agentloop.errors import AdapterInUse, AdaptersFull, ModelNotFound
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from tests.support.fleet.schedules import REFUSALS, Process
from tests.support.fleet.whole_world import WholeWorld

USED = ("a", "b", "c")  # by clients
OTHERS = ("x", "y", "z")
NUM_PLACES = 4


class HoldingEngine(SimulatedEngine):
    """Tells what it serves by name."""

    def __init__(self, spec: SimulatedSpec, **parts: Any) -> None:
        super().__init__(spec, **parts)
        self.held: dict[str, int] = {}

    async def load_adapter(self, adapter: Adapter) -> StageReport:
        report = await super().load_adapter(adapter)
        self.held[adapter.name] = adapter.version
        return report

    async def unload_adapter(self, name: str) -> None:
        await super().unload_adapter(name)
        self.held.pop(name, None)


class AdapterWorld(WholeWorld):
    """All of one schedule. The base weights stay: they are version 0."""

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
        """The next version of one of them, or an end, or a version from before."""
        rng, replicas = self.rng, self.coordinator.replicas
        name = rng.choice((*USED, *OTHERS))
        if name in OTHERS and rng.random() < 0.3:
            await self._refused_or(name, self.ask(lambda c: c.replicas.unload_adapter(name)))
            return
        served = replicas.fleet.version_of(name)
        version = (0 if served is None else served) + rng.choice((-1, 0, 1, 1, 1, 2))
        push = AdapterPush(name, self.checkpoint if is_readable else self.checkpoint + "-missing", max(version, 0))
        self.pushed.setdefault(name, set()).add(push.version or 0)
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
        """No engine in service is behind with an adapter."""
        super().watch()
        served = {} if self._is_down else self.coordinator.replicas.fleet.adapters
        for process in self.placeable():
            held = held_by(process)
            behind = {name for name, version in served.items() if held.get(name, version) < version}
            assert not behind, f"{process.url} takes traffic under {served}, and has {held}"

    async def needs_a_push(self) -> bool:
        orders = self.coordinator.replicas.sync.desired.orders
        return bool(orders.asleep) or not set(USED) <= self.coordinator.replicas.fleet.adapters.keys()

    async def push_until_done(self) -> None:
        """All that clients use, and nothing else."""
        await self.wake(ALL_MEMORY)
        for _ in range(200):
            for name in USED:
                if name not in self.coordinator.replicas.fleet.adapters:
                    self.pushed.setdefault(name, set()).add(0)
                    push = AdapterPush(name, self.checkpoint, 0)
                    try:
                        await self._refused_or(name, self.ask(lambda c, push=push: c.replicas.push_adapter(push)))
                    except REFUSALS:
                        await self.clock.sleep(0.5)
            if not await self.needs_a_push():
                return
        raise AssertionError("not all adapters could be pushed")


def held_by(process: Process) -> dict[str, int]:
    """The adapters that an engine serves, with their versions."""
    return process.engine.held if isinstance(process.engine, HoldingEngine) else {}
