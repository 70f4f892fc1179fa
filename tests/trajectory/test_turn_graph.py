"""The turn that a request extends: extension, forks with their reasons, and the reported detail."""

import numpy as np
import pytest

from agentloop.errors import InvalidRequest, InvariantBroken
from agentloop.trajectory.node import Node, Split
from agentloop.trajectory.turn_graph import Match, TurnGraph
from agentloop.types import Message, SplitReason, ToolCall, ToolCallStatus, WeightVersionSpan
from agentloop.values import codec
from tests.trajectory.sessions import Played, assistant, call, definition, messages_of, reply_of, system, tool, user

ASK = (system("be brief"), user("what is 1+1?"))
TOOLS = (definition("add"),)
CALLED = assistant("I add.", call("add", {"x": 1, "y": 2}), reasoning="one and two")


@pytest.fixture
def played() -> Played:
    return Played()


def is_extension(match: Match, parent: Node, *appended: Message) -> bool:
    return match.parent is parent and match.appended == appended and match.split is None


def test_the_first_request_is_a_root_without_a_split(played):
    assert played.ask(*ASK) == Match(None, ASK, None)


QUIRKS = {
    "verbatim": CALLED,
    "reasoning dropped": assistant("I add.", call("add", {"x": 1, "y": 2})),
    "arguments re-serialised": assistant("I add.", call("add", {"y": 2.0, "x": 1})),
    "no call ids": assistant("I add.", call("add", {"x": 1, "y": 2}, "")),
    "other call ids": assistant("I add.", call("add", {"x": 1, "y": 2}, "toolu_1")),
    "whitespace": assistant(" I add.\n", call("add", {"x": 1, "y": 2})),
}


@pytest.mark.parametrize("echo", QUIRKS.values(), ids=QUIRKS)
def test_an_echo_with_a_client_quirk_extends_the_turn(played, echo):
    turn = played.turn(CALLED, *ASK, tools=TOOLS)
    answer = tool("3")
    assert is_extension(played.ask(*ASK, echo, answer, tools=TOOLS), turn, answer)


def test_null_content_beside_calls_is_empty_content(played):
    turn = played.turn(assistant("", call()), *ASK)
    assert is_extension(played.ask(*ASK, assistant("", call()), tool("3")), turn, tool("3"))


def test_an_echo_with_the_stop_string_that_cut_it(played):
    turn = played.turn(assistant("hi"), *ASK, stop_text="</code>")
    for echo in ("hi", "hi</code>", "hi</code>\n"):
        assert is_extension(played.ask(*ASK, assistant(echo), user("go on")), turn, user("go on"))
    assert played.ask(*ASK, assistant("hi</cod"), user("go on")).split.reason is SplitReason.HISTORY_EDIT


def test_an_echo_with_a_stop_string_keeps_extending_later(played):
    played.turn(assistant("hi"), *ASK, stop_text="</code>")
    second = played.turn(assistant("ho"), *ASK, assistant("hi</code>"), user("1"), stop_text="</code>")
    match = played.ask(*ASK, assistant("hi"), user("1"), assistant("ho</code>"), user("2"))
    assert is_extension(match, second, user("2"))


def test_the_stop_string_of_one_turn_is_the_text_of_another(played):
    cut = played.turn(assistant("hi"), *ASK, stop_text="!")
    whole = played.turn(assistant("hi!"), *ASK)
    assert played.ask(*ASK, assistant("hi"), user("1")).parent is cut
    assert played.ask(*ASK, assistant("hi!"), user("1")).split.reason is SplitReason.AMBIGUOUS
    child = played.commit(Match(whole, (user("1"),), None), assistant("x"))
    assert played.ask(*ASK, assistant("hi!"), user("1"), assistant("x"), user("2")).parent is child


def test_a_call_with_invalid_arguments_is_known_by_its_text(played):
    broken = ToolCall("call_0_0", "add", {}, ToolCallStatus.MALFORMED, "not JSON", 0, 3, text='add({"x": )')
    turn = played.turn(assistant("", broken), *ASK)
    echoed = ToolCall("call_0_0", "add", {}, ToolCallStatus.MALFORMED, "arguments are not JSON", text='add({"x": )')
    assert is_extension(played.ask(*ASK, assistant("", echoed), tool("error")), turn, tool("error"))


