"""Lineage: the paths that lead to the final answer, by the client's declarations or by quotes in later prompts."""

from __future__ import annotations

import pytest

from agentloop.trajectory.node import Declaration
from agentloop.trajectory.quotes import MIN_QUOTE_CHARS, find_quotes
from agentloop.trajectory.token_paths import token_paths
from agentloop.types import Message, PathKind, StopReason, Trajectory
from tests.trajectory.sessions import Played, assistant, definition, messages_of, system, user

TASK = (system("You solve tasks."), user("Find the largest file of the repository."))
SUMMARY = "So far I listed the folder src and found three files above one megabyte."
FINDING = "The sub-agent measured every file: the largest one is data/corpus.bin with 4 GiB."
ANSWER = "The largest file of the repository is data/corpus.bin."


def talk(played: Played, *messages: Message, replies: tuple[str, ...], **given) -> list[Message]:
    """Play a conversation of one turn per reply. Returns its messages."""
    history = list(messages)
    for number, reply in enumerate(replies):
        if number:
            history.append(user(f"step {number} of {messages[-1].content[:20]}"))
        said = assistant(reply)
        played.turn(said, *history, **given)
        history.append(said)
    return history


def record_of(played: Played, task: tuple[Message, ...] = ()) -> Trajectory:
    paths = token_paths(played.graph, task_messages=task)
    return Trajectory("t", "g", 0, paths, StopReason.COMPLETED, True, 1.0, task_messages=task)


def kinds_of(record: Trajectory) -> list[tuple[str | None, int | None]]:
    links = [path.lineage for path in record.paths]
    return [(None, None) if link is None else (link.kind.value, link.parent) for link in links]


def num_credited_tokens(record: Trajectory) -> int:
    """Return the number of tokens in the masks of the paths with the trajectory's reward."""
    pairs = zip(record.paths, record.path_rewards, strict=True)
    return sum(int(path.response_mask.sum()) for path, reward in pairs if reward == 1.0)


# Compaction


@pytest.mark.parametrize(("num_before", "num_after"), [(3, 2), (2, 6)])
@pytest.mark.parametrize("task", [(), TASK], ids=["any task", "its task"])
def test_a_summary_in_place_of_the_history_leads_to_the_final_answer(num_before, num_after, task) -> None:
    played = Played()
    talk(played, *TASK, replies=("I start.",) * (num_before - 1) + (SUMMARY,))
    after = talk(
        played,
        TASK[0],
        user(f"Summary of the work so far:\n<summary>{SUMMARY}</summary>"),
        replies=("I continue.",) * (num_after - 1) + (ANSWER,),
    )
    record = record_of(played, task)
    assert kinds_of(record) == [(None, None), ("compacts", 0)]
    assert record.messages == tuple(after)
    assert num_credited_tokens(record) == record.num_sampled_tokens == 3 * (num_before + num_after)
    assert "quotes turn n" in record.paths[1].lineage.evidence
    assert not record.paths[1].lineage.is_declared


def test_white_space_does_not_hide_a_quote_and_a_changed_word_does() -> None:
    for text, is_linked in ((SUMMARY.replace(" ", "\n  "), True), (SUMMARY.replace("three", "four"), False)):
        played = Played()
        talk(played, *TASK, replies=("I start.", SUMMARY))
        talk(played, user(f"You did this: {text}"), replies=("I continue.", ANSWER))
        record = record_of(played, TASK)
        assert (num_credited_tokens(record) == record.num_sampled_tokens) is is_linked
        assert kinds_of(record)[1][0] == ("compacts" if is_linked else "unrelated")


def test_a_short_reply_is_no_quote() -> None:
    for num_chars, is_linked in ((MIN_QUOTE_CHARS, True), (MIN_QUOTE_CHARS - 1, False)):
        played = Played()
        reply = "x" * num_chars
        talk(played, *TASK, replies=(reply,))
        talk(played, user(f"before {reply} after"), replies=("I continue.", ANSWER))
        assert kinds_of(record_of(played, TASK))[1][0] == ("compacts" if is_linked else "unrelated")


def test_a_summary_by_a_separate_call_is_trained_too() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I list the folder src of the repository.", "I measure three files."))
    transcript = "\n".join(message.content for message in history)
    talk(played, user(f"Summarize: {transcript}"), replies=(SUMMARY,))
    after = talk(played, user(f"Continue from here: {SUMMARY}"), replies=("I continue.", ANSWER))
    record = record_of(played, TASK)
    assert kinds_of(record) == [(None, None), ("compacts", 0), ("compacts", 1)]
    assert record.messages == tuple(after)
    assert num_credited_tokens(record) == record.num_sampled_tokens


