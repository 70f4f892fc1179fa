"""Auxiliary rows: cutting, joining, packing, and their alignment in pieces, requests and paths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.engine.canary import canary_request
from agentloop.errors import InvariantBroken, MalformedEngineResponse
from agentloop.simulation.engine import SimulatedSpec
from agentloop.simulation.policy import ROUTES_SHAPE, routed_experts
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    SamplingParams,
    TokenPath,
    WeightVersionSpan,
)
from agentloop.values.aux_rows import Aux, AuxKind, AuxRows, joined, packed, ragged
from agentloop.values.checks import check_generation, check_piece
from agentloop.values.codec import decode, encode
from agentloop.values.sampled_tokens import SampledTokens
from tests.support.records.turns import make_reply

ROUTES, MASK = AuxKind.ROUTED_EXPERTS, AuxKind.SAMPLING_MASK
PROMPT = (3, 1, 4, 1, 5)
IDS = (9, 2, 6, 5, 3, 5)


def kept_with(token_id: int) -> list[int]:
    return list(range(token_id, token_id + 1 + token_id % 3))


def rows_of(before: Sequence[int], ids: Sequence[int], first: int) -> Aux:
    """Return an engine's rows for the tokens `ids` after `before`, with experts from `first` on."""
    routes = routed_experts((*before, *ids), first, len(before) + len(ids) - 1)
    return {ROUTES: routes, MASK: ragged(len(before), [kept_with(one) for one in ids])}


def generation(
    ids: Sequence[int] = IDS, before: Sequence[int] = PROMPT, first: int = 0, **fields: object
) -> Generation:
    aux = rows_of(before, ids, first)
    spans, reason = (WeightVersionSpan(0, 0, len(ids)),), FinishReason.LENGTH
    made = Generation("r", tuple(ids), (-0.5,) * len(ids), spans, reason, replica_id="a", aux=aux)
    return replace(made, **fields)  # type: ignore[arg-type]


def the_same(rows: AuxRows, others: AuxRows) -> bool:
    parts = zip(rows.rows(), others.rows(), strict=True)
    return rows.start == others.start and all(itertools.starmap(np.array_equal, parts))


@pytest.mark.parametrize("kind", list(AuxKind))
def test_rows_survive_every_cut_the_wire_and_the_store(kind: AuxKind) -> None:
    whole = rows_of(PROMPT, IDS, 2)[kind]
    for first, end in itertools.combinations(range(whole.start, whole.end + 1), 2):
        part = whole.cut(first, end)
        assert (part.start, part.end) == (first, end)
        assert the_same(joined([whole.cut(0, first), part, whole.cut(end, 99)]), whole)
        assert the_same(decode(encode(part), AuxRows), part)
        assert the_same(part.packed().unpacked(), part)
        assert part.packed().unpacked().values.dtype == whole.values.dtype
    assert whole.cut(0, 0).num_rows == 0


def test_rows_that_do_not_continue_others_are_refused() -> None:
    first, later = routed_experts(IDS, 0, 2), routed_experts(IDS, 3, 5)
    other_type = replace(later, start=2, values=later.values.astype(np.uint16))
    other_shape = replace(later, start=2, shape=(1, 6))
    for bad in (later, replace(later, start=1), other_type, other_shape):
        with pytest.raises(InvariantBroken, match="do not continue those to 2"):
            joined([first, bad])


def test_a_damaged_frame_is_not_read_as_rows() -> None:
    rows = routed_experts(IDS, 0, 5).packed()
    with pytest.raises(InvariantBroken, match="stored rows are damaged"):
        replace(rows, num_rows=4).unpacked()
    with pytest.raises(InvariantBroken, match="stored rows are damaged"):
        replace(rows, shape=(4, 2)).unpacked()


@given(cuts=st.sets(st.integers(1, len(IDS) - 1)), kept=st.integers(0, len(IDS)), first=st.integers(0, 4))
def test_pieces_join_to_the_rows_of_all_tokens(cuts: set[int], kept: int, first: int) -> None:
    whole = SampledTokens()
    whole.num_prompt = len(PROMPT)
    whole.add(generation(first=first))
    pieces = SampledTokens()
    pieces.num_prompt = len(PROMPT)
    bounds = [0, *sorted(cuts), len(IDS)]
    for start, end in itertools.pairwise(bounds):
        piece = whole.since(start, end)
        check_piece(GenerateRequest("r", PROMPT, SamplingParams(9), routes_from=first), piece, 100)
        pieces.add(piece)
        pieces.add(replace(piece, token_ids=(), logprobs=(), weight_versions=()))  # rows that it has
    assert pieces.aux is not None
    assert whole.aux is not None
    assert all(the_same(pieces.aux[kind], rows) for kind, rows in whole.aux.items())
    pieces.cut(kept)
    assert (pieces.aux is None) == (kept == 0)
    for kind, rows in (pieces.aux or {}).items():
        assert the_same(rows, rows_of(PROMPT, IDS[:kept], first)[kind])
    if kept:  # other tokens are sampled in place of the dropped ones
        later = [one + 10 for one in IDS[kept:]]
        if later:
            pieces.add(generation(later, (*PROMPT, *IDS[:kept]), len(PROMPT) + kept - 1))
        expected = rows_of(PROMPT, (*IDS[:kept], *later), first)
        assert pieces.aux is not None
        assert all(the_same(pieces.aux[kind], rows) for kind, rows in expected.items())


