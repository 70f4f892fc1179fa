"""Export of a store for trainers: Parquet, JSON lines or a folder for `datasets`, with one row per token path.

At most one row group is in memory. The file or folder gets its name only when it is complete. A trajectory that
failed before anything was rendered has one row with empty lists, so that no sample is missing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from agentloop import __version__
from agentloop.api.facts import FACT_NAMES, RecordFacts, facts_of
from agentloop.errors import InvalidRequest
from agentloop.images import IMAGES_FOLDER, ImageRef, parts_of
from agentloop.storage.exports import complete_output
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop.types import (
    Message,
    Timings,
    TokenPath,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    TrajectoryTimes,
    Turn,
    TurnTimes,
    WeightVersionSpan,
)
from agentloop.values import codec
from agentloop.values.sampling import TurnSampling
from agentloop_view.ages import TurnTokens, trainer_version, turn_tokens

ExportFormat = Literal["parquet", "jsonl", "hf"]

_SHARD_BYTES = 256 << 20
_ROW_GROUP_TOKENS = 1 << 20
_ROW_GROUP_ROWS = 512
_ROW_GROUP_TURNS = 4096  # in a ledger
_AUX_OF_A_TOKEN = 16  # auxiliary values that take about the memory of one token's other columns

_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_IMAGE = pa.struct([("sha256", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("logit_bias", pa.list_(pa.struct([("token_id", pa.int32()), ("bias", pa.float64())]))),
        ("min_tokens", pa.int32()),
        ("stop_token_ids", pa.list_(pa.int32())),
        ("constraint_kind", pa.string()),
        ("constraint_text", pa.string()),
        ("constraint_digest", pa.string()),
        ("logprobs_mode", pa.string()),
    ]
)
_TURN_TIMES = pa.struct([(name, pa.int64()) for name in TurnTimes._fields])
_TOOL_CALL = pa.struct(
    [("name", pa.string()), ("begun_us", pa.int64()), ("duration_us", pa.int64()), ("outcome", pa.string())]
)
_TIMES = pa.struct(
    [
        ("began_at", pa.float64()),
        ("ended_us", pa.int64()),
        ("worker", pa.string()),
        ("tool_calls", pa.list_(_TOOL_CALL)),
        ("moves", pa.list_(pa.struct([("at_us", pa.int64()), ("replica_id", pa.string())]))),
        ("lost_tokens", pa.map_(pa.string(), pa.int64())),
    ]
)
_TURN = pa.struct(
    [
        ("prompt_len", pa.int32()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("finish_reason", pa.string()),
        ("replica_id", pa.string()),
        ("cached_tokens", pa.int32()),
        ("sampling", _SAMPLING),
        ("seed", pa.int64()),
        ("turn_id", pa.string()),
        ("reward", pa.float64()),
        ("engine", pa.string()),
        ("quantization", pa.string()),
        ("times", _TURN_TIMES),
    ]
)
_TURN_FIELDS, _SAMPLING_FIELDS = ([field.name for field in kind] for kind in (_TURN, _SAMPLING))
_TIMINGS = pa.struct([(part.name, pa.float64()) for part in dataclasses.fields(Timings)])

_COLUMNS: dict[str, pa.DataType] = {
    "task_id": pa.string(),
    "group_id": pa.string(),
    "sample_index": pa.int32(),
    "prompt_ids": pa.list_(pa.int32()),
    "response_ids": pa.list_(pa.int32()),
    "response_mask": pa.list_(pa.bool_()),
    "logprobs": pa.list_(pa.float32()),
    "weight_versions": pa.list_(_SPAN),
    "turns": pa.list_(_TURN),
    "messages": pa.string(),
    "reward": pa.float64(),
    "stop_reason": pa.string(),
    "end_reason": pa.string(),
    "complete": pa.bool_(),
    "num_tool_calls": pa.int32(),
    "num_tool_errors": pa.int32(),
    "timings": _TIMINGS,
    "times": _TIMES,
    "branch": pa.int32(),
    "num_branches": pa.int32(),
    "split_reason": pa.string(),
    "attempt": pa.int32(),
    "error": pa.string(),
    "reward_error": pa.string(),
    "rollout_id": pa.string(),
    "num_masked_tokens": pa.int32(),
    "num_stale_attempts": pa.int32(),
    "max_staleness": pa.int64(),
    "staleness": pa.int64(),
    "main_conversation": pa.bool_(),
    "images": pa.list_(_IMAGE),
    "components": pa.map_(pa.string(), pa.float64()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "path_reward": pa.float64(),
    "token_rewards": pa.list_(pa.float32()),
    "trainable": pa.bool_(),
    "truncated": pa.bool_(),
    "num_resampled_turns": pa.int32(),
    "num_resumed_turns": pa.int32(),
    "restart_reason": pa.string(),
    "parent": pa.int32(),
    "agent": pa.string(),
    "lineage": pa.string(),
    "lineage_evidence": pa.string(),
    "credit": pa.bool_(),
    "num_shared": pa.int32(),
    "split_detail": pa.string(),
    "raw_logprobs": pa.list_(pa.float32()),
    "constrained": pa.list_(pa.bool_()),
    "thinking": pa.string(),
    "failure": pa.string(),
    "constraints": pa.map_(pa.string(), pa.string()),
    "loop": pa.string(),
    "traceparent": pa.string(),
    "routed_experts": pa.list_(pa.uint16()),
    "routed_experts_shape": pa.list_(pa.int32()),
    "sampling_mask": pa.list_(pa.int32()),
    "sampling_mask_ends": pa.list_(pa.int32()),
}
_AUX = ("routed_experts", "routed_experts_shape", "sampling_mask", "sampling_mask_ends")
_FACT_TYPES: dict[str, pa.DataType] = {
    "str": pa.string(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "float": pa.float64(),
}
_OTHERWISE_NAMED = {"seq", "is_complete", "num_paths"}  # facts that are not exported, or are in another column
_COLUMNS |= {
    fact.name: _FACT_TYPES[str(fact.type).partition(" ")[0]]
    for fact in dataclasses.fields(RecordFacts)
    if fact.name not in _COLUMNS.keys() | _OTHERWISE_NAMED
}

SCHEMA = pa.schema(_COLUMNS)
"""The columns; `_NOTES` describes them."""

_NOTES = """\
Offsets in spans and turns are relative to the response. Observed positions have logprob 0.0; sampled positions
that were removed from the mask keep their logprobs. `raw_logprobs` is null unless the engine returned both
kinds, and NaN for a sampled token without a raw logprob. `constrained` marks tokens whose distribution was
changed from outside the model. A turn's `sampling` is null in records of services that did not store it.
`began_at` is a Unix time in seconds, `timings` are in seconds, the other fields of `times` and the times of
turns in microseconds. `messages` are the path's messages in the OpenAI chat format. `reward`, `components` and
`metrics` belong to the trajectory; `path_reward` is the reward for training with this path. `lineage` is the
path's relation to `parent`, and `credit` is true if the trajectory's reward is for this path;
numbers of turns and tokens count all paths. `constraints`, by digest, are in the first row of a trajectory.
Offsets of `images` are relative to the prompt followed by the response. `routed_experts` are the experts of
each position of prompt and response, flattened from `routed_experts_shape` (positions, layers, experts per
token); the last sampled token and later ones have none. `sampling_mask` are the ids that top-k, top-p and min-p
kept for all response tokens, one after the other, and `sampling_mask_ends` the end of each token's part. All four
are null unless the engines returned them, and always null in JSON Lines."""
_RESPONSE_COLUMNS = (
    *("response_ids", "response_mask", "logprobs", "raw_logprobs", "constrained", "token_rewards"),
    "sampling_mask_ends",
)
_LENGTHS = {"prompt_ids": "prompt tokens", **dict.fromkeys(_RESPONSE_COLUMNS, "response tokens")}
_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- agentloop
- reinforcement-learning
---
# Rollouts of a language-model agent

{num_records:,} trajectories of {model} in {num_rows:,} rows, one per token path.
Weight versions: {versions}. Written by agentloop {release}.

{notes}

| column | type | shape |
|---|---|---|
{columns}
"""

