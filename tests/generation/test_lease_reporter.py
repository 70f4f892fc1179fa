"""What a process tells of its leases, when, and how it obeys; on a virtual clock."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.api.coordinator import LeaseOrders, LeaseReport, TurnBegun, TurnEnded
from agentloop.capabilities import NO_NEEDS, Needs
from agentloop.clock import VirtualClock
from agentloop.errors import InvalidRequest, NoHealthyReplica, NotFound, ServiceUnavailable
from agentloop.generation.lease_reporter import LeaseHolder, LeaseReporter, ReportConfig
from agentloop.generation.leases import AssignedLease
from agentloop.images import ImageSpan
from agentloop.kv_hashes import BlockChain, hashes_of, root_hash
from agentloop.types import (
    Assignment,
    FinishReason,
    GenerateRequest,
    Generation,
    Lease,
    Message,
    RolloutTask,
    SamplingParams,
    WeightVersionSpan,
)
from tests.support.fleet.fake_coordinator import FakeCoordinator

BLOCK = 4
Ids = tuple[int, ...]


@dataclass
class Site:
    clock: VirtualClock
    coordinator: FakeCoordinator
    reporter: LeaseReporter

    @property
    def reports(self) -> list[LeaseReport]:
        return self.coordinator.reports

    def holder(self, number: int = 0, lease: Lease | None = None) -> LeaseHolder:
        holder = LeaseHolder(self.reporter, f"r/g/{number}", "r/g")
        holder.hold(lease or lease_of(f"L{number}"))
        return holder


def lease_of(lease_id: str, block_size: int = BLOCK) -> Lease:
    return Lease(lease_id, "a", "url-a", block_size=block_size)


def virtually(test: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        clock = VirtualClock()

        async def main() -> None:
            coordinator = FakeCoordinator()
            reporter = LeaseReporter("p", coordinator.report_leases, ReportConfig(max_news=50))
            await test(Site(clock, coordinator, reporter))
            await reporter.stop()

        clock.run(main())

    run.__name__ = test.__name__
    return run


def ids_of(*segments: tuple[str, int]) -> tuple[int, ...]:
    """Ids that follow from the names of their segments."""
    return tuple(
        number for name, count in segments for number in random.Random(name).choices(range(1000, 9000), k=count)
    )


def asked(ids: tuple[int, ...], **fields: Any) -> GenerateRequest:
    return GenerateRequest("q", ids, SamplingParams(100), **fields)


def replied(ids: tuple[int, ...], *versions: int, **fields: Any) -> Generation:
    cut = len(ids) // max(1, len(versions))
    spans = tuple(
        WeightVersionSpan(version, place * cut, len(ids) if place == len(versions) - 1 else (place + 1) * cut)
        for place, version in enumerate(versions)
    )
    return Generation("q", ids, (-1.0,) * len(ids), spans, FinishReason.STOP, **fields)


def turn(
    holder: LeaseHolder, prompt: tuple[int, ...], reply: tuple[int, ...], *versions: int, **fields: Any
) -> None:
    holder.enter()
    holder.begin()
    holder.leave(holder.lease, asked(prompt, **fields), replied(reply, *(versions or (0,)), cached_tokens=3))


def chain_of(
    context: tuple[int, ...], version: int = 0, block_size: int = BLOCK, digests: bytes = b""
) -> list[int]:
    chain = BlockChain(block_size, root_hash(version, digests))
    chain.extend(context[:-1])  # the last sampled token has no KV
    return list(chain.hashes)


def known(reports: list[LeaseReport], lease_id: str) -> list[int]:
    """What a reader of all reports knows of a lease's blocks in the end."""
    blocks: list[int] = []
    for report in reports:
        for held in report.leases or ():
            if held.lease.lease_id == lease_id:
                blocks = list(hashes_of(held.block_hashes))
        for news in report.turns:
            if isinstance(news, TurnEnded) and news.lease_id == lease_id:
                assert news.first_block <= len(blocks), "news are missing"
                blocks[news.first_block :] = hashes_of(news.block_hashes)
    return blocks