def test_a_compaction_that_keeps_the_task_prompt_is_named_too() -> None:
    played = Played()
    talk(played, *TASK, replies=("I start.", SUMMARY))
    after = talk(played, *TASK, user(f"Summary: {SUMMARY}"), replies=(ANSWER,))
    record = record_of(played, TASK)
    assert kinds_of(record) == [(None, None), ("compacts", 0)]
    assert record.messages == tuple(after)


# Sub-agents


def with_sub_agents(played: Played, num_agents: int = 1, *, is_compacted: bool = False) -> list[Message]:
    history = talk(played, *TASK, replies=("I delegate the search.",))
    results = []
    for number in range(num_agents):
        finding = f"{number}: {FINDING}"
        talk(played, user(f"agent {number}: measure the files"), replies=("I look.", "I measure.", finding))
        results.append(finding)
    if is_compacted:
        talk(played, user("Continue from: I delegate the search. " + " ".join(results)), replies=("Yes.", ANSWER))
        return history
    history += [user(f"tool results: {results}"), assistant(ANSWER)]
    played.turn(history[-1], *history[:-1])
    return history


@pytest.mark.parametrize("num_agents", [1, 3])
def test_a_sub_agent_whose_result_is_used_is_credited_and_its_caller_answers(num_agents) -> None:
    played = Played()
    history = with_sub_agents(played, num_agents)
    for task in ((), TASK):
        record = record_of(played, task)
        main = num_agents  # its last turn comes last
        assert kinds_of(record) == [("delegates", main)] * num_agents + [(None, None)]
        assert record.messages == tuple(history)
        assert num_credited_tokens(record) == record.num_sampled_tokens
        assert record.main_conversation == (main,)


def test_a_sub_agent_whose_result_is_not_used_has_no_credit() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate the search.", ANSWER))
    talk(played, user("agent: measure the files"), replies=("I look.", FINDING))
    record = record_of(played, TASK)
    assert kinds_of(record) == [(None, None), ("unrelated", None)]
    assert record.messages == tuple(history)
    assert num_credited_tokens(record) == 6


def test_a_sub_agent_of_a_sub_agent_is_credited() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate the search.",))
    agent = talk(played, user("agent: measure the files"), replies=("I delegate, too.",))
    talk(played, user("inner agent: count"), replies=("I count.", SUMMARY))
    agent += [user(f"result: {SUMMARY}"), assistant(FINDING)]
    played.turn(agent[-1], *agent[:-1])
    history += [user(f"result: {FINDING}"), assistant(ANSWER)]
    played.turn(history[-1], *history[:-1])
    record = record_of(played, TASK)
    assert kinds_of(record) == [("delegates", 1), ("delegates", 2), (None, None)]
    assert num_credited_tokens(record) == record.num_sampled_tokens


def test_a_compaction_of_the_caller_with_a_sub_agents_result_credits_both() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate the search to an agent that measures.",))
    talk(played, user("agent: measure the files"), replies=("I look.", FINDING))
    quoted = f"Continue from: {history[-1].content} The agent said: {FINDING}"
    after = talk(played, user(quoted), replies=("I see.", ANSWER))
    record = record_of(played, TASK)
    assert kinds_of(record) == [(None, None), ("delegates", 2), ("compacts", 0)]
    assert record.messages == tuple(after)
    assert num_credited_tokens(record) == record.num_sampled_tokens


def test_a_late_side_call_on_the_old_history_does_not_undo_a_compaction() -> None:
    for is_last in (False, True):
        played = Played()
        history = talk(played, *TASK, replies=("I start.", SUMMARY))
        after = [user(f"Continue from: {SUMMARY}"), assistant("I continue.")]
        played.turn(after[-1], *after[:-1])
        if not is_last:
            played.turn(assistant("Memories."), *history, user("Extract memories."))
        after += [user("finish"), assistant(ANSWER)]
        played.turn(after[-1], *after[:-1])
        if is_last:
            played.turn(assistant("Memories."), *history, user("Extract memories."))
        record = record_of(played)
        assert record.messages == tuple(after)
        assert num_credited_tokens(record) == record.num_sampled_tokens


