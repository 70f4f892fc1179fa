"""The fast path of `loads` returns the same values as the slow path."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.parsers.grammar import loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_a_value_however_it_is_written(value: object):
    texts = [json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)]
    if "inf" not in repr(value).lower():
        texts.append(orjson.dumps(value).decode())
    for text in texts:
        if "Infinity" not in text:
            found = loads(text)
            assert json.dumps(found) == json.dumps(json.loads(text))  # 1 differs from 1.0 and from True here


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":1,"a":2}',
        "18446744073709551616",
        "[1e400]",
        "[NaN]",
        '"\\ud800"',
        "[" * 65 + "]" * 65,
    ],
)
def test_what_the_service_cannot_carry(text: str):
    with pytest.raises(ValueError, match=r".+"):
        loads(text)
