"""The adapters that an engine serves by name: their versions, and the calls in flight that pin these.

Every engine uses this table. Invariants: a call has one version from its admission to its end; a version that was
replaced or unloaded is held until its last call has ended; there are at most `max_loras` names, and in all twice as
many versions. Errors name no other adapter: other users read them in reports and in the status.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from agentloop.engine.interface import Adapter
from agentloop.errors import AdapterInUse, AdaptersFull, ModelNotFound
from agentloop.types import GenerateRequest


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """A version of an adapter in an engine."""

    adapter: Adapter
    number: int  # an engine gives it once
    num_calls: int = 0  # in flight


class HeldAdapters:
    """All that one engine holds. Synchronous; the engine loads and frees them, one at a time."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._served: dict[str, HeldAdapter] = {}
        self._older: list[HeldAdapter] = []  # for their calls only
        self._numbers = itertools.count(1)

    def serving(self, adapter: Adapter) -> Adapter | None:
        """Return the served adapter of this name if it has this version and no other digest, else None."""
        held = self._served.get(adapter.name)
        if held is None or held.adapter.version != adapter.version:
            return None
        return held.adapter if adapter.digest in ("", held.adapter.digest) else None

    def new(self, adapter: Adapter) -> HeldAdapter:
        """Make a version that is not served yet. Raises AdaptersFull. Call `take_unused` before."""
        served, older = self._served, self._older
        if adapter.name not in served and len(served) >= self._max_loras:
            raise AdaptersFull(f"all {self._max_loras} places have adapters", param="name")
        if len(served) + len(older) >= 2 * self._max_loras:
            raise AdaptersFull(f"calls in flight pin {len(older)} older versions", param="name")
        return HeldAdapter(adapter, next(self._numbers))

    def serve(self, held: HeldAdapter) -> None:
        """Give `held` to the calls that begin from now on."""
        self._set_aside(held.adapter.name)
        self._served[held.adapter.name] = held

    def retire(self, name: str) -> None:
        """Serve no version of a name. Raises AdapterInUse while calls are in flight under one."""
        of_name = [held for held in (*self._served.values(), *self._older) if held.adapter.name == name]
        num_calls = sum(held.num_calls for held in of_name)
        if num_calls:
            raise AdapterInUse(f"{num_calls} calls are in flight under the adapter", param="name")
        self._set_aside(name)

    def take_unused(self) -> list[HeldAdapter]:
        """Take out the versions that are not served and have no calls; the engine frees them."""
        unused = [held for held in self._older if not held.num_calls]
        self._older = [held for held in self._older if held.num_calls]
        return unused

    def pin(self, request: GenerateRequest) -> HeldAdapter:
        """Count a call that begins under the served version of its adapter.

        Raises ModelNotFound, or WeightVersionNotServed if it does not accept that version.
        """
        held, demand = self._served.get(request.adapter), request.sampling.weight_version
        if held is None:
            raise ModelNotFound(f"the engine serves no adapter {request.adapter}", param="model")
        if demand is not None:
            demand.check(held.adapter.version)
        held.num_calls += 1
        return held

    def _set_aside(self, name: str) -> None:
        if (held := self._served.pop(name, None)) is not None:
            self._older.append(held)