def test_a_monitor_that_quotes_the_answer_takes_nothing_away() -> None:
    played = Played()
    talk(played, *TASK, replies=("I start.", SUMMARY))
    monitor = talk(played, user("You monitor an agent."), replies=("I watch.",))
    after = talk(played, user(f"Continue from: {SUMMARY}"), replies=("I continue.", ANSWER))
    played.turn(assistant("Logged."), *monitor, user(f"It said: {ANSWER}"))
    for task in ((), TASK):
        record = record_of(played, task)
        assert record.messages == tuple(after)
        assert sorted(str(kind) for kind, _ in kinds_of(record)) == ["None", "compacts", "unrelated"]


def test_a_plan_that_the_main_prompt_quotes_is_credited() -> None:
    for replies in (("I work.", ANSWER), (ANSWER,)):
        played = Played()
        talk(played, user("Make a plan."), replies=("Let me think.", SUMMARY))
        history = talk(played, *TASK, user(f"The plan: {SUMMARY}"), replies=replies)
        record = record_of(played, TASK)
        assert kinds_of(record) == [("delegates", 1), (None, None)]
        assert record.messages == tuple(history)


def test_results_are_followed_through_sub_agents_in_any_order() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I start an agent that measures the files.",))
    talk(played, user("helper 0"), replies=("I look.", f"0: {FINDING}"))
    talk(played, user(f"helper 1, use this: 0: {FINDING}"), replies=("I look, too.", f"1: {FINDING}"))
    talk(played, user(f"Continue: {history[-1].content} 1: {FINDING}"), replies=("I see.", ANSWER))
    record = record_of(played, TASK)
    assert num_credited_tokens(record) == record.num_sampled_tokens
    assert record.messages[-1].content == ANSWER


def test_a_second_compaction_follows_the_first_although_it_quotes_both_summaries() -> None:
    played = Played()
    other = "Then I measured all three files: the corpus is the largest of them."
    talk(played, *TASK, replies=("I start.", SUMMARY))
    talk(played, user(f"Continue from: {SUMMARY}"), replies=("I continue.", other))
    talk(played, user(f"Continue from: {SUMMARY} {other}"), replies=("I finish.", ANSWER))
    assert kinds_of(record_of(played, TASK)) == [(None, None), ("compacts", 0), ("compacts", 1)]


def test_a_sub_agent_compacts_its_own_history() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate.",))
    talk(played, user("agent: measure"), replies=("I look.", SUMMARY))
    talk(played, user(f"agent, continue: {SUMMARY}"), replies=("I look.", FINDING))
    history += [user(f"result: {FINDING}"), assistant(ANSWER)]
    played.turn(history[-1], *history[:-1])
    record = record_of(played)
    assert kinds_of(record) == [("delegates", 2), ("compacts", 0), (None, None)]
    assert record.main_conversation == (2,)


# Side calls


@pytest.mark.parametrize("is_late", [False, True])
def test_calls_for_a_title_and_a_commit_message_change_nothing(is_late: bool) -> None:
    played = Played()
    if not is_late:
        talk(played, user(f"Write a title for: {TASK[1].content}"), replies=("Largest file of a whole repository",))
    history = talk(played, *TASK, replies=("I list the folder src of the repository.", ANSWER))
    talk(
        played,
        system("You write commit messages."),
        user(f"Describe: {ANSWER}"),
        replies=("Find the largest file",),
    )
    if is_late:
        talk(played, system("Name it."), TASK[1], replies=("Largest file",))
    record = record_of(played, TASK)
    assert record.messages == tuple(history)
    assert num_credited_tokens(record) == 6
    assert sorted(str(kind) for kind, _ in kinds_of(record)) == ["None", "unrelated", "unrelated"]


def test_without_task_messages_the_main_conversation_has_the_most_turns() -> None:
    for counts, main in (((1, 2), 1), ((2, 1), 0), ((1, 1), 0)):
        played = Played()
        for number, count in enumerate(counts):
            talk(played, user(f"talk {number}"), replies=("No.",) * count)
        assert record_of(played).main_conversation == (main,)


def test_the_tasks_conversation_is_the_main_one_although_another_is_longer() -> None:
    played = Played()
    talk(played, user("talk"), replies=("No.",) * 5)
    history = talk(played, system("You are an agent."), user(f" {TASK[1].content}\n"), replies=(ANSWER,))
    record = record_of(played, TASK)
    assert (record.main_conversation, record.messages) == ((1,), tuple(history))


# The same conversation


def test_a_changed_system_message_continues_only_with_an_echoed_turn() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I start.",))
    played.turn(assistant("title"), system("Name it."), TASK[1])
    played.turn(assistant(ANSWER), system("It is Tuesday."), *history[1:], user("continue"))
    record = record_of(played)
    assert kinds_of(record) == [(None, None), ("unrelated", None), ("continues", 0)]


