from __future__ import annotations

import hashlib
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from agentloop import __version__
from agentloop.api.facts import FactsQuery
from agentloop.errors import InvalidRequest, NotFound
from agentloop.images import Image, ImageSpan, shown
from agentloop.simulation.policy import ROUTES_SHAPE
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import (
    Lineage,
    Message,
    PathKind,
    SplitReason,
    StopReason,
    ToolCall,
    ToolCallStatus,
    Trajectory,
)
from agentloop.values.sampling import (
    Constraint,
    ConstraintKind,
    LogprobsMode,
    SamplingParams,
    TurnSampling,
    turn_sampling,
)
from agentloop_view.rows import ExportFormat, export
from tests.support.records.samples import fill_store, make_group, make_path, make_trajectory, with_aux

ISSUE_COLUMNS = [
    "task_id",
    "group_id",
    "sample_index",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "logprobs",
    "weight_versions",
    "turns",
    "messages",
    "reward",
    "stop_reason",
    "end_reason",
    "complete",
    "num_tool_calls",
    "num_tool_errors",
    "timings",
    "times",
]


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    path = tmp_path / "trajectories.sqlite"
    fill_store(
        path,
        {"r": [make_group("a", 2), make_group("b", 1)], "s": [make_group("a", 1)]},
        [
            make_trajectory("a", 0),
            make_trajectory("a", 1, paths=(), reward=None, stop_reason=StopReason.PROMPT_TOO_LONG),
            make_trajectory("b", 0, paths=(make_path(), make_path(((1, 0, 3), (2, 5, 8))))),
            make_trajectory("a", 0, rollout_id="s"),
        ],
    )
    return path


