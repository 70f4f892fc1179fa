"""Staleness limits end to end, in virtual time: real workers, the coordinator, simulated engines, many updates."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from agentloop.concurrency.clock import VirtualClock
from agentloop.storage.summary import Summary, summarize
from agentloop.types import GenerateRequest, Generation, KVPolicy, OnStale, StalenessLimit, StopReason, Trajectory
from tests.support.fleet.live_run import PAUSE_S, SPEC, LiveRun, live_run, talk, write_checkpoint

NUM_GROUPS, NUM_SAMPLES = 12, 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


async def train(run: LiveRun, seed: int) -> None:
    """Push versions until cancelled, several within one trajectory and some within one turn, with pauses."""
    rng, version = Random(seed), 0
    while True:
        for _ in range(6):
            await run.clock.sleep(rng.uniform(0.05, 0.4))
            version += 1
            await run.update(version)
        await run.clock.sleep(2.5)


async def roll_out(clock: VirtualClock, checkpoint: Path, limit: StalenessLimit, seed: int) -> LiveRun:
    async with live_run(clock, checkpoint) as run, asyncio.TaskGroup() as group:
        training = group.create_task(train(run, seed))
        await run.submit("r", NUM_GROUPS, NUM_SAMPLES, talk(), limit)
        await run.until_done("r")
        training.cancel()
    return run


def check_tokens(one: Trajectory, max_staleness: int) -> None:
    """Check that tokens are aligned and that trained versions are within the limit; 0 allows a single version."""
    num_sampled = 0
    for path in one.paths:
        sampled = {at for span in path.weight_versions for at in range(span.start, span.end)}
        in_mask = {at for at, is_in in enumerate(path.response_mask) if is_in}
        assert in_mask <= sampled
        assert all(path.logprobs[at] < 0 for at in sampled), "masking changed the logprobs"
        num_sampled += len(sampled)
    assert one.num_sampled_tokens == num_sampled
    versions = {version for path in one.paths for version in path.trained_versions}
    assert not versions or max(versions) - min(versions) <= max_staleness
    if max_staleness == 0:
        assert len(versions) <= 1


@pytest.mark.parametrize("on_stale", OnStale)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_many_updates_one_record_a_sample_none_over_the_limit(
    checkpoint: Path, on_stale: OnStale, max_staleness: int
) -> None:
    clock = VirtualClock()
    limit = StalenessLimit(max_staleness, on_stale)
    run = clock.run(roll_out(clock, checkpoint, limit, seed=max_staleness))
    records = list(run.store.records.values())
    assert len(records) == NUM_GROUPS * NUM_SAMPLES
    assert len(run.updates) > 3
    summary = summarize(records, num_accepted=len(records), wall_s=1.0)
    for one in records:
        check_tokens(one, max_staleness)
        assert one.max_staleness == max_staleness
    CHECKS[on_stale](records, summary, max_staleness)


def check_drop(records: list[Trajectory], summary: Summary, max_staleness: int) -> None:
    assert summary.stale is not None
    assert summary.stale.dropped_attempts > 0
    for one in records:
        assert one.num_masked_tokens == 0
        if one.stop_reason is StopReason.STALE:
            assert (one.is_complete, one.paths, one.attempt, one.num_stale_attempts) == (False, (), 3, 3)
        else:
            assert one.is_complete
            assert len(one.path.turns) == 3
            assert one.attempt == one.num_stale_attempts
    assert summary.complete > 0


def check_mask(records: list[Trajectory], summary: Summary, max_staleness: int) -> None:
    assert summary.stop_reasons == {"completed": len(records)}
    assert summary.stale is not None
    assert summary.stale.masked > 0
    assert all(len(one.path.turns) == 3 and one.attempt == 0 for one in records)
    for one in records:  # the masked tokens are the oldest
        kept = one.oldest_trained_version
        masked = set(one.versions) - {version for path in one.paths for version in path.trained_versions}
        assert kept is None or all(version < kept for version in masked)


def check_finish(records: list[Trajectory], summary: Summary, max_staleness: int) -> None:
    assert set(summary.stop_reasons) == {"completed", "stale"}
    assert summary.failures == {"stale": summary.stop_reasons["stale"]}
    assert summary.stale is not None
    assert summary.stale.finished == summary.stop_reasons["stale"] == len(records) - summary.complete
    for one in records:
        assert one.oldest_trained_version == min(one.versions), "its tokens within the limit stay in the mask"
        is_stopped = one.stop_reason is StopReason.STALE
        assert len(one.path.turns) == 3 or is_stopped
        assert one.is_sound != is_stopped
    assert any(len(one.path.turns) < 3 for one in records)
    if max_staleness == 0:
        assert any(len(one.versions) > 1 for one in records), "no turn met an update"


CHECKS = {OnStale.DROP: check_drop, OnStale.MASK: check_mask, OnStale.FINISH: check_finish}


async def consume(run: LiveRun, limit: StalenessLimit, num_versions: int) -> list[int]:
    """Consume `trajectories_per_version` per step like a trainer. Returns the age of each when it was consumed."""
    per_version, cursor, ages = limit.trajectories_per_version, 0, []
    assert per_version is not None
    for version in range(1, num_versions + 1):
        batch: list[Trajectory] = []
        while len(batch) < per_version:
            page = (await run.coordinator.rollouts.read("r", cursor, per_version - len(batch), 5.0)).decoded()
            cursor = page.cursor
            batch += [one for one in page.trajectories if one.is_complete]
        ages += [version - 1 - (one.oldest_trained_version or 0) for one in batch]
        await run.clock.sleep(0.5)
        await run.update(version)
    return ages


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_trainer_that_consumes_so_many_a_version_never_gets_an_older_one(
    checkpoint: Path, max_staleness: int
) -> None:
    """Admission alone: the fleet is fast, the trainer slow, and no token is cut, masked or dropped."""
    clock = VirtualClock()
    limit = StalenessLimit(max_staleness, OnStale.FINISH, trajectories_per_version=6)

    async def main() -> tuple[list[int], LiveRun]:
        async with live_run(clock, checkpoint) as run:
            await run.submit("r", 18, 3, talk(2), limit)
            ages = await consume(run, limit, num_versions=8)
            await run.until_done("r")
        return ages, run

    ages, run = clock.run(main())
    assert max(ages) <= max_staleness
    assert max(ages) == max_staleness, "the fleet never ran ahead: the rule was not put to the test"
    reasons = Counter(one.stop_reason for one in run.store.records.values())
    if max_staleness:
        assert set(reasons) == {StopReason.COMPLETED}


def test_held_work_goes_out_at_the_commit_and_a_stuck_run_tells(checkpoint: Path) -> None:
    clock = VirtualClock()
    limit = StalenessLimit(0, OnStale.FINISH, trajectories_per_version=2)

    async def main() -> None:
        async with live_run(clock, checkpoint) as run:
            await run.submit("r", 2, 2, talk(1), limit)
            await run.clock.sleep(30.0)
            (status,) = (await run.coordinator.status()).rollouts
            assert (status.num_finished, status.num_queued, status.num_held) == (2, 2, 2)
            await run.update(1)
            began = run.clock.now()
            await run.until_done("r")
            assert run.clock.now() - began < 2.0
        assert sorted(one.versions for one in run.store.records.values()) == [(0,), (0,), (1,), (1,)]

    clock.run(main())


def test_a_run_without_limit_is_left_alone(checkpoint: Path) -> None:
    clock = VirtualClock()

    async def main() -> LiveRun:
        async with live_run(clock, checkpoint) as run, asyncio.TaskGroup() as group:
            training = group.create_task(train(run, seed=1))
            await run.submit("r", 4, 4, talk(), None)
            await run.until_done("r")
            training.cancel()
        return run

    records = list(clock.run(main()).store.records.values())
    assert {one.stop_reason for one in records} == {StopReason.COMPLETED}
    assert any(len(one.versions) > 1 for one in records)
    assert all(one.num_masked_tokens == 0 and one.max_staleness is None for one in records)
    assert any(one.staleness for one in records), "the record tells its age without a limit too"
    assert summarize(records, num_accepted=16, wall_s=1.0).stale is None


@pytest.mark.parametrize("kv_policy", KVPolicy)
def test_the_kv_that_a_request_may_reuse(checkpoint: Path, kv_policy: KVPolicy) -> None:
    """A new trajectory never uses old KV; a continuing one uses it under KEEP only, also after a move.

    KEEP names the version at the trajectory's start, the other policies the current version.
    """
    clock = VirtualClock()

    async def main() -> tuple[LiveRun, str]:
        async with live_run(clock, checkpoint, kv_policy=kv_policy) as run:
            await run.submit("long", 2, 1, talk(3, "TalkSlowly"), None)  # one on each replica
            await run.clock.sleep(2.0)
            await run.update(1, kv_policy)
            await run.submit("new", 2, 1, talk(1, max_tokens_per_turn=1), None)  # one on each replica
            await run.until_done("new")
            await run.clock.sleep(PAUSE_S)  # the second turn
            (home,) = {url for url in run.engines if requests(run, "long/g0", url)}
            run.engines[home].kill("gone")
            await run.until_done("long")
        return run, home

    run, home = clock.run(main())
    (away,) = set(run.engines) - {home}
    for url in run.engines:
        ((request, generation),) = requests(run, "new", url)
        assert (request.kv_version, generation.cached_tokens, generation.weight_versions[0].version) == (None, 0, 1)
    first, second = requests(run, "long/g0", home)
    (third,) = requests(run, "long/g0", away)
    assert [span.version for _, answer in (first, second, third) for span in answer.weight_versions] == [0, 1, 1]
    is_keep = kv_policy is KVPolicy.KEEP
    asked = [request.kv_version for request, _ in (first, second, third)]
    assert asked == ([None, 0, 0] if is_keep else [None, None, None])
    # Under KEEP its own first turn is cached; otherwise at most the prompt, which the new trajectory has computed.
    num_prompt = len(first[0].token_ids)
    assert num_prompt > 2 * SPEC.block_size
    assert (second[1].cached_tokens > num_prompt) is is_keep
    assert third[1].cached_tokens > 0, "the other replica holds the same ids under the same version"


@pytest.mark.parametrize("kv_policy", [KVPolicy.KEEP, KVPolicy.FRESH])
def test_a_moved_trajectory_shares_kv_of_its_own_version_only(checkpoint: Path, kv_policy: KVPolicy) -> None:
    """The other replica has the prompt under version 1 only: KEEP must not use it, FRESH does."""
    clock = VirtualClock()

    async def main() -> tuple[LiveRun, str]:
        async with live_run(clock, checkpoint, kv_policy=kv_policy) as run:
            await run.submit("long", 1, 1, talk(2, "TalkSlowly"), None)
            await run.clock.sleep(2.0)
            await run.update(1, kv_policy)
            (home,) = {url for url in run.engines if requests(run, "long", url)}
            run.engines[home].kill("gone")
            await run.submit("new", 1, 1, talk(1), None)
            await run.until_done("long")
        return run, home

    run, home = clock.run(main())
    (away,) = set(run.engines) - {home}
    assert requests(run, "new", away)
    ((_, generation),) = requests(run, "long", away)
    assert (generation.cached_tokens == 0) is (kv_policy is KVPolicy.KEEP)


def requests(run: LiveRun, rollout_id: str, url: str) -> list[tuple[GenerateRequest, Generation]]:
    """Return a replica's requests for a rollout or a group, in order."""
    return [one for one in run.engines[url].served if one[0].request_id.startswith(f"{rollout_id}/")]
