"""Stop strings: the match is independent of the cuts of the text, and the cost is bounded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.errors import InvalidRequest
from agentloop.generation.turn_sampler import StopFinder, StopMatch

texts = st.text("abé ", max_size=40)
stop_lists = st.lists(st.text("abé ", min_size=1, max_size=5), max_size=4)


def found_by_hand(text: str, stops: list[str]) -> StopMatch | None:
    """Return the first position at which a stop string is complete, and the longest string that ends there."""
    for end in range(1, len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(complete, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


def found(pieces: list[str], stops: list[str]) -> StopMatch | None:
    finder = StopFinder(stops)
    for piece in pieces:
        if (match := finder.add(piece)) is not None:
            return match
    return None


@given(st.lists(texts, max_size=8), stop_lists)
def test_the_first_complete_string_is_found_wherever_the_text_is_cut(pieces: list[str], stops: list[str]):
    assert found(pieces, stops) == found_by_hand("".join(pieces), stops)


@given(st.lists(texts, max_size=8), stop_lists)
def test_what_may_begin_a_stop_string_is_held_and_no_more(pieces: list[str], stops: list[str]):
    finder = StopFinder(stops)
    text = ""
    for piece in pieces:
        if finder.add(piece) is not None:
            return
        text += piece
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert finder.num_held == held


def test_of_overlapping_strings_the_first_complete_one_wins():
    assert found(["x", "ab", "c"], ["abc", "b"]) == StopMatch("b", 2, 3)
    assert found(["xabc"], ["bc", "abc"]) == StopMatch("abc", 1, 4)
    assert found(["x"], []) is None


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        StopFinder(["a", ""])


def test_time_does_not_grow_with_how_a_string_repeats_itself():
    stops = ["a" * 2000 + "b", "a" * 1999 + "c"]
    finder = StopFinder(stops)
    started = time.process_time()
    for _ in range(50_000):
        assert finder.add("aaaa") is None
    assert time.process_time() - started < 10  # a naive search compares 200,000 characters 2,000 times
    assert finder.num_held == 2000