def test_parquet_has_the_documented_columns_types_and_values(store_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert export(store_path, out, "parquet", "r") == 4
    table = pq.read_table(out)
    assert table.column_names[: len(ISSUE_COLUMNS)] == ISSUE_COLUMNS
    assert table.schema.field("prompt_ids").type.value_type == pa.int32()
    assert table.schema.field("logprobs").type.value_type == pa.float32()
    assert table.schema.field("response_mask").type.value_type == pa.bool_()
    row = table.to_pylist()[0]
    assert row["response_ids"] == list(range(100, 108))
    assert row["logprobs"] == [-0.25, -0.25, -0.25, 0.0, 0.0, -0.25, -0.25, -0.25]
    assert row["weight_versions"] == [{"version": 0, "start": 0, "end": 3}, {"version": 0, "start": 5, "end": 8}]
    assert row["turns"][1] == {
        "prompt_len": 15,
        "start": 5,
        "end": 8,
        "finish_reason": "stop",
        "replica_id": "replica-0",
        "cached_tokens": 8,
        "turn_id": "1",
        "reward": None,
        "sampling": None,
        "seed": None,
        "engine": "",
        "quantization": "",
        "times": {"begun_us": 500, "first_token_us": 700, "ended_us": 900, "queue_us": 0, "unavailable_us": 0},
    }
    assert (row["raw_logprobs"], row["constrained"]) == (None, [False] * 8)
    seconds = {
        "queue_s": 0.1,
        "generate_s": 0.2,
        "tool_s": 0.3,
        "reward_s": 0.4,
        "total_s": 1.0,
        "unavailable_s": 0.0,
        "engine_s": 0.0,
    }
    assert row["timings"] == seconds
    assert row["times"]["tool_calls"] == [
        {"name": "calculator", "begun_us": 300, "duration_us": 150, "outcome": "timeout"}
    ]
    assert dict(row["times"]["lost_tokens"]) == {"kill": 7}
    assert (row["complete"], row["reward"], row["stop_reason"]) == (True, 1.0, "completed")


def test_staleness_has_columns(tmp_path: Path) -> None:
    record = replace(make_trajectory(), num_masked_tokens=3, staleness=0, max_staleness=1)
    fill_store(tmp_path / "s", {"r": [make_group()]}, [record])
    export(tmp_path / "s", tmp_path / "o", "parquet")
    (row,) = pq.read_table(tmp_path / "o").to_pylist()
    names = ("num_masked_tokens", "num_stale_attempts", "max_staleness", "staleness")
    assert [row[name] for name in names] == [3, 0, 1, 0]


def test_rewards_and_what_may_be_trained_on_have_columns(tmp_path: Path) -> None:
    main = replace(make_path(), token_rewards=np.linspace(0, 1, 8, dtype=np.float32))
    side = replace(
        make_path(),
        turns=(),
        split_reason=SplitReason.BRANCH,
        split_detail="messages[0]",
        parent=0,
        lineage=Lineage(PathKind.RETRIES, 0),
        num_shared=2,
        is_trainable=False,
    )
    record = replace(
        make_trajectory(paths=(main, side), reward=0.5),
        components={"format": 1.0, "answer": 0.0},
        metrics={"num_lines": 3.0},
        is_truncated=True,
        num_resampled_turns=2,
    )
    fill_store(tmp_path / "s", {"r": [make_group()]}, [record])
    export(tmp_path / "s", tmp_path / "o", "parquet")
    first, second = pq.read_table(tmp_path / "o").to_pylist(maps_as_pydicts="strict")
    for row in (first, second):
        assert (row["components"], row["metrics"]) == ({"format": 1.0, "answer": 0.0}, {"num_lines": 3.0})
        assert (row["reward"], row["truncated"], row["num_resampled_turns"]) == (0.5, True, 2)
    assert (first["path_reward"], first["trainable"]) == (0.5, True)
    assert first["token_rewards"] == main.token_rewards.tolist()
    assert (second["path_reward"], second["trainable"], second["token_rewards"]) == (0.5, False, None)
    assert (second["parent"], second["num_shared"], second["split_detail"]) == (0, 2, "messages[0]")


def test_jsonl_says_the_same_as_parquet(store_path: Path, tmp_path: Path) -> None:
    export(store_path, tmp_path / "out.parquet", "parquet")
    export(store_path, tmp_path / "out.jsonl", "jsonl")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    table = pq.read_table(tmp_path / "out.parquet")
    assert [orjson.loads(line) for line in lines] == table.to_pylist(maps_as_pydicts="strict")


def test_a_folder_for_datasets_says_the_same_in_shards_with_a_card(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(store_path, tmp_path / "out.parquet", "parquet")
    monkeypatch.setattr("agentloop_view.rows._ROW_GROUP_ROWS", 2)
    monkeypatch.setattr("agentloop_view.rows._SHARD_BYTES", 1)
    folder = tmp_path / "out"
    assert export(store_path, folder, "hf", model="tiny") == 5
    assert sorted(file.name for file in (folder / "data").iterdir()) == [f"0000{n}.parquet" for n in range(3)]
    whole = pq.read_table(tmp_path / "out.parquet").to_pylist(maps_as_pydicts="strict")
    table = pa.concat_tables(map(pq.read_table, sorted((folder / "data").iterdir())))
    rows = table.to_pylist()
    for row in rows:
        for holder, name in (
            (row, "components"),
            (row, "metrics"),
            (row, "constraints"),
            (row["times"], "lost_tokens"),
        ):
            holder[name] = {one["key"]: one["value"] for one in holder[name]}
    assert rows == whole
    _, front, card = (folder / "README.md").read_text().split("---\n", 2)
    [config] = yaml.safe_load(front)["configs"]
    assert config["data_files"] == [{"split": "train", "path": "data/*.parquet"}]
    assert "4 trajectories of tiny in 5 rows" in card
    assert f"Weight versions: 0 to 2. Written by agentloop {__version__}." in card
    shapes = dict(re.findall(r"^\| `(\w+)` \| `.*` \| (.*) \|$", card, re.MULTILINE))
    assert list(shapes) == table.column_names
    assert (shapes["logprobs"], shapes["turns"], shapes["reward"]) == ("[response tokens]", "[any]", "")
    with pytest.raises(InvalidRequest, match="is not empty"):
        export(store_path, folder, "hf")


def test_the_facts_of_a_listing_have_columns(store_path: Path, tmp_path: Path) -> None:
    export(store_path, tmp_path / "out.parquet", "parquet", "r")
    reader = TrajectoryReader(store_path)
    listed = {
        (one.group_id, one.sample_index): one
        for one in reader.list_records(FactsQuery()).records
        if one.rollout_id == "r"
    }
    reader.close()
    names = {"complete": "is_complete", "num_branches": "num_paths"}
    for row in pq.read_table(tmp_path / "out.parquet").to_pylist():
        one = listed[row["group_id"], row["sample_index"]]
        told = {names.get(name, name): value for name, value in row.items()}
        assert {field.name: told[field.name] for field in fields(one) if field.name != "seq"} == {
            field.name: getattr(one, field.name) for field in fields(one) if field.name != "seq"
        }


def test_messages_are_in_the_openai_format(store_path: Path, tmp_path: Path) -> None:
    export(store_path, tmp_path / "out.parquet", "parquet", "r")
    messages = orjson.loads(pq.read_table(tmp_path / "out.parquet")["messages"][0].as_py())
    call = messages[1]["tool_calls"][0]
    assert call == {
        "id": "call-1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression":"2 + 3"}'},
    }
    assert messages[2] == {"role": "tool", "content": "5", "tool_call_id": "call-1", "name": "calculator"}
    assert messages[3]["content"] == "5 \u2713\n\x00"


def test_a_malformed_call_keeps_its_error_and_its_text_and_a_thought_is_kept(tmp_path: Path) -> None:
    call = ToolCall("call-1", "", status=ToolCallStatus.MALFORMED, error="no name", text="<tool_call>{")
    path = replace(make_path(), messages=(Message("assistant", "", (call,), reasoning="Let me see."),))
    fill_store(tmp_path / "s", {"r": [make_group()]}, [make_trajectory(paths=(path,))])
    export(tmp_path / "s", tmp_path / "o", "jsonl")
    [message] = orjson.loads(orjson.loads((tmp_path / "o").read_bytes())["messages"])
    assert message["tool_calls"][0]["error"] == "no name"
    assert message["tool_calls"][0]["function"]["arguments"] == "<tool_call>{"
    assert message["reasoning_content"] == "Let me see."


def test_images_are_named_where_they_stand(tmp_path: Path) -> None:
    content, refs = shown(["Look: ", Image("ab", b""), "!"])
    message = Message("user", content, images=refs)
    path = replace(make_path(), messages=(message,), images=(ImageSpan("ab", 1, 3),))
    store = tmp_path / "trajectories.sqlite"
    fill_store(store, {"r": [make_group("a", 1)]}, [make_trajectory("a", 0, paths=(path,))])
    export(store, tmp_path / "out.parquet", "parquet")
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["images"] == [{"sha256": "ab", "start": 1, "end": 3}]
    assert orjson.loads(row["messages"])[0]["content"] == [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": "images/ab"}},
        {"type": "text", "text": "!"},
    ]
    export(store, tmp_path / "out.jsonl", "jsonl")
    assert orjson.loads((tmp_path / "out.jsonl").read_bytes())["images"] == row["images"]


def test_a_row_has_its_path_s_messages_and_says_whether_it_is_of_the_main_conversation(tmp_path: Path) -> None:
    side = replace(make_path(), turns=(), lineage=Lineage(PathKind.UNRELATED))
    paths = [
        replace(one, messages=(Message("user", name),)) for one, name in ((make_path(), "main"), (side, "side"))
    ]
    fill_store(tmp_path / "s", {"r": [make_group()]}, [make_trajectory(paths=tuple(paths))])
    export(tmp_path / "s", tmp_path / "o", "jsonl")
    rows = [orjson.loads(line) for line in (tmp_path / "o").read_bytes().splitlines()]
    assert [row["main_conversation"] for row in rows] == [True, False]
    assert [(row["lineage"], row["credit"]) for row in rows] == [(None, True), ("unrelated", False)]
    assert [orjson.loads(row["messages"])[0]["content"] for row in rows] == ["main", "side"]


def test_a_forked_trajectory_gives_a_row_a_path_and_a_pathless_one_an_empty_row(
    store_path: Path, tmp_path: Path
) -> None:
    export(store_path, tmp_path / "out.parquet", "parquet", "r")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["group_id"], row["branch"], row["num_branches"]) for row in rows] == [
        ("a", 0, 1),
        ("a", 0, 0),
        ("b", 0, 2),
        ("b", 1, 2),
    ]
    empty = rows[1]
    assert (empty["prompt_ids"], empty["turns"], empty["reward"], empty["complete"]) == ([], [], None, False)


