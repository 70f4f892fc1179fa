"""Lease reports of a process and the orders that it follows, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from agentloop.api.coordinator import LeaseOrders, LeaseReport, TurnBegun, TurnEnded, prefixes_of
from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import InvalidRequest, NoHealthyReplica, NotFound, ServiceUnavailable
from agentloop.generation.leases import LeaseHolder, LeaseReporter, ReportConfig
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    Lease,
    SamplingParams,
    WeightVersionSpan,
)
from agentloop.values.capabilities import NO_NEEDS, Needs
from tests.support.fleet.fake_coordinator import FakeCoordinator


@dataclass
class Site:
    clock: VirtualClock
    coordinator: FakeCoordinator
    reporter: LeaseReporter

    @property
    def reports(self) -> list[LeaseReport]:
        return self.coordinator.reports

    def holder(self, number: int = 0, lease: Lease | None = None) -> LeaseHolder:
        return LeaseHolder(self.reporter, self.coordinator, f"r/g/{number}", lease or lease_of(f"L{number}"))


def lease_of(lease_id: str) -> Lease:
    return Lease(lease_id, "a", "url-a")


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
    """Return ids that are derived from the names of their segments."""
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


def known(reports: list[LeaseReport], lease_id: str) -> int:
    """Return the length of a lease's context as a reader of all reports computes it."""
    num_tokens = 0
    for report in reports:
        for held in report.leases or ():
            if held.lease.lease_id == lease_id:
                num_tokens = held.num_context_tokens
        for news in report.turns:
            if isinstance(news, TurnEnded) and news.lease_id == lease_id:
                num_tokens = news.num_context_tokens
    return num_tokens


@virtually
async def test_news_are_gathered_and_silence_is_a_heartbeat(site: Site) -> None:
    holders = [site.holder(number) for number in range(3)]
    await site.clock.sleep(0.6)
    (first,) = site.reports
    assert [held.lease.lease_id for held in first.leases or ()] == ["L0", "L1", "L2"]
    assert {held.group_id for held in first.leases or ()} == {"r/g"}
    for holder in holders:
        turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)), num_known_tokens=7)
    await site.clock.sleep(0.5)
    news = site.reports[-1]
    assert (news.leases, news.taken, len(news.turns), len(site.reports)) == (None, (), 6, 2)
    assert news.turns[:2] == (TurnBegun("L0"), TurnEnded("L0", 25, 5, 3, 7))
    await site.clock.sleep(10.0)
    assert [report.turns for report in site.reports[2:]] == [()] * 10, "a heartbeat a second"
    assert [report.sequence for report in site.reports] == list(range(1, 13))
    for holder in holders:
        holder.close()
    await site.clock.sleep(10.0)
    assert len(site.reports) == 12, "who holds nothing says nothing"


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
    holder.enter()  # a third call: the ordered move waits
    assert holder.held() == lease_of("L0")
    holder.leave(holder.lease, asked(prompt), None)
    holder.leave(holder.lease, asked(prompt), replied(other, 0))
    await site.clock.sleep(0.5)
    kinds = [type(news).__name__ for news in site.reports[-1].turns]
    assert kinds == ["TurnBegun", "TurnEnded", "TurnBegun", "TurnEnded", "TurnBegun", "TurnEnded"]
    assert known(site.reports, "L0") == len(prompt + other)
    holder.enter()
    assert holder.held() == lease_of("L1")


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
    assert known(site.reports, "L0") == 38


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
    holders[1].leave(holders[1].lease, asked(ids_of(("prompt", 20))), None)
    await site.clock.sleep(1.0)
    assert known(site.reports, "L1") == known(site.reports, "L0")


@virtually
async def test_a_full_report_has_the_prefixes_of_a_sessions_prompt(site: Site) -> None:
    session, prompt = LeaseHolder(site.reporter, site.coordinator, "s"), ids_of(("prompt", 800))
    await session.ask(prompt)
    await site.clock.sleep(0.6)
    (held,) = site.reports[0].leases or ()
    assert held.prefixes == prefixes_of(prompt)
    assert [num_tokens for _, num_tokens in held.prefixes] == [768, 512]
    session.close()


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
    assert known(site.reports, "L0") == len(path[:-2])


@virtually
async def test_a_report_that_is_refused_is_not_repeated(site: Site) -> None:
    holder = site.holder()
    await site.clock.sleep(1.0)
    site.coordinator.report_errors = [InvalidRequest("no report")]
    turn(holder, ids_of(("prompt", 20)), ids_of(("reply", 5)))
    await site.clock.sleep(2.0)
    assert known(site.reports, "L0") == 25
    assert site.reports[1].leases is not None


class Moves:
    """A coordinator that is asked to move leases."""

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
    source = LeaseHolder(site.reporter, moves, "t/g/0", lease_of("old"))  # type: ignore[arg-type] # its move alone
    prompt = ids_of(("prompt", 20))
    source.enter()
    source.begin()
    site.coordinator.next_orders = LeaseOrders((("old", lease_of("new")), ("other", lease_of("x"))))
    await site.clock.sleep(1.0)
    assert source.held() == lease_of("old"), "a turn in flight keeps its lease"
    source.leave(source.lease, asked(prompt), replied(ids_of(("reply", 5)), 0))
    source.enter()
    assert source.held() == lease_of("new")
    source.begin()
    site.coordinator.next_orders = LeaseOrders((("old", lease_of("late")),))
    await site.clock.sleep(1.0)
    source.leave(lease_of("old"), asked(prompt), replied(ids_of(("late", 5)), 0))  # a call under the old lease
    source.leave(source.lease, asked(prompt), replied(ids_of(("again", 5)), 0))
    source.enter()
    assert source.held() == lease_of("new")
    await site.clock.sleep(1.0)
    assert known(site.reports, "new") == 25
    assert moves.asked == []
    source.close()
    num_reports = len(site.reports)
    await site.clock.sleep(5.0)
    assert len(site.reports) <= num_reports + 1, "who holds nothing says nothing"


@virtually
async def test_an_order_to_ask_waits_for_room_and_falls_back_to_the_lease_at_hand(site: Site) -> None:
    moves = Moves()
    source = LeaseHolder(site.reporter, moves, "t/g/0", lease_of("old"))  # type: ignore[arg-type] # its move alone
    request = asked((1, 2, 3))
    source.order(None)
    source.enter()
    assert source.held() is None
    moves.answers = [NoHealthyReplica("no room"), lease_of("new")]
    with pytest.raises(NoHealthyReplica):
        await source.ask(request.token_ids)
    assert source.held() is None
    assert await source.ask(request.token_ids) == lease_of("new") == source.held()
    source.leave(source.lease, request, None)
    for error in (ServiceUnavailable("restarting"), NotFound("who?")):
        source.order(None)
        source.enter()
        moves.answers = [error]
        assert await source.ask(request.token_ids) == lease_of("new")
        source.leave(source.lease, request, None)
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
    other = LeaseHolder(again, site.coordinator, "s")
    other.hold(lease_of("L0"))
    other.release()
    await again.close()
    assert site.coordinator.leases == {}
