"""The lifecycle of an engine beyond the contract suite: refused transitions, and requests during sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentloop.engine.interface import ALL_MEMORY, MemoryTag
from agentloop.engine.lifecycle import EngineLifecycle, EnginePhase
from agentloop.errors import Conflict, EngineLost, EngineUnusable, InvalidRequest, WeightUpdateFailed
from agentloop.types import KVPolicy

WEIGHTS = frozenset({MemoryTag.WEIGHTS})
KV_CACHE = frozenset({MemoryTag.KV_CACHE})


def serving(version: int | None = 7, has_begun: Callable[[], bool] = lambda: False) -> EngineLifecycle:
    lifecycle = EngineLifecycle(has_begun)
    lifecycle.started(version)
    return lifecycle


def paused(version: int | None = 7) -> EngineLifecycle:
    lifecycle = serving(version)
    lifecycle.paused(KVPolicy.KEEP)
    return lifecycle


def test_it_lives_once() -> None:
    lifecycle = EngineLifecycle(lambda: False)
    with pytest.raises(EngineLost, match="not started"):
        lifecycle.require_alive()
    assert not lifecycle.is_usable
    lifecycle.started(7)
    with pytest.raises(Conflict):
        lifecycle.started(8)
    assert lifecycle.close("it was closed")
    assert not lifecycle.close("again")
    with pytest.raises(EngineLost, match="it was closed"):
        lifecycle.paused(KVPolicy.KEEP)
    with pytest.raises(Conflict):
        lifecycle.started(8)
    assert not lifecycle.is_usable


async def test_a_pause_that_failed_is_paused_again_or_resumed() -> None:
    for again in (True, False):
        lifecycle = serving()
        lifecycle.begin_freeze()
        lifecycle.begin_freeze()
        if again:
            lifecycle.paused(KVPolicy.KEEP)
            assert lifecycle.is_paused
        lifecycle.check_resume()
        lifecycle.resumed()
        assert lifecycle.is_serving


async def test_a_drain_ends_with_what_had_begun_or_with_a_freeze() -> None:
    begun = ["one"]
    for end in (EnginePhase.DRAINING, EnginePhase.FREEZING):
        lifecycle = serving(has_begun=lambda: bool(begun))
        lifecycle.begin_drain()
        drained = asyncio.create_task(lifecycle.until_drained())
        await asyncio.sleep(0)
        lifecycle.refresh()
        await asyncio.sleep(0)
        assert not drained.done()
        if end is EnginePhase.FREEZING:
            lifecycle.begin_freeze()
        else:
            begun.clear()
            lifecycle.refresh()
        await drained
        begun.append("another")
        assert lifecycle.phase is end


@pytest.mark.parametrize(("ending", "error"), [("resumed", Conflict), ("close", EngineLost)])
async def test_a_drain_is_told_of_a_resume_and_of_the_end(ending: str, error: type[Exception]) -> None:
    lifecycle = serving(has_begun=lambda: True)
    lifecycle.begin_drain()
    drained = asyncio.create_task(lifecycle.until_drained())
    await asyncio.sleep(0)
    if ending == "resumed":
        lifecycle.resumed()
    else:
        lifecycle.close("it was closed")
    with pytest.raises(error):
        await drained


async def test_a_commit_is_stamped_or_leaves_no_version() -> None:
    lifecycle = paused()
    with lifecycle.committing(8):
        assert lifecycle.version == 7
    assert lifecycle.version == 8
    with pytest.raises(WeightUpdateFailed), lifecycle.committing(9):
        raise WeightUpdateFailed("half of it")
    assert lifecycle.version is None
    assert not lifecycle.is_usable
    with pytest.raises(EngineUnusable):
        lifecycle.require_usable()
    with lifecycle.committing(10):
        pass
    assert lifecycle.is_usable


@pytest.mark.parametrize("staged", [None, 7, 9])
async def test_only_what_is_staged_is_committed(staged: int | None) -> None:
    with pytest.raises(Conflict, match="version 8 cannot be committed"):
        paused().check_commit(8, staged)
    with pytest.raises(Conflict, match="paused"):
        serving().check_commit(8, 8)


async def test_the_strictest_pause_ends_the_use_of_older_kv_and_a_resume_voids_it() -> None:
    lifecycle = paused()
    lifecycle.paused(KVPolicy.FRESH)
    lifecycle.paused(KVPolicy.KEEP)
    assert lifecycle.ends_older_kv
    lifecycle.resumed()
    lifecycle.paused(KVPolicy.KEEP)
    with lifecycle.committing(8):
        pass
    assert (lifecycle.kv_version(3, 8), lifecycle.kv_version(None, 8)) == (3, 8)
    lifecycle.paused(KVPolicy.RECOMPUTE)
    with lifecycle.committing(9):
        pass
    assert (lifecycle.kv_version(3, 9), lifecycle.kv_version(None, 9)) == (9, 9)
    lifecycle.paused(KVPolicy.RECOMPUTE)
    with lifecycle.committing(5):  # back to older weights
        pass
    assert (lifecycle.kv_version(9, 5), lifecycle.kv_version(3, 5), lifecycle.kv_version(None, 5)) == (5, 5, 5)


@pytest.mark.parametrize(("level", "can_sleep"), [(0, True), (3, True), (1, False)])
def test_a_sleep_it_does_not_have_is_refused(level: int, can_sleep: bool) -> None:
    with pytest.raises(InvalidRequest):
        serving().check_sleep(level, can_sleep=can_sleep)


async def test_a_deeper_sleep_discards_and_an_equal_one_changes_nothing() -> None:
    lifecycle = paused()
    assert lifecycle.has_to_sleep(1)
    lifecycle.slept(1)
    assert lifecycle.asleep == ALL_MEMORY
    assert not lifecycle.has_to_sleep(1)
    assert lifecycle.has_to_sleep(2)
    lifecycle.slept(2)
    assert lifecycle.version is None
    assert not lifecycle.has_to_sleep(1)
    assert not lifecycle.has_to_sleep(2)


async def test_discarded_weights_are_committed_before_anything_but_them_wakes() -> None:
    lifecycle = paused()
    lifecycle.slept(2)
    with pytest.raises(Conflict):
        lifecycle.wakeable(KV_CACHE)
    with pytest.raises(Conflict):
        lifecycle.check_stage()
    lifecycle.woken(lifecycle.wakeable(WEIGHTS))
    assert lifecycle.has_to_sleep(1)
    with pytest.raises(Conflict):
        lifecycle.check_resume()
    lifecycle.check_commit(8, 8)
    with lifecycle.committing(8):
        pass
    assert lifecycle.wakeable(ALL_MEMORY) == KV_CACHE
    assert lifecycle.has_to_sleep(1)
    lifecycle.woken(KV_CACHE)
    lifecycle.check_resume()