_NO_PATH = TokenPath(
    prompt_ids=np.empty(0, np.int32),
    response_ids=np.empty(0, np.int32),
    response_mask=np.empty(0, np.bool_),
    logprobs=np.empty(0, np.float32),
    weight_versions=(),
    turns=(),
    is_trainable=False,
)

Row = dict[str, Any]


def export(
    store_path: str | Path | Home,
    out_path: str | Path,
    format: ExportFormat,
    rollout_id: str | None = None,
    *,
    mask_constrained: bool = False,
    model: str = "a model",
) -> int:
    """Write the trajectories of a store, or of one rollout; return the number of rows.

    `mask_constrained` removes constrained tokens from the mask and counts them (`Trajectory.without_constrained`).
    `model` is the model's name for a folder's dataset card.

    Can run while the service is writing, and exports the records committed so far. Images in a database are written
    to files in the run directory. Raises InvalidRequest for an unknown format, a folder that is not empty or a path
    that is not a store, and NotFound for an unknown rollout.
    """
    writers: dict[str, Callable[[Iterator[Row], Path], int]]
    writers = {"parquet": _write_parquet, "jsonl": _write_jsonl, "hf": partial(_write_folder, model)}
    if format not in writers:
        raise InvalidRequest(f"unknown export format {format!r}: expected parquet, jsonl or hf", param="format")
    with complete_output(Path(out_path)) as unfinished, closing(TrajectoryReader(store_path)) as store:
        num_rows = writers[format](_rows(store, rollout_id, mask_constrained), unfinished)
        if not isinstance(store_path, str | Path):
            store.write_images(folder_of(store_path) / IMAGES_FOLDER)
    return num_rows


