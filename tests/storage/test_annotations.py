"""Annotations: validation against the record, the displayed version, and deletion with the record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from agentloop.api.annotations import AnnotationScope, SampleAnnotation, annotation_in, annotation_of
from agentloop.errors import Conflict, InvalidRequest, NotFound
from agentloop.storage.annotation_rows import MAX_OF_RECORD
from agentloop.storage.retention import RetentionPolicy, Unfinished
from agentloop.storage.trajectory_store import TrajectoryReader, TrajectoryStore
from tests.support.records.samples import encoded, make_group, make_path, make_trajectory
from tests.support.service.store_home import StoreHome

RESPONSE_IDS = np.arange(5, dtype=np.int32)
PATHS = (make_path(), replace(make_path(), response_ids=RESPONSE_IDS))  # responses of 8 and 5 tokens
TOKENS = [[0.5] * 8, []]


@pytest.fixture
async def store(home: StoreHome) -> AsyncIterator[TrajectoryStore]:
    store = TrajectoryStore(home.where)
    await store.accept("r", [make_group("g", 4)])
    await store.add_records(encoded([make_trajectory("g", index, paths=PATHS) for index in range(4)]))
    yield store
    await store.close()


def of(index: int, values: object, name: str = "advantage") -> SampleAnnotation:
    return SampleAnnotation("g", index, name, annotation_of(values))


async def shown(store: TrajectoryStore | TrajectoryReader, seq: int) -> dict[str, tuple[str, list[list[float]]]]:
    found = store.record_at(seq)
    record = found if isinstance(store, TrajectoryReader) else await found
    return {name: (one.scope, [part.tolist() for part in one.values]) for name, one in record.annotations.items()}


async def test_the_newest_of_a_name_is_shown_after_a_restart_too(store: TrajectoryStore, home: StoreHome) -> None:
    for value in (0.25, -1.5):
        await store.annotate("r", [of(index, value + index) for index in range(4)])
    await store.annotate("r", [of(1, [1.0, 0.5], "ratio")])
    await store.annotate("r", [of(1, [np.full(8, 0.5, np.float32), []], "kl")])
    wanted = {
        "advantage": ("record", [[-0.5]]),
        "kl": ("token", TOKENS),
        "ratio": ("path", [[1.0, 0.5]]),
    }
    [_, (seq, _), *_] = await store.read("r", 0, 10)
    assert await shown(store, seq) == wanted
    await store.close()
    reader, again = TrajectoryReader(home.where), TrajectoryStore(home.where)
    assert await shown(reader, seq) == await shown(again, seq) == wanted
    reader.close()
    await again.close()
    assert home.execute("SELECT COUNT(*) FROM annotations") == [(10,)]


@pytest.mark.parametrize(
    "values", [[1.0], [1.0, 2.0, 3.0], [[1.0] * 8], [[1.0] * 8, [1.0] * 4], [[1.0] * 5, [1.0] * 8]]
)
async def test_one_that_does_not_fit_is_refused_with_all_of_its_call(
    store: TrajectoryStore, home: StoreHome, values: object
) -> None:
    with pytest.raises(InvalidRequest, match="record g/2"):
        await store.annotate("r", [of(0, 1.0), of(2, values)])
    for rollout_id, one in (("r", of(9, 1.0)), ("other", of(0, 1.0))):
        with pytest.raises(NotFound, match=f"record g/{one.sample_index}"):
            await store.annotate(rollout_id, [of(0, 1.0), one])
    assert home.execute("SELECT COUNT(*) FROM annotations") == [(0,)]


async def test_a_record_has_a_bounded_number(store: TrajectoryStore, home: StoreHome) -> None:
    with pytest.raises(Conflict, match=f"g/0 has 0 annotations: {8 * MAX_OF_RECORD} more exceed the limit"):
        await store.annotate("r", [of(1, 1.0), *(of(0, float(number)) for number in range(8 * MAX_OF_RECORD))])
    assert home.execute("SELECT COUNT(*) FROM annotations") == [(0,)]
    await store.annotate("r", [of(0, float(number)) for number in range(MAX_OF_RECORD)])
    with pytest.raises(Conflict, match=f"has {MAX_OF_RECORD}"):
        await store.annotate("r", [of(0, 1.0, "other")])
    await store.annotate("r", [of(1, 1.0, "other")])


async def test_they_go_with_their_record(store: TrajectoryStore, home: StoreHome) -> None:
    await store.annotate("r", [of(index, 1.0) for index in range(4)])
    [(first, _), *_] = await store.read("r", 0, 10)
    await store.acknowledge("r", first)
    await store.trim(RetentionPolicy(deletes_acknowledged=True), 0.0, Unfinished(live={"r"}))
    assert home.execute("SELECT COUNT(*) FROM annotations") == [(3,)]
    with pytest.raises(NotFound, match="deleted"):
        await store.annotate("r", [of(0, 1.0)])


@pytest.mark.parametrize("values", [float("nan"), [1.0, float("inf")], [[1e39], []], [], [[[1.0]]], [1.0, [1.0]]])
def test_numbers_are_finite_and_in_one_of_three_shapes(values: object) -> None:
    with pytest.raises(InvalidRequest):
        annotation_of(values)


def test_arrays_are_taken_as_numbers_are() -> None:
    assert annotation_of(np.float32(0.5)).scope is annotation_of(np.array(0.5)).scope is AnnotationScope.RECORD
    by_token = annotation_of(np.ones((2, 3)))
    assert (by_token.scope, [part.dtype for part in by_token.values]) == ("token", [np.float32] * 2)
    assert annotation_in(AnnotationScope.PATH, [[1, 2]]).objection([8, 5]) is None
