"""Matching by ids, template splits and memory use, for raw completions and unstable templates."""

import gc
import time
import tracemalloc

import numpy as np
import pytest

from agentloop.trajectory.node import Node
from agentloop.trajectory.turn_graph import TurnGraph
from agentloop.types import Message, SplitReason, ToolCall, TopLogprobs
from tests.trajectory.sessions import Played, assistant, reply_of, system, user


def raw(graph: TurnGraph, prompt, reply_ids) -> Node:
    """Commit a raw completion as a session does: its messages are unknown."""
    parent, new_ids, split = graph.match_ids(prompt)
    name = f"n{len(graph.nodes)}"
    parent_id = None if parent is None else parent.node_id
    reply = reply_of(assistant(f"text of {name}"), reply_ids)
    node = Node(name, name, 0, parent_id, (), np.array(new_ids, np.int32), reply, split=split)
    graph.add(node)
    return node


def letters(ids) -> str:
    return "".join(chr(97 + i) for i in ids)


def test_a_prompt_that_begins_with_a_path_extends_it():
    graph = TurnGraph()
    assert graph.match_ids([1, 2]) == (None, (1, 2), None)
    first = raw(graph, [1, 2], [3, 4])
    assert graph.match_ids([1, 2, 3, 4, 5]) == (first, (5,), None)
    assert graph.match_ids([1, 2, 3, 4]) == (first, (), None)
    second = raw(graph, [1, 2, 3, 4, 5], [6])
    assert graph.match_ids((1, 2, 3, 4, 5, 6, 7)) == (second, (7,), None)
    assert graph.context_ids(second.node_id) == (1, 2, 3, 4, 5, 6)


def test_the_cuts_between_turns_do_not_matter():
    graph = TurnGraph()
    raw(graph, [0, 1], [2])
    raw(graph, [0, 1, 2, 0], [3])
    other = raw(graph, [0, 1, 2, 0, 9], [4])  # a separate root: it does not begin with the second path
    assert graph.match_ids([0, 1, 2, 0, 9, 4, 0])[0] is other
    assert graph.match_ids([0, 0, 1, 2])[0] is None


def test_a_second_way_on_is_a_branch_with_its_difference():
    graph = TurnGraph()
    first = raw(graph, [0, 1], [2, 3])
    raw(graph, [0, 1, 2, 3, 4], [5])
    parent, new_ids, split = graph.match_ids([0, 1, 2, 3, 6, 7], decode=letters)
    assert (parent, new_ids) == (first, (6, 7))
    assert (split.reason, split.from_node) == (SplitReason.BRANCH, first.node_id)
    assert split.detail == "tokens[4]: 'abcdef' was there, 'abcdgh' came"


def test_the_same_prompt_again_and_a_reply_that_came_back_otherwise():
    graph = TurnGraph()
    first = raw(graph, [0, 1], [2, 3])
    again = graph.match_ids([0, 1])
    assert (again[0], again[1], again[2].reason, again[2].from_node) == (
        None,
        (0, 1),
        SplitReason.BRANCH,
        first.node_id,
    )
    edited = graph.match_ids([0, 1, 2, 9, 4])
    assert (edited[0], edited[2].reason, edited[2].from_node) == (None, SplitReason.HISTORY_EDIT, first.node_id)
    assert edited[2].detail == "tokens[3]: [0, 1, 2, 3] was there, [0, 1, 2, 9, 4] came"
    other = graph.match_ids([8, 9])
    assert (other[0], other[2].reason, other[2].from_node) == (None, SplitReason.NEW_CONVERSATION, None)


def test_raw_turns_are_in_no_history_of_messages():
    graph = TurnGraph()
    raw(graph, [1, 2], [3])
    match = graph.match((assistant("text of n0"), user("1")), ())
    assert (match.parent, match.split.reason) == (None, SplitReason.NEW_CONVERSATION)


def test_chat_turns_are_found_by_their_ids():
    played = Played()
    turn = played.turn(assistant("a"), user("x"))
    prompt = (*played.graph.context_ids(turn.node_id), 99)
    assert played.graph.match_ids(prompt) == (turn, (99,), None)