_LEDGER: dict[str, pa.DataType] = {
    "rollout_id": pa.string(),
    "group_id": pa.string(),
    "sample_index": pa.int32(),
    "path": pa.int32(),
    "turn_id": pa.string(),
    "position": pa.int32(),  # in the response
    "token_id": pa.int32(),
    "weight_version": pa.int64(),
    "age": pa.int64(),  # null: unknown
    "trained": pa.bool_(),  # in the mask
    "logprob": pa.float32(),
    "raw_logprob": pa.float32(),
    "trainer_logprob": pa.float32(),  # null: not annotated
}
LEDGER_SCHEMA = pa.schema(_LEDGER)
"""The columns of the ledger: one row per sampled token."""


def export_ledger(store: str | Path | Home, out: Path, rollout_id: str | None) -> int:
    """Write a Parquet file with one row per sampled token of a store; return the number of rows."""
    num_rows = 0
    with (
        complete_output(out) as unfinished,
        closing(TrajectoryReader(store)) as reader,
        pq.ParquetWriter(unfinished, LEDGER_SCHEMA, compression="zstd") as writer,
    ):
        turns = _ledger_turns(reader, rollout_id)
        while tables := [*islice(turns, _ROW_GROUP_TURNS)]:
            group = pa.concat_tables(tables)
            writer.write_table(group)
            num_rows += len(group)
    return num_rows


def _ledger_turns(reader: TrajectoryReader, rollout_id: str | None) -> Iterator[pa.Table]:
    for annotated in reader.annotated(rollout_id=rollout_id):
        record = codec.decode(annotated.data, Trajectory)
        newest = trainer_version(record, annotated.annotations)
        for tokens in turn_tokens(record, annotated.annotations):
            yield _ledger_rows(record, tokens, newest)


