"""The table of an engine's adapters: the version of each call, the release of versions, and the bounds."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.engine.adapters import HeldAdapters
from agentloop.engine.interface import Adapter
from agentloop.errors import AdapterInUse, AdaptersFull, ModelNotFound, WeightVersionNotServed
from agentloop.types import GenerateRequest, SamplingParams, VersionDemand


def adapter(version: int, name: str = "a", digest: str = "") -> Adapter:
    return Adapter(name, version, "/adapters", digest)


def call(demand: VersionDemand | None = None, name: str = "a") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1, weight_version=demand)
    return GenerateRequest("c", (1,), sampling, 5.0, adapter=name)


def holding(*versions: int, max_loras: int = 2) -> HeldAdapters:
    """Return a table that received these versions of adapter "a", in order."""
    held = HeldAdapters(max_loras)
    for version in versions:
        held.serve(held.new(adapter(version)))
    return held


def versions_of(unused: list[Any]) -> list[int]:
    return [one.adapter.version for one in unused]


def test_a_replaced_version_is_freed_after_its_last_call() -> None:
    held = holding(1)
    first, second = held.pin(call()), held.pin(call())
    held.serve(held.new(adapter(2)))
    assert versions_of([first, held.pin(call())]) == [1, 2]
    assert held.take_unused() == []
    first.num_calls -= 1
    assert held.take_unused() == []
    second.num_calls -= 1
    assert versions_of(held.take_unused()) == [1]
    assert held.take_unused() == []


def test_an_adapter_with_calls_of_any_version_is_not_unloaded() -> None:
    held = holding(1)
    older = held.pin(call())
    held.serve(held.new(adapter(2)))
    with pytest.raises(AdapterInUse, match="1 calls"):
        held.retire("a")
    older.num_calls -= 1
    held.retire("a")
    assert versions_of(held.take_unused()) == [1, 2]
    with pytest.raises(ModelNotFound):
        held.pin(call())


def test_a_call_that_demands_another_version_does_not_begin() -> None:
    held = holding(3)
    for demand in (VersionDemand(min_version=4), VersionDemand(exact_version=2)):
        with pytest.raises(WeightVersionNotServed):
            held.pin(call(demand))
    assert held.pin(call(VersionDemand(exact_version=3))).num_calls == 1


def test_a_version_is_served_only_with_its_content() -> None:
    held = HeldAdapters(1)
    served = adapter(1, digest="xxh3:1")
    held.serve(held.new(served))
    assert held.serving(adapter(1)) == held.serving(served) == served
    assert held.serving(adapter(1, digest="xxh3:2")) is held.serving(adapter(2)) is None


def test_names_and_pinned_versions_are_bounded() -> None:
    held = holding(1, max_loras=1)
    with pytest.raises(AdaptersFull, match="at most 1 adapters"):
        held.new(adapter(1, "b"))
    held.pin(call())
    held.serve(held.new(adapter(2)))
    with pytest.raises(AdaptersFull, match="still use 1 older"):
        held.new(adapter(3))
