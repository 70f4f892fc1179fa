"""ATIF files: the standard fields equal the record's, and a record that is read back equals the stored one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from agentloop.errors import InvalidRequest
from agentloop.images import IMAGES_FOLDER, ImageRef, ImageSpan
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader
from agentloop.types import (
    Lineage,
    Message,
    PathKind,
    SplitReason,
    StopReason,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    TurnTimes,
    WeightVersionSpan,
)
from agentloop.values import codec
from agentloop_servers.cli.commands import app
from agentloop_view.imported import read_atif, read_conversations
from tests.support.records.samples import fill_store, make_path, make_trajectory

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def plain() -> Trajectory:
    return make_trajectory("plain", spans=((3, 0, 2), (4, 2, 3), (4, 5, 8)))


def rich() -> Trajectory:
    """A masked record with raw logprobs, token rewards, an image, a malformed call and trailing tokens."""
    path = make_path()
    mask = path.response_mask.copy()
    mask[1] = False
    trailing = np.array([*path.response_ids, 7, 8], np.int32)
    zeros = np.zeros(10, np.float32)
    raw = zeros.copy()
    raw[:3], raw[5:8] = np.nan, -0.5
    call = ToolCall("call-2", "search", {}, ToolCallStatus.MALFORMED, "no JSON", text="<tool_call>{", token_end=3)
    messages = (
        Message("developer", "Be short."),
        Message("user", "What is  here?", images=(ImageRef("ab" * 32, 8),)),
        Message("assistant", "An example."),
        Message("user", "And now?", name="Ada"),
        Message("assistant", "", (call,), reasoning="I should search."),
        Message("tool", "Error: no JSON", tool_call_id="call-2", name="search"),
        Message("assistant", "Nothing."),
        Message("tool", "late", tool_call_id="call-9", name="search"),
    )
    path = replace(
        path,
        response_ids=trailing,
        response_mask=np.array([*mask, False, False]),
        logprobs=np.array([*path.logprobs, 0, 0], np.float32),
        raw_logprobs=raw,
        token_rewards=zeros + np.array([*mask, False, False]),
        images=(ImageSpan("ab" * 32, 2, 4),),
        messages=messages,
    )
    return replace(make_trajectory("rich", paths=(path,)), num_masked_tokens=1)


def with_agents() -> Trajectory:
    """A main conversation with a sub-agent, a compaction, a branch after it, and a call for a title."""
    base = plain().paths[0]
    paths = [base]
    for number, lineage in enumerate(
        (
            Lineage(PathKind.DELEGATES, 0, "the prompt of turn 1 quotes turn 2 (40 characters)"),
            Lineage(PathKind.COMPACTS, 0, is_declared=True),
            Lineage(PathKind.CONTINUES, 2),
            Lineage(PathKind.UNRELATED),
        ),
        1,
    ):
        turns = tuple(
            replace(turn, turn_id=f"{2 * number + at}", times=TurnTimes(350 + at, 360, 370))
            for at, turn in enumerate(base.turns)
        )
        paths.append(replace(base, turns=turns, lineage=lineage, split_reason=SplitReason.NEW_CONVERSATION))
    shared = replace(paths[3], parent=2, num_shared=13, turns=(paths[2].turns[0], paths[3].turns[1]))
    paths[3] = replace(shared, split_reason=SplitReason.BRANCH, split_detail="a branch", agent="", reward=0.5)
    return make_trajectory("agents", paths=tuple(paths))


def failed() -> Trajectory:
    record = make_trajectory("failed", paths=(), stop_reason=StopReason.INVALID_TASK)
    return replace(record, error="unknown tool 'x'", task_messages=(Message("user", "Hello?"),))


RECORDS = (plain(), rich(), with_agents(), failed(), replace(failed(), group_id="mute", task_messages=()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / IMAGES_FOLDER).mkdir()
    (tmp_path / IMAGES_FOLDER / ("ab" * 32)).write_bytes(PNG)
    fill_store(tmp_path / STORE_NAME, {"r": []}, RECORDS)
    return tmp_path


def exported(run: Path, *options: str) -> Path:
    result = CliRunner().invoke(app, ["export", str(run), "--format", "atif", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"5 trajectories in 6 files in {run / 'trajectories.atif'}\n"
    return run / "trajectories.atif"


def test_read_back_every_record_is_equal(run: Path) -> None:
    lost = Counter[str]()
    found = [*read_atif(exported(run), lost)]
    assert lost == Counter()
    assert [record.group_id for record in found] == [record.group_id for record in RECORDS]
    for one, expected in zip(found, RECORDS, strict=True):
        assert [path.messages for path in one.paths] == [path.messages for path in expected.paths]
        assert codec.encode(one) == codec.encode(expected)


def test_the_standard_fields_have_the_ids_and_logprobs_of_the_record(run: Path) -> None:
    files = {file.name: orjson.loads(file.read_bytes()) for file in exported(run).iterdir()}
    num_sampled = 0
    for record in RECORDS[:2]:
        [document] = [one for one in files.values() if one["session_id"] == f"r/{record.group_id}/0"]
        [path] = record.paths
        whole = [*path.prompt_ids.tolist(), *path.response_ids.tolist()]
        steps = [step for step in document["steps"] if "metrics" in step]
        assert [step["step_id"] for step in document["steps"]] == [*range(1, len(document["steps"]) + 1)]
        for step, turn in zip(steps, path.turns, strict=True):
            metrics = step["metrics"]
            assert len(metrics["completion_token_ids"]) == len(metrics["logprobs"]) == turn.end - turn.start
            assert metrics["completion_token_ids"] == path.response_ids[turn.start : turn.end].tolist()
            assert np.float32(metrics["logprobs"]).tolist() == path.logprobs[turn.start : turn.end].tolist()
            assert metrics["prompt_token_ids"] == whole[: turn.prompt_len]
            num_sampled += len(metrics["logprobs"])
    assert num_sampled == 12
    own = next(iter(sorted(files.items())))[1]["steps"][1]["metrics"]["extra"]["agentloop"]
    assert own["weight_versions"] == [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]
    assert own["trained"] == [[0, 3]]


def test_agents_and_compactions_are_linked(run: Path) -> None:
    files = {file.name: orjson.loads(file.read_bytes()) for file in sorted(exported(run).iterdir())}
    first, second = [document for document in files.values() if document["session_id"] == "r/agents/0"]
    assert first["continued_trajectory_ref"] == "000002-agents-0.part-1.json"
    assert first["continued_trajectory_ref"] in files
    assert [one["trajectory_id"] for one in first["subagent_trajectories"]] == ["r/agents/0/1", "r/agents/0/4"]
    assert [one["trajectory_id"] for one in second["subagent_trajectories"]] == ["r/agents/0/3"]
    refs = [
        (step["step_id"], result["subagent_trajectory_ref"])
        for step in first["steps"]
        for result in step.get("observation", {}).get("results", [])
        if "subagent_trajectory_ref" in result
    ]
    # Its first turn began at 350 us: after the main conversation's first turn (0 us), before the second (500 us).
    assert refs == [(2, [{"trajectory_id": "r/agents/0/1"}])]
    branch = second["subagent_trajectories"][0]["steps"]
    assert [step.get("is_copied_context") for step in branch if step["source"] == "agent"] == [True, None]


def test_without_prompt_ids_the_sampled_tokens_remain(run: Path) -> None:
    folder, lost = exported(run, "--no-prompt-ids"), Counter[str]()
    assert b"prompt_token_ids" not in b"".join(file.read_bytes() for file in folder.iterdir())
    found = [*read_atif(folder, lost)]
    assert lost == {"prompt and observed token ids": 3}
    [path], [expected] = found[0].paths, RECORDS[0].paths
    assert path.response_ids.tolist() == [100, 101, 102, 105, 106, 107]
    assert path.logprobs.tolist() == [-0.25] * 6
    assert path.weight_versions == (WeightVersionSpan(3, 0, 2), WeightVersionSpan(4, 2, 6))
    assert [(turn.start, turn.end, turn.turn_id) for turn in path.turns] == [(0, 3, "0"), (3, 6, "1")]
    assert (path.messages, path.is_trainable) == (expected.messages, False)


FOREIGN = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s-1",
    "agent": {"name": "other", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "Add 1 and 2."}]},
        {
            "step_id": 2,
            "source": "agent",
            "message": "Let me see.",
            "reasoning_content": "A sum.",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1, "b": 2}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "3"}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -1.0]},
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "It is 3.",
            "metrics": {"prompt_token_ids": [1, 2, 3, 4, 9], "completion_token_ids": [5], "logprobs": [-0.25]},
        },
    ],
}


def test_a_file_of_another_program_is_shown(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_bytes(orjson.dumps(FOREIGN))
    result = CliRunner().invoke(app, ["import", str(tmp_path / "one.json"), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    first, *lost = result.stdout.splitlines()
    assert first.startswith("1 trajectories in ")
    assert lost == [f"lost in 1 trajectories: {name}" for name in ("reward", "stop reason", "weight versions")]
    [run] = (tmp_path / "runs").iterdir()
    reader = TrajectoryReader(run / STORE_NAME)
    [record] = reader.trajectories()
    reader.close()
    [path] = record.paths
    assert (path.prompt_ids.tolist(), path.response_ids.tolist()) == ([1, 2], [3, 4, 9, 5])
    assert path.response_mask.tolist() == [True, True, False, True]
    assert path.logprobs.tolist() == [-0.5, -1.0, 0.0, -0.25]
    roles = [(message.role, message.content) for message in path.messages]
    assert roles == [
        ("user", "Add 1 and 2."),
        ("assistant", "Let me see."),
        ("tool", "3"),
        ("assistant", "It is 3."),
    ]
    shown = CliRunner().invoke(app, ["show", "s-1", "--run", str(run)])
    assert shown.exit_code == 0, shown.output
    assert 'add({"a":1,"b":2})' in shown.stdout


def test_prompts_that_do_not_continue_leave_only_the_sampled_tokens(tmp_path: Path) -> None:
    steps = [*FOREIGN["steps"]]
    steps[2] = {**steps[2], "metrics": {**steps[2]["metrics"], "prompt_token_ids": [1, 2, 8, 4, 9]}}  # type: ignore
    (tmp_path / "one.json").write_bytes(orjson.dumps({**FOREIGN, "steps": steps}))
    lost = Counter[str]()
    [record] = read_atif(tmp_path, lost)
    assert record.paths[0].response_ids.tolist() == [3, 4, 5]
    assert lost["prompt and observed token ids"] == 1
    assert not record.paths[0].is_trainable


def test_conversations_in_the_openai_format_are_shown(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "It is 2.", "reasoning_content": "Done."},
    ]
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": messages, "reward": 1}, {"id": "b", "messages": messages[:1]}]
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n\n")
    lost = Counter[str]()
    first, second = read_conversations(file, lost)
    assert lost == {"token ids and logprobs": 2}
    assert (first.group_id, first.reward, len(first.path.turns)) == ("line-1", 1.0, 2)
    assert (second.group_id, second.reward, len(second.path.turns)) == ("b", None, 0)
    ok, malformed = first.messages[1].tool_calls
    assert (ok.arguments, ok.status, malformed.status) == ({"a": 1}, ToolCallStatus.OK, ToolCallStatus.MALFORMED)
    assert malformed.text == '{"a": 1'
    result = CliRunner().invoke(app, ["import", str(file), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    # Our own export of the imported run is read too: it has the messages as text.
    [run] = (tmp_path / "runs").iterdir()
    assert CliRunner().invoke(app, ["export", str(run), "--format", "jsonl"]).exit_code == 0
    again = [*read_conversations(run / "trajectories.jsonl", Counter())]
    assert sorted(len(one.messages) for one in again) == [1, 4]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("one.json", b"{", "cannot read"),
        ("one.json", b'{"steps": []}', "no `schema_version`"),
        ("one.json", b'{"schema_version": "ATIF-v1.8", "steps": [{}]}', "is not an ATIF trajectory: KeyError"),
        ("one.jsonl", b'{"prompt": "x"}', "line 1: expected an object with `messages`"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["import", str(tmp_path / name), "--out", str(tmp_path / "runs")])
    assert result.exit_code == 1
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = CliRunner().invoke(app, ["import", str(tmp_path / "missing"), "--out", str(tmp_path / "runs")])
    assert "does not exist" in result.stderr


def test_a_single_file_is_read_with_all_its_continuations(tmp_path: Path) -> None:
    names = [f"part-{number}.json" for number in range(4)]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):  # a circle ends at its start
        document = {**FOREIGN, "trajectory_id": name, "continued_trajectory_ref": following}
        (tmp_path / name).write_bytes(orjson.dumps(document))
    [record] = read_atif(tmp_path / names[1], Counter())
    assert record.group_id == "part-1.json"
    assert [None if path.lineage is None else path.lineage.parent for path in record.paths] == [None, 0, 1, 2]


def test_a_missing_continuation_is_named(run: Path) -> None:
    folder = exported(run)
    (folder / "000002-agents-0.part-1.json").unlink()
    with pytest.raises(InvalidRequest, match=r"cannot read .*000002-agents-0.part-1.json"):
        list(read_atif(folder, Counter()))
