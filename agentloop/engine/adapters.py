"""The table of adapters that an engine serves by name, with their versions and the calls in flight that use them.

Invariants: a call uses one version from its admission to its end; a replaced or unloaded version stays loaded until
its last call ends; there are at most `max_loras` names and twice as many versions. Error messages contain no names
of other adapters, because other users read them in reports and in the status.
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
    number: int  # unique within the engine
    num_calls: int = 0  # calls in flight


class HeldAdapters:
    """The record of an engine's loaded adapters. The engine itself loads and frees them, one at a time."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._served: dict[str, HeldAdapter] = {}
        self._older: list[HeldAdapter] = []  # replaced or unloaded versions, until their calls end
        self._numbers = itertools.count(1)

    def serving(self, adapter: Adapter) -> Adapter | None:
        """Return the served adapter with this name and version, if its digest does not differ, else None."""
        held = self._served.get(adapter.name)
        if held is None or held.adapter.version != adapter.version:
            return None
        return held.adapter if adapter.digest in ("", held.adapter.digest) else None

    def new(self, adapter: Adapter) -> HeldAdapter:
        """Return a new version that is not served yet. Call `take_unused` before. Raises AdaptersFull."""
        served, older = self._served, self._older
        if adapter.name not in served and len(served) >= self._max_loras:
            raise AdaptersFull(
                f"the engine serves at most {self._max_loras} adapters: unload one of them", param="name"
            )
        if len(served) + len(older) >= 2 * self._max_loras:
            raise AdaptersFull(
                f"calls in flight still use {len(older)} older adapter versions: retry when they have ended",
                param="name",
            )
        return HeldAdapter(adapter, next(self._numbers))

    def serve(self, held: HeldAdapter) -> None:
        """Use `held` for all calls that begin from now on."""
        self._set_aside(held.adapter.name)
        self._served[held.adapter.name] = held

    def retire(self, name: str) -> None:
        """Stop serving a name. Raises AdapterInUse while calls in flight use any of its versions."""
        versions = [held for held in (*self._served.values(), *self._older) if held.adapter.name == name]
        num_calls = sum(held.num_calls for held in versions)
        if num_calls:
            raise AdapterInUse(
                f"{num_calls} calls in flight use the adapter: retry when they have ended", param="name"
            )
        self._set_aside(name)

    def take_unused(self) -> list[HeldAdapter]:
        """Remove and return the versions that are not served and have no calls. The engine frees them."""
        unused = [held for held in self._older if not held.num_calls]
        self._older = [held for held in self._older if held.num_calls]
        return unused

    def pin(self, request: GenerateRequest) -> HeldAdapter:
        """Assign a new call to the served version of its adapter, and count it.

        Raises ModelNotFound, or WeightVersionNotServed if the call does not accept that version.
        """
        held, demand = self._served.get(request.adapter), request.sampling.weight_version
        if held is None:
            raise ModelNotFound(
                f"adapter {request.adapter!r} is not loaded in the engine: push it first", param="model"
            )
        if demand is not None:
            demand.check(held.adapter.version)
        held.num_calls += 1
        return held

    def _set_aside(self, name: str) -> None:
        if (held := self._served.pop(name, None)) is not None:
            self._older.append(held)