def test_changed_tools_and_branches_continue_and_equal_prompts_retry() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I start.",))
    match = played.ask(*history, user("left"))
    for text in ("a", "b"):
        played.commit(match, assistant(text), observed_ids=[70, 71])
    played.turn(assistant("c"), *history, user("right"))
    played.turn(assistant("d"), *history, user("left"), tools=(definition("add"),))
    assert [kind for kind, _ in kinds_of(record_of(played))] == [None, "retries", "continues", "continues"]


def test_an_ambiguous_history_continues() -> None:
    played = Played()
    match = played.ask(*TASK)
    for _ in range(2):
        played.commit(match, assistant("the same"), observed_ids=[1, 2])
    played.turn(assistant(ANSWER), *TASK, assistant("the same"), user("continue"))
    record = record_of(played)
    assert [kind for kind, _ in kinds_of(record)] == [None, "retries", "continues"]
    assert record.messages[-1].content == ANSWER


# Declarations


def test_a_declared_parent_links_conversations_without_a_quote() -> None:
    played = Played()
    talk(played, *TASK, replies=("I start.", "I stop."))
    after = talk(played, user("Go on."), replies=(ANSWER,), declaration=Declaration(parent_turn="n1"))
    record = record_of(played, TASK)
    assert kinds_of(record) == [(None, None), ("compacts", 0)]
    assert record.paths[1].lineage.is_declared
    assert record.messages == tuple(after)


def test_a_declared_parent_that_takes_more_turns_has_delegated() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate.",))
    talk(played, user("agent"), replies=("Done.",), declaration=Declaration(parent_turn="n0"))
    history += [user("Done."), assistant(ANSWER)]
    played.turn(history[-1], *history[:-1])
    record = record_of(played, TASK)
    assert kinds_of(record) == [("delegates", 1), (None, None)]
    assert record.messages == tuple(history)


def test_the_kind_of_a_declared_parent_can_be_declared() -> None:
    played = Played()
    talk(played, *TASK, replies=("I start.", SUMMARY))
    after = talk(played, user(f"Continue from: {SUMMARY}"), replies=("I continue.", ANSWER))
    declaration = Declaration(parent_turn="n0", kind=PathKind.DELEGATES)
    talk(played, user("agent"), replies=("Done.",), declaration=declaration)
    record = record_of(played)
    assert kinds_of(record) == [(None, None), ("compacts", 0), ("delegates", 0)]
    assert record.messages == tuple(after)


def test_declared_agents_are_linked_to_the_agent_that_started_them() -> None:
    played = Played()
    history = talk(played, *TASK, replies=("I delegate.",))
    mine = Declaration(agent="a1", parent_agent="")
    talk(played, user("agent"), replies=("Call b.",), declaration=mine)
    # The same opening as the main agent's: only the declaration distinguishes them.
    talk(played, *TASK, user("inner"), replies=("Done.",), declaration=Declaration(agent="b", parent_agent="a1"))
    talk(played, user("agent, after its compaction"), replies=("No.",), declaration=mine)
    history += [user("Done."), assistant(ANSWER)]
    played.turn(history[-1], *history[:-1])
    record = record_of(played)
    assert kinds_of(record) == [("delegates", 3), ("delegates", 0), ("delegates", 3), (None, None)]
    assert record.messages == tuple(history)
    assert record.paths[1].lineage.evidence == "the client named agent a1 as the parent of agent b"


# Quotes


def test_quotes_are_found_at_any_position_and_only_in_later_prompts() -> None:
    played = Played()
    prefix = "Thought: I have to look at the file again, "
    replies = [f"{prefix}this time at line {number} of it." for number in range(40)]
    played.turn(assistant("early"), user(replies[3]))
    for number, reply in enumerate(replies):
        played.turn(assistant(reply), user(f"prompt {number}"))
    played.turn(assistant("late"), user(f"[{replies[7]}]"), assistant(replies[8]), user(f"x{replies[30]}{prefix}"))
    quotes = find_quotes(played.graph.nodes)
    assert [(quote.reply, quote.prompt) for quote in quotes] == [(8, 41), (31, 41)]
    assert quotes[0].num_chars == len(replies[7])
    assert messages_of(played.graph, "n8")[-1].content == replies[7]


def test_a_quote_does_not_span_two_messages() -> None:
    played = Played()
    played.turn(assistant(SUMMARY), *TASK)
    played.turn(assistant("late"), user(SUMMARY[:40].strip()), user(SUMMARY[40:].strip()))
    assert find_quotes(played.graph.nodes) == []