@pytest.mark.slow
def test_row_groups_bound_memory(tmp_path: Path) -> None:
    records = [make_trajectory(sample_index=index) for index in range(1200)]
    fill_store(tmp_path / "s", {"r": [make_group(num_samples=1200)]}, records)
    assert export(tmp_path / "s", tmp_path / "o", "parquet") == 1200
    file = pq.ParquetFile(tmp_path / "o")
    assert file.metadata.num_row_groups == 3
    assert np.array_equal(file.read(["sample_index"])["sample_index"].to_numpy(), np.arange(1200))
    file.close()


def test_an_empty_store_gives_a_readable_file(tmp_path: Path) -> None:
    fill_store(tmp_path / "s", {})
    assert export(tmp_path / "s", tmp_path / "o", "parquet") == 0
    assert pq.read_table(tmp_path / "o").num_rows == 0
    assert export(tmp_path / "s", tmp_path / "folder", "hf") == 0
    assert pq.read_table(tmp_path / "folder" / "data" / "00000.parquet").num_rows == 0


@pytest.mark.parametrize("format", ["parquet", "hf"])
def test_failures_leave_no_file_behind(store_path: Path, tmp_path: Path, format: ExportFormat) -> None:
    with pytest.raises(NotFound):
        export(store_path, tmp_path / "out", format, "nobody")
    with pytest.raises(InvalidRequest):
        export(store_path, tmp_path / "out.csv", "csv")  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))} == set()


