"""Submission of records: a header matches its record, and one call submits all records that have ended."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.api.coordinator import MAX_HAND_IN, Refusal
from agentloop.api.encoded_record import EncodedRecord
from agentloop.errors import InvalidRequest, ServiceUnavailable
from agentloop.rollout import hand_ins as module
from agentloop.rollout.hand_ins import HandIns
from agentloop.types import StopReason, Trajectory
from agentloop.values.codec import decode, encode
from tests.support.records.samples import encoded, make_trajectory

AGES = st.none() | st.integers(0, 2**62)


@given(AGES, AGES, st.sampled_from(StopReason), st.none() | st.floats(-1, 1), st.integers(0, 99))
def test_a_record_is_its_makers_bytes_whatever_age_is_written_at_its_end(made, aged, reason, reward, version):
    record = make_trajectory(reward=reward, stop_reason=reason, spans=((version, 0, 3), (version + 1, 5, 8)))
    given_in = EncodedRecord.of(replace(record, staleness=made))
    arrived = decode(encode((given_in,)), tuple[EncodedRecord])[0]
    assert arrived == given_in
    assert arrived.value == encode(replace(record, staleness=made))
    told = replace(arrived, staleness=aged)
    assert told.value == encode(replace(record, staleness=aged))
    seen = decode(told.value, Trajectory)
    assert (told.is_sound, told.is_trained, told.stop_reason) == (seen.is_sound, seen.is_trained, seen.stop_reason)
    assert told.oldest_version == seen.oldest_trained_version


class Slow:
    """A coordinator whose calls wait until they are released."""

    def __init__(self):
        self.calls = []
        self.may_answer = asyncio.Semaphore(0)
        self.error = None

    async def finish(self, worker_id, records):
        self.calls.append([record.sample_index for record in records])
        await self.may_answer.acquire()
        if self.error is not None:
            raise self.error
        refused = Refusal.of(InvalidRequest("it is odd"))
        return tuple(refused if record.sample_index % 2 else True for record in records)


async def test_a_call_carries_what_ended_while_the_one_before_was_under_way():
    coordinator = Slow()
    hand_ins = HandIns("w", coordinator)
    records = encoded(make_trajectory("g", index) for index in range(MAX_HAND_IN + 10))
    first = asyncio.create_task(hand_ins.give(records[0]))
    while not coordinator.calls:
        await asyncio.sleep(0)
    others = [asyncio.create_task(hand_ins.give(record)) for record in records[1:]]
    await asyncio.sleep(0.01)
    assert coordinator.calls == [[0]]
    for _ in range(3):
        coordinator.may_answer.release()
    assert await first
    found = await asyncio.gather(*others, return_exceptions=True)
    assert [len(call) for call in coordinator.calls] == [1, MAX_HAND_IN, 9]
    assert sum(coordinator.calls, []) == list(range(len(records)))  # noqa: RUF017
    assert [isinstance(one, InvalidRequest) for one in found] == [
        index % 2 == 1 for index in range(1, len(records))
    ]


async def test_a_call_that_fails_is_told_to_all_whose_records_it_carried_and_the_next_goes_on():
    coordinator = Slow()
    hand_ins = HandIns("w", coordinator)
    coordinator.error = ServiceUnavailable("it restarts")
    coordinator.may_answer.release()
    giving = [hand_ins.give(record) for record in encoded([make_trajectory("g", 0), make_trajectory("g", 2)])]
    assert [type(one) for one in await asyncio.gather(*giving, return_exceptions=True)] == [ServiceUnavailable] * 2
    coordinator.error = None
    coordinator.may_answer.release()
    assert await hand_ins.give(EncodedRecord.of(make_trajectory("g", 4)))


async def test_large_records_go_in_calls_of_bounded_size(monkeypatch):
    coordinator = Slow()
    hand_ins = HandIns("w", coordinator)
    records = encoded(make_trajectory("g", 2 * index) for index in range(7))
    monkeypatch.setattr(module, "MAX_HAND_IN_BYTES", 3 * len(records[0].data) + 10)
    for _ in range(8):
        coordinator.may_answer.release()
    assert all(await asyncio.gather(*map(hand_ins.give, records)))
    assert [len(call) for call in coordinator.calls] == [3, 3, 1]


async def test_what_waits_when_a_worker_ends_is_let_go():
    coordinator = Slow()
    hand_ins = HandIns("w", coordinator)
    giving = asyncio.create_task(hand_ins.give(EncodedRecord.of(make_trajectory())))
    while not coordinator.calls:
        await asyncio.sleep(0)
    giving.cancel()
    await hand_ins.close()
    with pytest.raises(asyncio.CancelledError):
        await giving