def test_calls_rewritten_to_text_are_an_edit(played):
    turn = played.turn(CALLED, *ASK)
    match = played.ask(*ASK, assistant("I add.\nCalling tools: add(1, 2)"), user("Observation: 3"))
    assert (match.parent, len(match.appended)) == (None, 4)
    assert (match.split.reason, match.split.from_node) == (SplitReason.HISTORY_EDIT, turn.node_id)
    assert match.split.detail == (
        'messages[2]: assistant \'I add. add({"x":1,"y":2})\' was there, '
        "assistant 'I add.\\nCalling tools: add(1, 2)' came"
    )


def test_deepest_turn_wins(played):
    first = played.turn(assistant("a"), *ASK)
    second = played.turn(assistant("b"), *ASK, assistant("a"), user("1"))
    assert second.parent_id == first.node_id
    match = played.ask(*ASK, assistant("a"), user("1"), assistant("b"), user("2"))
    assert is_extension(match, second, user("2"))


def test_a_reply_that_nobody_sampled_is_observed(played):
    turn = played.turn(assistant("b"), user("x"), assistant("made up"), user("y"))
    assert turn.observed == (user("x"), assistant("made up"), user("y"))
    match = played.ask(user("x"), assistant("made up"), user("y"), assistant("b"), user("z"))
    assert is_extension(match, turn, user("z"))
    later = played.turn(assistant("c"), *turn.observed, assistant("b"), assistant("made up too"), user("z"))
    assert later.split.reason is SplitReason.HISTORY_EDIT  # an assistant message cannot answer a reply
    assert later.parent_id is None


def test_rollback_of_the_last_turn_is_a_branch(played):
    first = played.turn(assistant("a"), *ASK)
    second = played.turn(assistant("b"), *ASK, assistant("a"), user("left"))
    match = played.ask(*ASK, assistant("a"), user("right"))
    detail = "messages[3]: user 'left' was there, user 'right' came"
    assert match == Match(first, (user("right"),), Split(SplitReason.BRANCH, first.node_id, detail))
    again = played.ask(*ASK, assistant("a"), user("left"))
    assert again.split.detail == "messages[4]: assistant 'b' was there, nothing came"
    assert (again.parent, again.split.reason, second.split) == (first, SplitReason.BRANCH, None)


def test_the_first_prompt_once_more_is_a_branch_of_its_root(played):
    first = played.turn(assistant("a"), *ASK)
    match = played.ask(*ASK)
    assert (match.parent, match.appended) == (None, ASK)
    assert (match.split.reason, match.split.from_node) == (SplitReason.BRANCH, first.node_id)


def test_a_later_reply_rewritten_is_an_edit_from_the_turn_before(played):
    first = played.turn(assistant("a"), *ASK)
    played.turn(assistant("b"), *ASK, assistant("a"), user("1"))
    match = played.ask(*ASK, assistant("a"), user("1"), assistant("B"), user("2"))
    assert (match.parent, match.split.reason) == (first, SplitReason.HISTORY_EDIT)
    assert match.appended == (user("1"), assistant("B"), user("2"))
    assert match.split.detail == "messages[4]: assistant 'b' was there, assistant 'B' came"


def test_a_history_that_ends_with_a_reply_goes_on_from_the_turn_before(played):
    first = played.turn(assistant("a"), *ASK)
    assert played.ask(*ASK, assistant("a")).split.reason is SplitReason.HISTORY_EDIT
    assert played.ask(*ASK, assistant("a")).parent is None
    played.turn(assistant("b"), *ASK, assistant("a"), user("1"))
    match = played.ask(*ASK, assistant("a"), user("1"), assistant("b"))
    assert (match.parent, match.appended) == (first, (user("1"), assistant("b")))
    assert match.split.detail == "messages[4]: a reply was echoed, and nothing that answers it"