BIASED = TurnSampling(temperature=0.5, top_k=3, logit_bias=((7, -100.0),), stop_token_ids=(2,), min_p=0.25)
FORCED = turn_sampling(
    SamplingParams(9, constraint=Constraint(ConstraintKind.REGEX, "a|b"), stop_token_ids=(2,)), LogprobsMode.BOTH
)


def with_sampling(*samplings: TurnSampling | None) -> Trajectory:
    path = make_path()
    turns = [
        replace(turn, sampling=sampling, seed=place)
        for place, (turn, sampling) in enumerate(zip(path.turns, samplings, strict=True))
    ]
    raw_logprobs = np.array([np.nan, np.nan, np.nan, 0, 0, -1, -2, -3], np.float32)
    return make_trajectory(paths=(replace(path, turns=tuple(turns), raw_logprobs=raw_logprobs),))


def test_a_row_says_the_distribution_of_every_turn_and_token(tmp_path: Path) -> None:
    store, out = tmp_path / "store.sqlite", tmp_path / "out.parquet"
    fill_store(store, {"r": [make_group()]}, [with_sampling(None, FORCED)])
    assert export(store, out, "parquet") == 1
    [row] = pq.read_table(out).to_pylist()
    first, second = row["turns"]
    assert (first["sampling"], first["seed"], second["seed"]) == (None, 0, 1)
    told = second["sampling"]
    assert (told["constraint_kind"], told["constraint_text"], told["logprobs_mode"]) == ("regex", "a|b", "both")
    assert told["constraint_digest"] == hashlib.sha256(b"a|b").hexdigest()
    assert (told["temperature"], told["stop_token_ids"], told["logit_bias"]) == (1.0, [2], [])
    assert row["constrained"] == [False] * 5 + [True] * 3
    assert row["response_mask"] == [True] * 3 + [False] * 2 + [True] * 3
    assert np.isnan(row["raw_logprobs"][0])
    assert row["raw_logprobs"][3:] == [0, 0, -1, -2, -3]


def test_auxiliary_rows_are_columns_of_parquet_and_not_of_json(tmp_path: Path) -> None:
    store, path = tmp_path / "store.sqlite", with_aux(make_path())
    fill_store(store, {"r": [make_group("a", 2)]}, [make_trajectory("a", paths=(path,)), make_trajectory("a", 1)])
    for format in ("parquet", "hf"):
        export(store, tmp_path / format, format)
        file = tmp_path / format if format == "parquet" else tmp_path / format / "data" / "00000.parquet"
        found = pq.read_table(file).sort_by("sample_index")
        row, plain = found.to_pylist()
        shape = row["routed_experts_shape"]
        assert shape == [17, *ROUTES_SHAPE]
        experts = np.array(row["routed_experts"], np.uint8).reshape(shape)
        assert np.array_equal(experts, path.routed_experts)
        assert row["sampling_mask_ends"] == [2, 4, 6, 6, 6, 8, 10, 12]
        assert row["sampling_mask"] == [one for two in (100, 101, 102, 105, 106, 107) for one in (two, two + 1)]
        names = [name for name in plain if name.startswith(("routed_experts", "sampling_mask"))]
        assert {name: plain[name] for name in names} == dict.fromkeys(names)
        assert len(names) == 4
    export(store, tmp_path / "json", "jsonl")
    for line in (tmp_path / "json").read_bytes().splitlines():
        assert {orjson.loads(line)[name] for name in names} == {None}


def test_constrained_tokens_leave_the_mask_where_asked_for_and_are_counted(tmp_path: Path) -> None:
    store, out = tmp_path / "store.sqlite", tmp_path / "out.parquet"
    fill_store(store, {"r": [make_group()]}, [with_sampling(BIASED, None)])
    export(store, out, "parquet", mask_constrained=True)
    [row] = pq.read_table(out).to_pylist()
    assert row["response_mask"] == [False] * 5 + [True] * 3
    assert row["num_masked_tokens"] == 3
    bias = row["turns"][0]["sampling"]["logit_bias"]
    assert bias == [{"token_id": 7, "bias": -100.0}]