@virtually
async def test_news_are_gathered_and_silence_is_a_heartbeat(site: Site) -> None:
    holders = [site.holder(number) for number in range(3)]
    await site.clock.sleep(0.6)
    (first,) = site.reports
    assert [held.lease.lease_id for held in first.leases or ()] == ["L0", "L1", "L2"]
    assert {held.group_id for held in first.leases or ()} == {"r/g"}
    for holder in holders:
        turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)))
    await site.clock.sleep(0.5)
    news = site.reports[-1]
    assert (news.leases, news.taken, len(news.turns), len(site.reports)) == (None, (), 6, 2)
    assert news.turns[:2] == (
        TurnBegun("L0"),
        TurnEnded("L0", 25, 5, 3, 0, array("Q", chain_of(ids_of(("prompt", 20), ("reply", 5)))).tobytes()),
    )
    await site.clock.sleep(10.0)
    assert [report.turns for report in site.reports[2:]] == [()] * 10, "a heartbeat a second"
    assert [report.sequence for report in site.reports] == list(range(1, 13))
    for holder in holders:
        holder.drop()
    await site.clock.sleep(10.0)
    assert len(site.reports) == 12, "who holds nothing says nothing"


@virtually
async def test_a_turn_tells_its_new_blocks_alone(site: Site) -> None:
    holder = site.holder()
    path = list(ids_of(("prompt", 4000)))
    contexts = []
    for number in range(4):
        reply = ids_of((f"reply {number}", 10))
        turn(holder, tuple(path), reply)
        path += list(reply)  # the same int objects, as a path that grows has them
        contexts.append(tuple(path))
        path += list(ids_of((f"tool {number}", 7)))
        await site.clock.sleep(1.0)
    ends = [news for report in site.reports for news in report.turns if isinstance(news, TurnEnded)]
    assert [len(news.block_hashes) // 8 for news in ends] == [4, 4, 5]
    assert known(site.reports, "L0") == chain_of(contexts[-1])


@virtually
async def test_the_tool_that_runs_goes_with_the_turn_unless_that_is_told(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    turn(holder, (1000, 2000), (3000,))
    holder.run_tool("search")
    await site.clock.sleep(1.0)
    holder.run_tool("late")
    assert isinstance(news := site.reports[-1].turns[-1], TurnEnded)
    assert news.tool == "search"


@pytest.mark.parametrize("change", ["version", "asked version", "kept version", "images", "block size"])
def test_what_was_computed_otherwise_is_hashed_anew(change: str) -> None:
    @virtually
    async def run(site: Site) -> None:
        holder = site.holder()
        turn(holder, ids_of(("prompt", 30)), ids_of(("reply", 5)))
        await site.clock.sleep(1.0)
        context, lease_id = ids_of(("prompt", 30), ("reply", 5), ("tool", 9), ("again", 6)), "L0"
        fields: dict[str, Any] = {}
        versions, expected = (0,), chain_of(context)
        if change == "version":
            versions, expected = (0, 1), chain_of(context, 1)
        if change == "asked version":
            versions, fields, expected = (0, 1), {"kv_version": 7}, chain_of(context, 7)
        if change == "kept version":
            versions, fields, expected = (5, 6), {"keeps_kv": True}, chain_of(context, 5)
        if change == "images":
            digest = "ab" * 32
            fields, expected = (
                {"images": (ImageSpan(digest, 2, 5),)},
                chain_of(context, digests=bytes.fromhex(digest)),
            )
        if change == "block size":
            holder.hold(lease_of(lease_id := "bigger", 8))
            expected = chain_of(context, block_size=8)
        turn(holder, context[:-6], context[-6:], *versions, **fields)
        await site.clock.sleep(1.0)
        assert known(site.reports, lease_id) == expected

    run()


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(1, 9)), max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_context_that_forks_goes_back_to_what_is_common(
    turns: list[tuple[int, int, int]], is_growing: bool
) -> None:
    @virtually
    async def run(site: Site) -> None:
        holder, context = site.holder(), ids_of(("start", 12))
        for number, (num_kept, num_new, num_reply) in enumerate(turns):
            kept = context if is_growing else context[:num_kept]
            prompt = kept + ids_of((f"new {number}", num_new)) or (5000,)
            reply = ids_of((f"reply {number}", num_reply))
            turn(holder, prompt, reply)
            context = prompt + reply
            await site.clock.sleep(0.3)
        await site.clock.sleep(1.0)
        if turns:
            assert known(site.reports, "L0") == chain_of(context)

    run()


@virtually
async def test_a_context_with_a_change_in_its_middle_is_seen(site: Site) -> None:
    holder, path = site.holder(), list(ids_of(("prompt", 400)))
    turn(holder, tuple(path), ())
    path = [int(str(number)) for number in path]  # of other objects, as whoever decodes a prompt has them
    path[150] += 1
    turn(holder, tuple(path), (1, 2))
    await site.clock.sleep(1.0)
    assert known(site.reports, "L0") == chain_of((*path, 1, 2))


@virtually
async def test_calls_side_by_side_are_one_turn_until_the_last_has_ended(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    prompt, one, other = ids_of(("prompt", 20)), ids_of(("one", 9)), ids_of(("other", 9))
    holder.enter()
    holder.begin()
    holder.enter()
    holder.begin()
    holder.leave(holder.lease, asked(prompt), replied(one, 0))
    holder.order(lease_of("L1"))
    holder.enter()  # a third: what was ordered waits
    assert holder.usable == lease_of("L0")
    holder.leave(holder.lease, asked(prompt), None)
    holder.leave(holder.lease, asked(prompt), replied(other, 0))
    await site.clock.sleep(0.5)
    kinds = [type(news).__name__ for news in site.reports[-1].turns]
    assert kinds == ["TurnBegun", "TurnEnded", "TurnBegun", "TurnEnded", "TurnBegun", "TurnEnded"]
    assert known(site.reports, "L0") == chain_of(prompt + other)
    holder.enter()
    assert holder.usable == lease_of("L1")


@virtually
async def test_a_report_is_repeated_until_it_is_answered(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    site.coordinator.report_errors = [ServiceUnavailable("down") for _ in range(5)]
    turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)))
    await site.clock.sleep(0.5)
    turn(holder, ids_of(("prompt", 20), ("reply", 5), ("more", 8)), ids_of(("again", 5)))
    await site.clock.sleep(2.0)
    site.coordinator.is_answer_lost = True
    await site.clock.sleep(3.0)
    assert [report.sequence for report in site.reports] == list(range(1, len(site.reports) + 1))
    turns = [news for report in site.reports for news in report.turns]
    assert len(turns) == 4, "each counts once"
    assert known(site.reports, "L0") == chain_of(ids_of(("prompt", 20), ("reply", 5), ("more", 8), ("again", 5)))