def test_a_gap_is_not_filled() -> None:
    sampled = SampledTokens(num_prompt=len(PROMPT))
    sampled.add(generation(IDS[:2]))
    late = generation(IDS[3:], (*PROMPT, *IDS[:3]), len(PROMPT) + 2)
    with pytest.raises(InvariantBroken, match="do not continue"):
        sampled.add(late)


def _moved(kind: AuxKind, by: int) -> Aux:
    rows = rows_of(PROMPT, IDS, 0)
    return {**rows, kind: replace(rows[kind], start=rows[kind].start + by)}


GOOD = rows_of(PROMPT, IDS, 0)
FLAT = GOOD[ROUTES].values
BAD: dict[str, tuple[Aux, str]] = {
    "late experts": (_moved(ROUTES, 1), r"routed_experts has the positions \[1, 11\) where \[0, 10\) are expected"),
    "early mask": (_moved(MASK, -1), r"sampling_mask has the positions \[4, 10\) where \[5, 11\)"),
    "a row too few": ({ROUTES: GOOD[ROUTES].cut(0, 9)}, r"\[0, 9\) where \[0, 10\)"),
    "a torn row": ({ROUTES: AuxRows(0, FLAT[:-1], ROUTES_SHAPE)}, "59 values for rows of shape"),
    "no shape": ({ROUTES: AuxRows(0, FLAT, (0, 2))}, "60 values for rows of shape"),
    "another's mask": ({MASK: ragged(5, [kept_with(one) for one in reversed(IDS)])}, "without the sampled id"),
    "an empty row": ({MASK: ragged(5, [*map(kept_with, IDS[:-1]), []])}, "rows of 0 or more values"),
    "a short mask": ({MASK: ragged(5, [kept_with(one) for one in IDS[:-1]])}, r"\[5, 10\) where \[5, 11\)"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_rows_that_do_not_belong_to_the_tokens_are_never_stored(name: str) -> None:
    aux, message = BAD[name]
    request = GenerateRequest("r", PROMPT, SamplingParams(6))
    check_generation(request, generation(), 100)
    with pytest.raises(MalformedEngineResponse, match=message):
        check_generation(request, generation(aux=aux), 100)


def test_rows_without_tokens_are_refused() -> None:
    request = GenerateRequest("r", PROMPT, SamplingParams(6))
    nothing = Generation("r", (), (), (), FinishReason.ABORT, aux=GOOD)
    with pytest.raises(MalformedEngineResponse, match="without a sampled token"):
        check_generation(request, nothing, 100)


# Paths


def turn(path: GrowingPath, ids: Sequence[int], **fields: object) -> None:
    """Sample a turn as an engine does, with the experts that the path lacks."""
    before, first = path.context_ids, max(path.num_known_tokens - 1, 0)
    reply = make_reply(generation(ids, before, first))
    path.add_turn(replace(reply, aux=packed(rows_of(before, ids, first)), **fields))


def check_path(path: TokenPath) -> None:
    ids, num_prompt = (*path.prompt_ids.tolist(), *path.response_ids.tolist()), len(path.prompt_ids)
    assert path.routed_experts is not None
    assert path.sampling_mask is not None
    expected = routed_experts(ids, 0, num_prompt + path.turns[-1].end - 1)
    assert np.array_equal(path.routed_experts, expected.table)
    kept, ends = path.sampling_mask
    sampled = {place for one in path.turns for place in range(one.start, one.end)}
    start = 0
    for place, end in enumerate(ends):
        wanted = kept_with(ids[num_prompt + place]) if place in sampled else []
        assert kept[start:end].tolist() == wanted
        start = end


def test_turns_observations_and_forks_keep_rows_aligned() -> None:
    growing = GrowingPath([Message("user", "?")])
    growing.start(PROMPT)
    turn(growing, [9, 2])
    growing.add_observed([7, 7])
    turn(growing, [6])
    turn(growing, [5, 3])  # without an observation in between
    growing.extend_to([3, 1, 4, 8])  # a changed history: a new root
    turn(growing, [5])
    growing.add_observed([1])  # nothing is sampled after it
    first, second = growing.paths()
    check_path(first)
    check_path(second)
    assert decode(encode(second), TokenPath).aux == second.aux


def test_misaligned_rows_of_a_turn_are_a_broken_invariant() -> None:
    growing = GrowingPath([Message("user", "?")])
    growing.start(PROMPT)
    turn(growing, [9, 2])
    growing.add_observed([7, 7])
    reply = make_reply(generation([6], growing.context_ids))
    with pytest.raises(InvariantBroken, match=r"routed_experts has the positions \[0, 9\) and not \[6, 9\)"):
        growing.add_turn(replace(reply, aux=packed(rows_of(growing.context_ids, [6], 0))))


def test_a_path_with_a_turn_without_rows_has_none() -> None:
    growing = GrowingPath([Message("user", "?")])
    growing.start(PROMPT)
    growing.add_turn(make_reply(generation([9])))  # its service did not record them
    growing.add_observed([7])
    turn(growing, [6])
    (path,) = growing.paths()
    assert path.aux is path.routed_experts is path.sampling_mask is None


def test_the_canary_of_an_engine_with_masks_is_not_truncated() -> None:
    plain, masked = SimulatedSpec(vocab_size=50), SimulatedSpec(vocab_size=50, sampling_mask=True)
    assert canary_request(plain.info).sampling.top_k == 0
    assert canary_request(masked.info).sampling.top_k == 50