def test_parallel_sub_agents_are_new_conversations(played):
    main = played.turn(assistant("a"), *ASK)
    for task in ("find the file", "write the test"):
        match = played.ask(ASK[0], user(task))
        assert match.parent is None
        assert (match.split.reason, match.split.from_node) == (SplitReason.NEW_CONVERSATION, None)
        played.commit(match, assistant(f"done: {task}"))
    assert played.ask(*ASK, assistant("a"), user("1")).parent is main
    helper = played.ask(ASK[0], user("find the file"), assistant("done: find the file"), user("2"))
    assert (helper.parent.node_id, helper.split) == ("n1", None)


def test_the_detail_of_a_new_conversation_shows_the_latest_one(played):
    played.turn(assistant("a"), *ASK)
    match = played.ask(ASK[0], user("find the file"))
    assert match.split.detail == "messages[1]: user 'what is 1+1?' was there, user 'find the file' came"


def test_compaction_is_an_edit_from_the_nearest_path(played):
    played.turn(assistant("a"), *ASK)
    second = played.turn(assistant("b"), *ASK, assistant("a"), user("1"))
    third = played.turn(assistant("c"), *ASK, assistant("a"), user("1"), assistant("b"), user("2"))
    summary = user("so far: a, then b")
    kept_opening = played.ask(*ASK, summary)
    assert (kept_opening.split.reason, kept_opening.split.from_node) == (SplitReason.HISTORY_EDIT, "n0")
    kept_tail = played.ask(ASK[0], summary, assistant("c"), user("3"))
    assert (kept_tail.split.reason, kept_tail.split.from_node) == (SplitReason.HISTORY_EDIT, third.node_id)
    assert kept_tail.split.detail.startswith("messages[1]: user 'what is 1+1?' was there, user 'so far")
    dropped = played.ask(*ASK, assistant("b"), user("2"), assistant("c"), user("3"))
    assert dropped.split.reason is SplitReason.HISTORY_EDIT
    assert dropped.split.detail == "messages[2]: assistant 'a' was there, assistant 'b' came"
    assert all(match.parent is None for match in (kept_opening, kept_tail, dropped))
    assert second.split is None


def test_another_system_message(played):
    first = played.turn(assistant("a"), *ASK)
    echoed = (ASK[1], assistant("a"), user("1"))
    match = played.ask(system("be brief at 12:01"), *echoed)
    assert (match.parent, match.split.reason) == (None, SplitReason.SYSTEM_CHANGED)
    assert match.split.from_node == first.node_id
    assert match.split.detail == "messages[0]: system 'be brief' was there, system 'be brief at 12:01' came"
    assert played.ask(*echoed).split.reason is SplitReason.SYSTEM_CHANGED
    assert played.ask(ASK[0], system("more"), *echoed).split.reason is SplitReason.SYSTEM_CHANGED
    assert played.ask(Message("developer", "be brief"), *echoed).parent is first


def test_other_tools(played):
    first = played.turn(assistant("a"), *ASK, tools=TOOLS)
    more = (*TOOLS, definition("sub"))
    for messages in ((*ASK, assistant("a"), user("1")), ASK):
        match = played.ask(*messages, tools=more)
        assert (match.parent, match.split.reason) == (None, SplitReason.TOOLS_CHANGED)
        assert match.split.from_node == first.node_id
        assert match.split.detail == "tools: sub added"
    assert played.ask(*ASK, assistant("a"), user("1")).split.detail == "tools: add removed"
    assert played.ask(user("else"), tools=more).split.reason is SplitReason.NEW_CONVERSATION


def test_tools_that_come_and_go_extend_each_their_own_path(played):
    history = [*ASK]
    for round_index in range(6):
        tools = TOOLS if round_index % 2 else ()
        turn = played.turn(assistant(f"reply {round_index}"), *history, tools=tools)
        assert (turn.parent_id is None) == (round_index < 2)
        history += [assistant(f"reply {round_index}"), user(f"then {round_index}")]


def test_what_tools_were_is_not_known_after_a_restore(played):
    played.turn(assistant("a"), *ASK, tools=TOOLS)
    restored = TurnGraph()
    for node in played.graph.nodes:
        restored.add(node)
    match = restored.match(ASK, (definition("sub"),))
    assert match.split.detail == "tools: other definitions were there, sub came"