@virtually
async def test_a_coordinator_that_asks_for_all_gets_all_with_who_is_in_a_turn(site: Site) -> None:
    holders = [site.holder(number) for number in range(2)]
    for holder in holders:
        turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)))
    holders[1].enter()
    holders[1].begin()
    await site.clock.sleep(1.0)
    site.coordinator.next_orders = LeaseOrders(send_all=True)
    await site.clock.sleep(2.0)
    (full,) = (report for report in site.reports[1:] if report.leases is not None)
    assert full.leases is not None
    assert [held.num_context_tokens for held in full.leases] == [25, 25]
    assert full.turns == (TurnBegun("L1"),)
    assert known([full], "L0") == chain_of(ids_of(("prompt", 20), ("reply", 5)))
    holders[1].leave(holders[1].lease, asked(ids_of(("prompt", 20))), None)
    await site.clock.sleep(1.0)
    assert known(site.reports, "L1") == known(site.reports, "L0")


@virtually
async def test_news_that_nobody_takes_are_bounded_and_told_whole_later(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    site.coordinator.report_errors = [ServiceUnavailable("down") for _ in range(20)]
    path = ids_of(("prompt", 20))
    for number in range(100):
        turn(holder, path, ids_of((f"reply {number}", 3)))
        path += ids_of((f"reply {number}", 3), ("tool", 2))
        await site.clock.sleep(0.05)
    await site.clock.sleep(20.0)
    assert all(len(report.turns) <= 50 for report in site.reports)
    assert [report.leases is not None for report in site.reports].count(True) == 2
    assert known(site.reports, "L0") == chain_of(path[:-2])


@virtually
async def test_a_report_that_is_refused_is_not_repeated(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    site.coordinator.report_errors = [InvalidRequest("no report")]
    turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)))
    await site.clock.sleep(2.0)
    assert known(site.reports, "L0") == chain_of(ids_of(("prompt", 20), ("reply", 5)))
    assert site.reports[1].leases is not None