def _ledger_rows(record: Trajectory, tokens: TurnTokens, newest: int | None) -> pa.Table:
    num, path, places = len(tokens.places), tokens.path, tokens.places
    nothing = pa.nulls(num)
    columns: Row = {
        **{name: [getattr(record, name)] * num for name in ("rollout_id", "group_id", "sample_index")},
        "path": [tokens.path_index] * num,
        "turn_id": [tokens.turn.turn_id] * num,
        "position": places,
        "token_id": path.response_ids[places],
        "weight_version": tokens.versions,
        "age": nothing if newest is None else newest - tokens.versions,
        "trained": path.response_mask[places],
        "logprob": path.logprobs[places],
        "raw_logprob": nothing if path.raw_logprobs is None else path.raw_logprobs[places],
        "trainer_logprob": nothing if tokens.trainer_logprobs is None else tokens.trainer_logprobs,
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in LEDGER_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=LEDGER_SCHEMA)


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Return one row per path with the columns of `SCHEMA`. Arrays are not converted."""
    paths = trajectory.paths or (_NO_PATH,)
    # Without paths, the only row is that of `_NO_PATH`.
    main, credited = trajectory.main_conversation or (0,), trajectory.credited_paths or (0,)
    rewards = trajectory.path_rewards or (trajectory.reward,)
    return [
        {
            **_facts(trajectory),
            "task_id": trajectory.task_id,
            "group_id": trajectory.group_id,
            "sample_index": trajectory.sample_index,
            **_tokens(path),
            "weight_versions": [_span(span) for span in path.weight_versions],
            "turns": [_turn(turn) for turn in path.turns],
            "messages": _openai_json(path.messages if trajectory.paths else trajectory.task_messages),
            "reward": trajectory.reward,
            "stop_reason": trajectory.stop_reason.value,
            "end_reason": trajectory.end_reason,
            "complete": trajectory.is_complete,
            "num_tool_calls": trajectory.num_tool_calls,
            "num_tool_errors": trajectory.num_tool_errors,
            "timings": dataclasses.asdict(trajectory.timings),
            "times": None if trajectory.times is None else _times(trajectory.times),
            "branch": branch,
            "num_branches": len(trajectory.paths),
            "attempt": trajectory.attempt,
            "error": trajectory.error,
            "reward_error": trajectory.reward_error,
            "rollout_id": trajectory.rollout_id,
            "num_masked_tokens": trajectory.num_masked_tokens,
            "num_stale_attempts": trajectory.num_stale_attempts,
            "max_staleness": trajectory.max_staleness,
            "staleness": trajectory.staleness,
            "main_conversation": branch in main,
            "images": [dataclasses.asdict(span) for span in path.images],
            "components": dict(trajectory.components),
            "metrics": dict(trajectory.metrics),
            "path_reward": rewards[branch],
            "token_rewards": path.token_rewards,
            "trainable": path.is_trainable,
            "truncated": trajectory.is_truncated,
            "num_resampled_turns": trajectory.num_resampled_turns,
            "num_resumed_turns": trajectory.num_resumed_turns,
            "restart_reason": trajectory.restart_reason,
            **_lineage(path),
            "credit": branch in credited,
            "thinking": trajectory.thinking.value,
            "failure": None if trajectory.failure is None else trajectory.failure.value,
            "constraints": dict(trajectory.constraints) if branch == 0 else {},
            "loop": trajectory.loop,
            "traceparent": trajectory.traceparent,
            **_aux(path),
        }
        for branch, path in enumerate(paths)
    ]


def _tokens(path: TokenPath) -> Row:
    return {
        "prompt_ids": path.prompt_ids,
        "response_ids": path.response_ids,
        "response_mask": path.response_mask,
        "logprobs": path.logprobs,
        "raw_logprobs": path.raw_logprobs,
        "constrained": path.constrained,
    }


def _lineage(path: TokenPath) -> Row:
    lineage = path.lineage
    return {
        "agent": path.agent,
        "parent": path.parent if lineage is None else lineage.parent,
        "lineage": None if lineage is None else lineage.kind.value,
        "lineage_evidence": None if lineage is None else lineage.evidence,
        "num_shared": path.num_shared,
        "split_reason": None if path.split_reason is None else path.split_reason.value,
        "split_detail": path.split_detail,
    }


def _aux(path: TokenPath) -> Row:
    routes, (mask, ends) = path.routed_experts, path.sampling_mask or (None, None)
    flat, shape = (None, None) if routes is None else (routes.ravel(), routes.shape)
    return dict(zip(_AUX, (flat, shape, mask, ends), strict=True))


def _facts(trajectory: Trajectory) -> Row:
    named: Row = dict(zip(FACT_NAMES, facts_of(trajectory), strict=True))
    versions = trajectory.trained_versions
    named |= {"oldest_version": min(versions, default=None), "newest_version": max(versions, default=None)}
    return {name: value for name, value in named.items() if name not in _OTHERWISE_NAMED}


def _openai_json(messages: Sequence[Message]) -> str:
    return orjson.dumps([openai_message(message) for message in messages]).decode()


def openai_message(message: Message) -> dict[str, Any]:
    """Convert a message to the OpenAI chat format, with reasoning as `reasoning_content` and without empty fields.

    A malformed call has the policy's text as its arguments, and an additional field `error`. The URL of an image is
    the path of its file, relative to the run directory.
    """
    out: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_openai_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.images:
        return message.content
    return [
        {"type": "image_url", "image_url": {"url": f"{IMAGES_FOLDER}/{part.sha256}"}}
        if isinstance(part, ImageRef)
        else {"type": "text", "text": part}
        for part in parts_of(message.content, message.images)
    ]


def _openai_call(call: ToolCall) -> dict[str, Any]:
    is_read = call.status is ToolCallStatus.OK
    arguments = orjson.dumps(codec.to_builtins(call.arguments)).decode() if is_read else call.text
    out = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    if not is_read:
        out["error"] = call.error or call.status.value  # not part of the format, which has no malformed calls
    return out


def _span(span: WeightVersionSpan) -> Row:
    return {"version": span.version, "start": span.start, "end": span.end}


def _turn(turn: Turn) -> Row:
    row = {name: getattr(turn, name) for name in _TURN_FIELDS}
    times = None if turn.times is None else turn.times._asdict()
    sampling = _sampling(turn.sampling)
    return {**row, "finish_reason": turn.finish_reason.value, "sampling": sampling, "times": times}


def _times(times: TrajectoryTimes) -> Row:
    calls = [{**call._asdict(), "outcome": call.outcome.value} for call in times.tool_calls]
    lost_tokens = {cause.value: num for cause, num in times.lost_tokens.items()}
    moves = [move._asdict() for move in times.moves]
    return {**times._asdict(), "tool_calls": calls, "moves": moves, "lost_tokens": lost_tokens}


@lru_cache(maxsize=256)
def _sampling(sampling: TurnSampling | None) -> Row | None:
    """Return the row of a turn's sampling. Turns with equal sampling share one row object."""
    if sampling is None:
        return None
    kind = sampling.constraint_kind
    return {
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        "logit_bias": [{"token_id": token_id, "bias": bias} for token_id, bias in sampling.logit_bias],
        "constraint_kind": None if kind is None else kind.value,
        "logprobs_mode": sampling.logprobs_mode.value,
    }