def two_equal_replies(played: Played, one: Message, two: Message, ids=(None, None)) -> tuple[Node, Node]:
    match = played.ask(*ASK)
    made = [
        played.commit(match, reply, ids=own, observed_ids=[1, 2, 3])
        for reply, own in zip((one, two), ids, strict=True)
    ]
    return made[0], made[1]


def test_a_history_that_fits_two_turns_is_ambiguous(played):
    two_equal_replies(played, assistant("4"), assistant("4"))
    match = played.ask(*ASK, assistant("4"), user("1"))
    detail = "messages[:3] match turns n0 and n1, whose text is equal and whose tokens differ"
    assert match.parent is None
    assert match.split == Split(SplitReason.AMBIGUOUS, "n1", detail)


def test_equal_tokens_are_no_ambiguity(played):
    _, last = two_equal_replies(played, assistant("4"), assistant("4"), ids=([7, 8], [7, 8]))
    assert played.ask(*ASK, assistant("4"), user("1")).parent is last


@pytest.mark.parametrize("chosen", [0, 1])
def test_call_ids_tell_equal_tokens_apart(played, chosen):
    replies = [assistant("", call(call_id=f"call_{i}_0")) for i in range(2)]
    turns = two_equal_replies(played, *replies, ids=([7, 8], [7, 8]))
    asked = [played.ask(*ASK, reply, tool("3")) for reply in replies]
    children = [played.commit(match, assistant("5"), ids=[9], observed_ids=[4, 5]) for match in asked]
    assert [child.parent_id for child in children] == [turn.node_id for turn in turns]
    assert [child.split for child in children] == [None, None]
    deeper = played.ask(*ASK, replies[chosen], tool("3"), assistant("5"), user("1"))
    assert is_extension(deeper, children[chosen], user("1"))
    unnamed = assistant("", call(call_id="other"))
    assert played.ask(*ASK, unnamed, tool("3"), assistant("5"), user("1")).parent is children[1]


@pytest.mark.parametrize("chosen", [0, 1])
def test_call_ids_tell_turns_apart(played, chosen):
    replies = [assistant("", call(call_id=f"call_0_{i}")) for i in range(2)]
    turns = two_equal_replies(played, *replies)
    assert played.ask(*ASK, replies[chosen], tool("3")).parent is turns[chosen]
    child = played.turn(assistant("5"), *ASK, replies[chosen], tool("3"))
    deeper = played.ask(*ASK, replies[chosen], tool("3"), assistant("5"), user("1"))
    assert is_extension(deeper, child, user("1"))


def test_call_ids_of_an_earlier_turn_tell_its_descendants_apart(played):
    replies = [assistant("", call(call_id=f"call_0_{i}")) for i in range(2)]
    two_equal_replies(played, *replies)
    children = [played.turn(assistant("5"), *ASK, reply, tool("3")) for reply in replies]
    for reply, child in zip(replies, children, strict=True):
        assert played.ask(*ASK, reply, tool("3"), assistant("5"), user("1")).parent is child
    unknown = assistant("", call(call_id=""))
    match = played.ask(*ASK, unknown, tool("3"), assistant("5"), user("1"))
    assert match.split.reason is SplitReason.AMBIGUOUS


@pytest.mark.parametrize("echo_id", ["", "call_9_9"])
def test_call_ids_that_tell_nothing(played, echo_id):
    two_equal_replies(played, *(assistant("", call(call_id=f"call_0_{i}")) for i in range(2)))
    match = played.ask(*ASK, assistant("", call(call_id=echo_id)), tool("3"))
    assert match.split.reason is SplitReason.AMBIGUOUS


def test_echoed_reasoning_tells_turns_apart(played):
    replies = [assistant("4", reasoning=f"way {i}") for i in range(2)]
    turns = two_equal_replies(played, *replies)
    for reply, turn in zip(replies, turns, strict=True):
        assert played.ask(*ASK, reply, user("1")).parent is turn
    assert played.ask(*ASK, assistant("4"), user("1")).split.reason is SplitReason.AMBIGUOUS
    assert played.ask(*ASK, assistant("4", reasoning="no way"), user("1")).split.reason is SplitReason.AMBIGUOUS