def assignment(lease: Lease) -> Assignment:
    return Assignment("t/g/0", "g", 0, RolloutTask("t", (Message("user", "x"),)), lease)


class Moves:
    """A coordinator of which one asks for another place."""

    def __init__(self) -> None:
        self.answers: list[Lease | Exception] = []
        self.asked: list[tuple[Lease, bool]] = []

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        self.asked.append((lease, is_failed))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@virtually
async def test_an_order_counts_from_the_next_turn_and_late_ones_not_at_all(site: Site) -> None:
    moves = Moves()
    source = AssignedLease(moves, assignment(lease_of("old")), site.reporter)  # type: ignore[arg-type] # its move alone
    prompt = ids_of(("prompt", 20))
    source.holder.enter()
    source.holder.begin()
    site.coordinator.next_orders = LeaseOrders((("old", lease_of("new")), ("other", lease_of("x"))))
    await site.clock.sleep(1.0)
    assert source.held() == lease_of("old"), "a turn in flight keeps its lease"
    source.holder.leave(source.last, asked(prompt), replied(ids_of(("reply", 5)), 0))
    source.holder.enter()
    assert source.held() == lease_of("new")
    source.holder.begin()
    site.coordinator.next_orders = LeaseOrders((("old", lease_of("late")),))
    await site.clock.sleep(1.0)
    source.holder.leave(lease_of("old"), asked(prompt), replied(ids_of(("late", 5)), 0))  # a call of the old lease
    source.holder.leave(source.last, asked(prompt), replied(ids_of(("again", 5)), 0))
    source.holder.enter()
    assert source.held() == lease_of("new")
    await site.clock.sleep(1.0)
    assert known(site.reports, "new") == chain_of(prompt + ids_of(("again", 5))), "all of it, for the new lease"
    assert moves.asked == []
    source.close()
    assert site.reporter.num_held == 0


@virtually
async def test_an_order_to_ask_waits_for_room_and_falls_back_to_the_lease_at_hand(site: Site) -> None:
    moves = Moves()
    source = AssignedLease(moves, assignment(lease_of("old")), site.reporter)  # type: ignore[arg-type] # its move alone
    request = asked((1, 2, 3))
    source.holder.order(None)
    source.holder.enter()
    assert source.held() is None
    moves.answers = [NoHealthyReplica("no room"), lease_of("new")]
    with pytest.raises(NoHealthyReplica):
        await source.lease(request)
    assert source.held() is None
    assert await source.lease(request) == lease_of("new") == source.held()
    source.holder.leave(source.last, request, None)
    for error in (ServiceUnavailable("restarting"), NotFound("who?")):
        source.holder.order(None)
        source.holder.enter()
        moves.answers = [error]
        assert await source.lease(request) == lease_of("new")
        source.holder.leave(source.last, request, None)
    assert {is_failed for _, is_failed in moves.asked} == {False}


@virtually
async def test_the_end_of_a_process_tells_what_it_gave_back(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    site.coordinator.leases["L0"] = lease_of("L0")
    site.coordinator.report_errors = [ServiceUnavailable("down")]
    holder.release()
    await site.reporter.close()
    assert "L0" in site.coordinator.leases, "one that is down is not waited for"
    again = LeaseReporter("q", site.coordinator.report_leases)
    other = LeaseHolder(again, "/s")
    other.hold(lease_of("L0"))
    other.release()
    await again.close()
    assert site.coordinator.leases == {}
