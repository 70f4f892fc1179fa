"""Token paths: shared tokens are trained once, everything is aligned, and parents are named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.errors import InvariantBroken
from agentloop.trajectory.node import Node, Split
from agentloop.trajectory.token_paths import token_paths
from agentloop.trajectory.turn_graph import Match, TurnGraph
from agentloop.types import SplitReason, StopReason, TokenPath, Trajectory, Turn, WeightVersionSpan
from agentloop.values import codec
from agentloop.values.sampling import TurnSampling
from tests.trajectory.sessions import Played, assistant, messages_of, reply_of, system, user

ASK = (system("be brief"), user("what is 1+1?"))


def test_an_empty_graph_has_no_paths():
    assert token_paths(TurnGraph()) == ()


def test_one_line_of_turns_is_one_path():
    played = Played()
    played.turn(assistant("a"), *ASK)
    second = played.turn(assistant("b"), *ASK, assistant("a"), user("1"))
    (path,) = token_paths(played.graph)
    assert path.prompt_ids.tolist() == [1, 2, 3, 4]
    assert len(path.response_ids) == 3 + 2 + 3
    assert path.response_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert path.logprobs.tolist() == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 3
    assert path.weight_versions == (WeightVersionSpan(0, 0, 3), WeightVersionSpan(0, 5, 8))
    assert path.turns == (
        Turn(4, 0, 3, second.reply.finish_reason, "a", 0, "n0"),
        Turn(9, 5, 8, second.reply.finish_reason, "a", 0, "n1"),
    )
    assert (path.split_reason, path.parent, path.num_shared, path.split_detail) == (None, None, 0, None)
    context = (*path.prompt_ids.tolist(), *path.response_ids.tolist())
    assert context == played.graph.context_ids(second.node_id)
    assert path.messages == (*ASK, assistant("a"), user("1"), assistant("b"))


def test_a_branch_shares_the_path_that_came_first():
    played = Played()
    played.turn(assistant("a"), *ASK)
    played.turn(assistant("b"), *ASK, assistant("a"), user("left"))
    played.turn(assistant("c"), *ASK, assistant("a"), user("right"))
    one, two = token_paths(played.graph)
    assert (two.split_reason, two.parent, two.num_shared) == ("branch", 0, 4 + 3)
    assert two.split_detail == "messages[3]: user 'left' was there, user 'right' came"
    assert two.response_mask.tolist() == [False] * 5 + [True] * 3
    assert two.logprobs.tolist() == one.logprobs.tolist()
    assert two.trained_versions == {0}
    assert two.turns[0] == one.turns[0]
    assert two.response_ids[:3].tolist() == one.response_ids[:3].tolist()


def test_siblings_sampled_at_the_same_time_are_branches_though_no_match_said_so():
    played = Played()
    first = played.turn(assistant("a"), *ASK)
    match = played.ask(*ASK, assistant("a"), user("1"))
    for text in ("b", "c"):
        played.commit(match, assistant(text), observed_ids=[90, 91])
    one, two = token_paths(played.graph)
    assert (one.split_reason, two.split_reason, two.parent, two.num_shared) == (None, "branch", 0, 7)
    assert two.split_detail == "messages[4]: assistant 'b' was there, assistant 'c' came"
    assert first.node_id == "n0"


def test_roots_sampled_at_the_same_time():
    played = Played()
    match, other = played.ask(*ASK), played.ask(user("else"))
    for text in ("a", "b"):
        played.commit(match, assistant(text), observed_ids=[1, 2])
    played.commit(other, assistant("c"))
    one, two, three = token_paths(played.graph)
    assert (one.split_reason, one.parent) == (None, None)
    assert (two.split_reason, two.parent, two.num_shared) == ("branch", 0, 0)
    assert (three.split_reason, three.parent, three.num_shared) == ("new_conversation", None, 0)


def test_a_root_names_the_path_of_the_turn_it_was_split_from():
    played = Played()
    played.turn(assistant("a"), *ASK)
    played.turn(assistant("b"), system("be long"), ASK[1], assistant("a"), user("1"))
    played.turn(assistant("c"), user("else"))
    played.turn(assistant("d"), *ASK, assistant("a"), user("1"))
    changed, other, first = token_paths(played.graph)  # in leaf order
    assert (changed.split_reason, changed.parent, changed.num_shared) == ("system_changed", 2, 0)
    assert changed.split_detail.startswith("messages[0]: system")
    assert (other.split_reason, other.parent) == ("new_conversation", None)
    assert (first.split_reason, first.parent) == (None, None)
    assert all(path.response_mask.any() for path in (changed, other, first))


def test_the_path_that_ends_first_has_the_shared_tokens():
    played = Played()
    played.turn(assistant("a"), *ASK)
    played.turn(assistant("b"), *ASK, assistant("a"), user("left"))
    played.turn(assistant("c"), *ASK, assistant("a"), user("right"))
    played.turn(assistant("d"), *ASK, assistant("a"), user("left"), assistant("b"), user("2"))
    right, left = token_paths(played.graph)
    assert (right.split_reason, right.parent, right.response_mask.sum()) == (None, None, 6)
    assert (left.split_reason, left.parent, left.num_shared, left.response_mask.sum()) == ("branch", 0, 7, 6)
    assert left.split_detail == "messages[3]: user 'right' was there, user 'left' came"


def test_adjacent_spans_of_one_version_join():
    graph = TurnGraph()
    spans = (WeightVersionSpan(1, 0, 1), WeightVersionSpan(2, 1, 3))
    root = Node("a", "c", 0, None, (), np.array([1], np.int32), reply_of(assistant("a"), [5, 6, 7], spans=spans))
    after = (WeightVersionSpan(2, 0, 1), WeightVersionSpan(3, 1, 2))
    reply = reply_of(assistant("b"), [8, 9], spans=after)
    graph.add(root)
    graph.add(Node("b", "c", 0, "a", (), np.array([], np.int32), reply))
    (path,) = token_paths(graph)
    assert path.weight_versions == (
        WeightVersionSpan(1, 0, 1),
        WeightVersionSpan(2, 1, 4),
        WeightVersionSpan(3, 4, 5),
    )


TURN = st.tuples(
    st.integers(0, 10**6),  # the earlier turn that it follows
    st.booleans(),  # True if it starts a new branch
    st.integers(0, 3),  # tokens observed
    # versions and their numbers of ids
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=3),
)


def graph_of(turns) -> TurnGraph:
    graph, next_id = TurnGraph(), 0
    for number, (choice, is_root, num_observed, runs) in enumerate(turns):
        is_root = is_root or number == 0
        num_sampled = sum(length for _, length in runs)
        observed = np.arange(next_id, next_id + num_observed + is_root, dtype=np.int32)
        next_id += len(observed)
        spans, start = [], 0
        for version, length in runs:
            spans.append(WeightVersionSpan(version, start, start + length))
            start += length
        ids = list(range(next_id, next_id + num_sampled))
        next_id += num_sampled
        parent = None if is_root else graph.nodes[choice % number]
        split = None
        if number and is_root:
            split = Split(SplitReason.HISTORY_EDIT, graph.nodes[choice % number].node_id, "x")
        elif parent is not None and graph.has_children(parent.node_id):
            split = Split(SplitReason.BRANCH, parent.node_id, "y")
        reply = reply_of(assistant(f"reply {number}"), ids, spans=tuple(spans))
        reply = replace(reply, logprobs=-np.arange(1, num_sampled + 1, dtype=np.float32))
        parent_id = None if parent is None else parent.node_id
        graph.add(
            Node(f"n{number}", f"c{number}", 0, parent_id, (user(f"{number}"),), observed, reply, split=split)
        )
    return graph


def check_alignment(path: TokenPath, line: list[Node]) -> None:
    num_ids = len(path.response_ids)
    assert len(path.response_mask) == len(path.logprobs) == num_ids
    context = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
    before: list[int] = []
    sampled = np.zeros(num_ids, np.bool_)
    assert len(path.turns) == len(line)
    for turn, node in zip(path.turns, line, strict=True):
        before += node.observed_ids.tolist()
        assert turn.prompt_len == len(before)
        assert context[: turn.prompt_len] == before
        assert path.response_ids[turn.start : turn.end].tolist() == node.reply.token_ids.tolist()
        assert path.logprobs[turn.start : turn.end].tolist() == node.reply.logprobs.tolist()
        before += node.reply.token_ids.tolist()
        sampled[turn.start : turn.end] = True
    assert context == before
    assert not path.logprobs[~sampled].any()
    assert not path.response_mask[~sampled].any()
    covered = np.zeros(num_ids, np.int64)
    for span in path.weight_versions:
        assert span.start < span.end
        covered[span.start : span.end] += 1
    assert (covered == sampled).all()


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(TURN, min_size=1, max_size=25))
def test_every_sampled_token_is_trained_exactly_once(turns):
    graph = graph_of(turns)
    paths = token_paths(graph)
    leaves = [node for node in graph.nodes if not graph.has_children(node.node_id)]
    assert len(paths) == len(leaves)
    trained: list[int] = []
    for path, leaf in zip(paths, leaves, strict=True):
        check_alignment(path, graph.path_of(leaf.node_id))
        trained += path.response_ids[path.response_mask].tolist()
        context = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
        assert tuple(context) == graph.context_ids(leaf.node_id)
        if path.num_shared:
            parent = paths[path.parent]
            theirs = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
            assert context[: path.num_shared] == theirs[: path.num_shared]
            assert not path.response_mask[: path.num_shared - len(path.prompt_ids)].any()
            assert path.split_reason == "branch"
        assert codec.decode(codec.encode(path), TokenPath).turns == path.turns
    assert sorted(trained) == sorted(i for node in graph.nodes for i in node.reply.token_ids.tolist())


@settings(max_examples=100)
@given(st.lists(TURN, min_size=1, max_size=25), st.data())
def test_a_prompt_of_ids_extends_the_longest_path_it_begins_with(turns, data):
    graph = graph_of(turns)
    chosen = data.draw(st.sampled_from(graph.nodes))
    cut = data.draw(st.integers(0, len(graph.context_ids(chosen.node_id))))
    prompt = (*graph.context_ids(chosen.node_id)[:cut], 10**8, 10**8 + 1)
    parent, new_ids, _ = graph.match_ids(prompt)
    known = [graph.context_ids(node.node_id) for node in graph.nodes]
    longest = max((ids for ids in known if prompt[: len(ids)] == ids), key=len, default=None)
    assert (None if parent is None else graph.context_ids(parent.node_id)) == longest
    assert new_ids == prompt[len(longest or ()) :]


@settings(max_examples=100)
@given(st.lists(TURN, min_size=1, max_size=25), st.data())
def test_a_faithful_echo_always_finds_its_turn(turns, data):
    graph = graph_of(turns)
    chosen = data.draw(st.sampled_from(graph.nodes))
    match = graph.match((*messages_of(graph, chosen.node_id), user("next")), ())
    assert match == Match(chosen, (user("next"),), match.split)
    assert (match.split is not None) == graph.has_children(chosen.node_id)


def test_a_path_says_how_each_turn_was_sampled_and_which_tokens_that_constrained():
    played = Played()
    biased, ended = TurnSampling(logit_bias=((9, -100.0),)), TurnSampling(min_tokens=2, stop_token_ids=(0,))
    first = played.turn(assistant("a"), *ASK, sampling=biased, seed=5)
    played.turn(assistant("b"), *ASK, assistant("a"), user("left"), sampling=ended, seed=6)
    played.turn(assistant("c"), *ASK, assistant("a"), user("right"))
    left, right = token_paths(played.graph)
    assert [(turn.sampling, turn.seed) for turn in left.turns] == [(biased, 5), (ended, 6)]
    assert left.turns[0].sampling is first.reply.sampling
    assert left.constrained.tolist() == [True] * 3 + [False] * 2 + [True, True, False]
    assert right.constrained.tolist() == [True] * 3 + [False] * 5
    whole = Trajectory("t", "g", 0, (left, right), StopReason.COMPLETED, True, num_masked_tokens=1)
    cut = whole.without_constrained()
    assert [path.response_mask.tolist() for path in cut.paths] == [[False] * 7 + [True], [False] * 5 + [True] * 3]
    assert (cut.num_masked_tokens, cut.num_sampled_tokens) == (1 + 5, whole.num_sampled_tokens)
    assert cut.without_constrained().num_masked_tokens == cut.num_masked_tokens


def test_raw_logprobs_are_there_if_a_turn_has_them():
    played = Played()
    played.turn(assistant("a"), *ASK)
    played.turn(assistant("b"), *ASK, assistant("a"), user("1"), raw_logprobs=np.full(3, -2.0, np.float32))
    (path,) = token_paths(played.graph)
    assert path.raw_logprobs is not None
    assert np.isnan(path.raw_logprobs[:3]).all()
    assert path.raw_logprobs[3:].tolist() == [0.0, 0.0, -2.0, -2.0, -2.0]
    after = codec.decode(codec.encode(path), TokenPath)
    assert after.raw_logprobs is not None
    assert after.raw_logprobs.tobytes() == path.raw_logprobs.tobytes()


def test_raw_logprobs_that_do_not_align_are_refused():
    with pytest.raises(InvariantBroken, match="raw"):
        Played().turn(assistant("a"), *ASK, raw_logprobs=np.zeros(1, np.float32))