def test_a_whole_rendering_either_extends_the_turn_or_is_a_template_split():
    played = Played()
    turn = played.turn(assistant("a"), user("x"), ids=[7, 8, 9])
    path = played.graph.context_ids(turn.node_id)
    assert played.graph.mark_template_split(turn.node_id, (*path, 1)) is None
    split = played.graph.mark_template_split(turn.node_id, (*path[:-2], 20, 21), letters)
    assert (split.reason, split.from_node) == (SplitReason.TEMPLATE, turn.node_id)
    assert split.detail.startswith(f"tokens[{len(path) - 2}]: ")
    assert len(played.graph.nodes) == 1


def test_details_of_ids_are_bounded():
    graph = TurnGraph()
    raw(graph, [1], list(range(1000)))
    split = graph.match_ids([1, 0, 1, 2, 9] + [2**31 - 1] * 5000, decode=lambda ids: "\x00" * 50 * len(ids))[2]
    assert len(split.detail) <= 300


def test_paths_side_by_side_are_put_together_from_their_turns():
    graph = TurnGraph()
    leaves = []
    for line in range(12):
        prompt = [line]
        for turn in range(4):
            leaf = raw(graph, prompt, [100 * line + turn])
            prompt = [*graph.context_ids(leaf.node_id), 5]
        leaves.append((leaf, tuple(prompt[:-1])))
    for leaf, ids in leaves:
        assert graph.context_ids(leaf.node_id) == ids
    middle = graph.node("n1")
    assert graph.context_ids(middle.node_id) == (0, 0, 5, 1)


def test_a_context_of_a_turn_that_went_on():
    played = Played()
    first = played.turn(assistant("a"), user("x"))
    before = played.graph.context_ids(first.node_id)
    second = played.turn(assistant("b"), user("x"), assistant("a"), user("y"))
    after = played.graph.context_ids(second.node_id)
    assert played.graph.context_ids(first.node_id) == before == after[: len(before)]


def alternatives(num: int) -> TopLogprobs:
    return tuple(tuple((1000 + i, -0.5 * i) for i in range(5)) for _ in range(num))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "calls", "raw"])
def test_num_bytes_is_a_bound_on_what_python_says(kind):
    def build() -> TurnGraph:
        played, history = Played(), [system("be brief " * 100), user("begin")]
        rng = np.random.default_rng(0)
        for turn in range(150):
            ids = rng.integers(0, 150_000, 60).tolist()
            if kind == "raw":
                latest = f"n{turn - 1}"
                raw(played.graph, [*played.graph.context_ids(latest), 1, 2] if turn else [1, 2], ids)
                continue
            called = ToolCall(
                f"call_{turn}", f"tool {turn}", {f"key {turn}": f"value {turn}" * 3, "n": [turn + 1000]}
            )
            calls = (called,) if kind == "calls" else ()
            reply = assistant(f"reply {turn} " * 10, *calls)
            played.turn(reply, *history, ids=ids)
            echo = Message("assistant", f"reply {turn} " * 10, calls)
            history += [echo, Message("tool" if calls else "user", f"answer {turn} " * 20)]
        return played.graph

    build()
    gc.collect()
    tracemalloc.start()
    try:
        graph = build()
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 1 < graph.num_bytes / measured < 2


def test_alternatives_count():
    def with_top(top: TopLogprobs) -> int:
        graph = TurnGraph()
        made = reply_of(assistant("a"), [1, 2, 3])
        reply = type(made)(
            made.message,
            made.token_ids,
            made.logprobs,
            made.weight_versions,
            made.finish_reason,
            True,
            top_logprobs=top,
        )
        graph.add(Node("a", "c", 0, None, (user("x"),), np.array([5], np.int32), reply))
        return graph.num_bytes

    assert with_top(alternatives(3)) - with_top(()) > 3 * 5 * 80


def test_matching_does_not_grow_with_the_graph():
    best_s = []
    for width in (4, 2000):
        graph = TurnGraph()
        for line in range(width):
            reply = reply_of(assistant("a"), [9])
            ids = np.array([2, line], np.int32)
            graph.add(Node(f"m{line}", "c", 0, None, (user(f"task {line}"),), ids, reply))
        request = (user("task 1"), assistant("a"), *[user(f"next {i}") for i in range(50)])
        times = []
        for _ in range(20):
            started = time.perf_counter()
            assert graph.match(request, ()).parent.node_id == "m1"
            assert graph.match_ids((2, 1, 9, 5))[0].node_id == "m1"
            times.append(time.perf_counter() - started)
        best_s.append(min(times))
    assert best_s[1] < 20 * best_s[0]  # 500 times as many turns
