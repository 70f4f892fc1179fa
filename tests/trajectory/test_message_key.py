"""Changes that clients may make in an echoed message, and changes that start a branch."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.errors import InvalidRequest
from agentloop.trajectory.node import canonical_json, message_key, tools_key
from agentloop.types import JSON, Message, ToolCall, ToolCallStatus
from tests.trajectory.sessions import assistant, call, definition, system, tool, user


def unread(text: str, partial: str | None = None) -> ToolCall:
    return ToolCall("a", "add", {}, ToolCallStatus.MALFORMED, "no JSON", text=text, partial_arguments=partial)


def cut(partial: str) -> ToolCall:
    """Return a call that the turn's end cut after its name."""
    return unread(f'<tool_call>{{"name": "add", "arguments": {partial}', partial=partial)


MALFORMED = ToolCall("a", "add", {}, ToolCallStatus.MALFORMED, "no JSON", text="<tool_call>{x}</tool_call>")
SAME = {
    "developer for system": (system("be brief"), Message("developer", "be brief")),
    "key order": (assistant("", call(arguments={"a": 1, "b": 2})), assistant("", call(arguments={"b": 2, "a": 1}))),
    "whole floats": (
        assistant("", call(arguments={"a": [2.0, -0.0]})),
        assistant("", call(arguments={"a": [2, 0]})),
    ),
    "exponents": (assistant("", call(arguments={"a": 1e3})), assistant("", call(arguments={"a": 1000}))),
    "nested": (
        assistant("", call(arguments={"a": {"c": 1.0, "b": (1,)}})),
        assistant("", call(arguments={"a": {"b": [1], "c": 1}})),
    ),
    "call ids missing": (assistant("", call(call_id="call_0_0")), assistant("", call(call_id=""))),
    "call ids replaced": (assistant("", call(call_id="call_0_0")), assistant("", call(call_id="toolu_9"))),
    "reasoning dropped": (assistant("4", reasoning="2 and 2"), assistant("4")),
    "outer whitespace": (assistant("\n4 "), assistant("4")),
    "a tool's call id": (tool("4", "call_0_0"), tool("4", None)),
    "a tool's name": (tool("4", name="add"), tool("4")),
    "where a call stands": (
        assistant("", ToolCall("c", "add", {"x": 1}, token_start=4, token_end=9)),
        assistant("", ToolCall("c", "add", {"x": 1})),
    ),
    "a malformed call's name": (
        assistant("", MALFORMED),
        assistant(
            "", ToolCall("b", "other", {}, ToolCallStatus.MALFORMED, "bad", text=" <tool_call>{x}</tool_call>\n")
        ),
    ),
    "a cut call as it is shown": (assistant("", cut('{"x": 1, "y')), assistant("", unread('{"x": 1, "y'))),
    "a cut call all of whose arguments were written": (assistant("", cut('{"x": 1}')), assistant("", call("add"))),
    "a cut call none of whose arguments was written": (assistant("", cut("")), assistant("", call("add", {}))),
}
DIFFERENT = {
    "role": (user("4"), assistant("4")),
    "text": (user("4"), user("5")),
    "inner whitespace": (user("4 5"), user("4  5")),
    "case": (user("a"), user("A")),
    "a user's name": (Message("user", "4", name="ann"), Message("user", "4", name="bob")),
    "call name": (assistant("", call("add")), assistant("", call("sub"))),
    "true is not 1": (assistant("", call(arguments={"x": True})), assistant("", call(arguments={"x": 1}))),
    "text is not a number": (assistant("", call(arguments={"x": "1"})), assistant("", call(arguments={"x": 1}))),
    "null is not absent": (assistant("", call(arguments={"x": None})), assistant("", call(arguments={}))),
    "list order": (assistant("", call(arguments={"x": [1, 2]})), assistant("", call(arguments={"x": [2, 1]}))),
    "call order": (assistant("", call("a"), call("b")), assistant("", call("b"), call("a"))),
    "a call as text": (assistant("", call()), assistant('add({"x":1})')),
    "malformed text": (
        assistant("", MALFORMED),
        assistant(
            "", ToolCall("a", "add", {}, ToolCallStatus.MALFORMED, "no JSON", text="<tool_call>{y}</tool_call>")
        ),
    ),
    "a role that looks like a head": (Message("user\nx", "y"), user("x\ny")),
    "integers beyond 64 bits": (
        assistant("", call(arguments={"x": 2**70})),
        assistant("", call(arguments={"x": 2**71})),
    ),
    "lone surrogates": (user("\ud800"), user("\ud801")),
}


@pytest.mark.parametrize(("one", "two"), SAME.values(), ids=SAME)
def test_the_same_turn(one, two):
    assert message_key(one) == message_key(two)


@pytest.mark.parametrize(("one", "two"), DIFFERENT.values(), ids=DIFFERENT)
def test_another_turn(one, two):
    assert message_key(one) != message_key(two)
    assert message_key(one, is_strict=True) != message_key(two, is_strict=True)


@pytest.mark.parametrize("name", ["call ids missing", "call ids replaced", "outer whitespace", "a tool's call id"])
def test_strict_holds_ids_and_exact_text(name):
    one, two = SAME[name]
    assert message_key(one, is_strict=True) != message_key(two, is_strict=True)


@pytest.mark.parametrize(
    "name", ["key order", "whole floats", "reasoning dropped", "a tool's name", "developer for system"]
)
def test_strict_allows_what_no_client_can_keep(name):
    one, two = SAME[name]
    assert message_key(one, is_strict=True) == message_key(two, is_strict=True)


def test_keys_are_the_same_in_every_process():
    assert message_key(user("hello")) == blake2b(b"user\nhello", digest_size=16).digest()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text("e.0aé"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("1.eb"), inner, max_size=3),
        max_leaves=6,
    )
)
def test_a_value_is_written_the_same_beside_a_float(value: JSON):
    """A float anywhere uses the slow path, which checks every value."""
    assert canonical_json([value, 0.5]) == f"[{canonical_json(value)},0.5]"


def test_lone_surrogates_in_arguments_have_a_key():
    assert message_key(assistant("", call(arguments={"x": "\ud800"}))) == message_key(
        assistant("", call(arguments={"x": "\ud800"}))
    )


def test_arguments_nested_too_deeply_are_refused():
    value: dict = {}
    for _ in range(5000):
        value = {"x": value}
    with pytest.raises(InvalidRequest, match="deep"):
        message_key(assistant("", call(arguments=value)))


def test_tools_by_json_value_and_order():
    one, two = definition("a"), definition("b")
    assert tools_key(()) == b""
    assert tools_key([one]) == tools_key([{"function": one["function"], "type": "function"}])
    assert len({tools_key([one]), tools_key([two]), tools_key([one, two]), tools_key([two, one])}) == 4