def test_strict_mode_takes_nothing_but_an_exact_echo(played):
    turn = played.turn(CALLED, *ASK)
    answer = tool("3")
    assert is_extension(played.ask(*ASK, CALLED, answer, is_strict=True), turn, answer)
    renamed = assistant("I add.", call("add", {"x": 1, "y": 2}, "toolu_1"))
    match = played.ask(*ASK, renamed, answer, is_strict=True)
    assert (match.parent, match.split.reason) == (None, SplitReason.HISTORY_EDIT)
    assert "[call_0_0]" in match.split.detail
    assert "[toolu_1]" in match.split.detail
    assert played.ask(*ASK, renamed, answer).parent is turn
    later = played.turn(assistant("b"), *ASK, CALLED, answer)  # the strict index continues with the graph
    assert played.ask(*ASK, CALLED, answer, assistant("b"), user("1"), is_strict=True).parent is later
    assert played.ask(*ASK, CALLED, answer, assistant("b "), user("1"), is_strict=True).parent is turn


@pytest.mark.parametrize("filler", ["x", "\\\n\x00", "ü", "🙂"])
def test_details_are_bounded_and_show_the_first_difference(played, filler):
    long = filler * 100_000
    played.turn(assistant(f"{long}HERE{long}"), *ASK)
    detail = played.ask(*ASK, assistant(f"{long}THERE{long}"), user("1")).split.detail
    assert len(detail) <= 300
    assert "HERE" in detail.split(" was there, ")[0]
    assert "THERE" in detail.split(" was there, ")[1]


def test_no_messages_are_refused(played):
    with pytest.raises(InvalidRequest):
        played.ask()


def node(node_id: str, parent_id: str | None = None, **reply) -> Node:
    made = reply_of(assistant("a"), [1, 2], **reply)
    return Node(node_id, "c", 0, parent_id, (user("x"),), np.array([5], np.int32), made)


def test_broken_nodes_are_refused_and_leave_nothing():
    graph = TurnGraph()
    graph.add(node("a"))
    before = graph.num_bytes
    for broken in (
        node("a"),
        node("b", "nobody"),
        node("b", spans=(WeightVersionSpan(0, 0, 1),)),
        node("b", spans=()),
    ):
        with pytest.raises(InvariantBroken):
            graph.add(broken)
    uneven = reply_of(assistant("a"), [1, 2])
    with pytest.raises(InvariantBroken):
        graph.add(Node("b", "c", 0, None, (), np.array([5], np.int32), short_of_a_logprob(uneven)))
    assert [known.node_id for known in graph.nodes] == ["a"]
    assert graph.num_bytes == before


def short_of_a_logprob(reply):
    """Return the reply with one logprob missing."""
    return type(reply)(
        reply.message, reply.token_ids, reply.logprobs[:-1], reply.weight_versions, reply.finish_reason, True
    )


def test_nodes_survive_the_codec_and_make_an_equal_graph(played):
    played.turn(CALLED, *ASK, tools=TOOLS, stop_text="</s>")
    played.turn(assistant("b"), *ASK, CALLED, tool("3"), tools=TOOLS)
    played.turn(assistant("c"), *ASK, CALLED, tool("4"), tools=TOOLS)
    played.turn(assistant("ü", ToolCall("a", "", {}, ToolCallStatus.MALFORMED, "bad", text="{")), user("other"))
    restored = TurnGraph()
    for before in played.graph.nodes:
        after = codec.decode(codec.encode(before), Node)
        restored.add(after)
        assert (after.split, after.observed, after.tools_key) == (before.split, before.observed, before.tools_key)
        assert after.reply.message == before.reply.message
        assert restored.context_ids(after.node_id) == played.graph.context_ids(before.node_id)
        assert messages_of(restored, after.node_id) == messages_of(played.graph, before.node_id)
    request = (*ASK, CALLED, tool("3"), assistant("b"), user("1"))
    one, two = restored.match(request, TOOLS), played.ask(*request, tools=TOOLS)
    assert (one.parent.node_id, one.appended, one.split) == (two.parent.node_id, two.appended, two.split)