def _rows(store: TrajectoryReader, rollout_id: str | None, mask_constrained: bool) -> Iterator[Row]:
    for trajectory in store.trajectories(rollout_id):
        yield from rows_of(trajectory.without_constrained() if mask_constrained else trajectory)


def _write_parquet(rows: Iterator[Row], path: Path) -> int:
    return _write_shard(_row_groups(rows), path, SCHEMA)


def _write_shard(chunks: Iterable[list[Row]], path: Path, schema: pa.Schema, max_bytes: float = math.inf) -> int:
    """Write row groups until the file has at least `max_bytes`; return the number of rows."""
    num_rows = 0
    with path.open("wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for chunk in chunks:
            columns = [pa.array([row[field.name] for row in chunk], type=field.type) for field in SCHEMA]
            table = pa.Table.from_arrays(columns, schema=SCHEMA).cast(schema)
            writer.write_table(table, row_group_size=len(chunk))
            num_rows += len(chunk)
            if file.tell() >= max_bytes:
                break
    return num_rows


def _write_folder(model: str, rows: Iterator[Row], folder: Path) -> int:
    """Write shards, and a dataset card with which `datasets.load_dataset` finds them."""
    num_records, versions = 0, set[int]()

    def counted() -> Iterator[Row]:
        nonlocal num_records
        for row in rows:
            num_records += row["branch"] == 0
            versions.update(span["version"] for span in row["weight_versions"])
            yield row

    data, chunks = folder / "data", _row_groups(counted())
    data.mkdir(parents=True)
    schema = pa.schema([_without_maps(field) for field in SCHEMA])
    write = partial(_write_shard, schema=schema, max_bytes=_SHARD_BYTES)
    num_rows = write(chunks, data / "00000.parquet")  # written even without records
    for number, first in enumerate(chunks, 1):
        num_rows += write(chain((first,), chunks), data / f"{number:05}.parquet")
    lines = (f"| `{field.name}` | `{field.type}` | {_shape(field)} |" for field in schema)
    shown = f"{min(versions)} to {max(versions)}" if versions else "none"
    counts = {"num_records": num_records, "num_rows": num_rows, "versions": shown}
    card = _CARD.format(model=model, release=__version__, notes=_NOTES, columns="\n".join(lines), **counts)
    (folder / "README.md").write_text(card)
    return num_rows


def _shape(field: pa.Field[Any]) -> str:
    return f"[{_LENGTHS.get(field.name, 'any')}]" if pa.types.is_list(field.type) else ""


def _without_maps(field: pa.Field[Any]) -> pa.Field[Any]:
    """Return a field with maps converted to lists of keys and values, because `datasets` does not support maps."""
    kind = field.type
    if pa.types.is_map(kind):
        kind = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_without_maps(inner) for inner in kind])
    return field.with_type(kind)


def _row_groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    num_tokens = 0
    for row in rows:
        chunk.append(row)
        num_tokens += len(row["prompt_ids"]) + len(row["response_ids"])
        num_tokens += sum(len(row[name]) // _AUX_OF_A_TOKEN for name in _AUX if row[name] is not None)
        if len(chunk) >= _ROW_GROUP_ROWS or num_tokens >= _ROW_GROUP_TOKENS:
            yield chunk
            chunk, num_tokens = [], 0
    if chunk:
        yield chunk


def _write_jsonl(rows: Iterator[Row], path: Path) -> int:
    num_rows = 0
    with path.open("wb") as file:
        for row in rows:
            row |= dict.fromkeys(_AUX)  # binary arrays, and many times larger than the rest
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            num_rows += 1
    return num_rows
