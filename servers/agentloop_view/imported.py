"""`agentloop import`: trajectories of ATIF files and OpenAI-style JSON lines as a run, for `show` and `view`.

Files of `agentloop export --format atif` are restored: ids, logprobs, versions and messages are equal. Missing
fields are listed as lost. A record without prompt ids has its sampled tokens only, and is not trainable.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.console import Console

from agentloop.errors import InvalidRequest
from agentloop.images import ImageRef
from agentloop.types import (
    Lineage,
    Message,
    PathKind,
    StopReason,
    TokenPath,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    Turn,
    WeightVersionSpan,
    append_span,
    shifted_spans,
)
from agentloop.values import codec
from agentloop_servers.cli.records import write_run
from agentloop_servers.cli.terminal import PLAIN, Out, clear_errors
from agentloop_view.atif import OWN, Document, PathFacts

ROLLOUT = "imported"
_COLUMNS = ("logprobs", "raw_logprobs", "token_rewards")

app = typer.Typer()


@app.command("import")
def import_files(
    path: Annotated[
        Path, typer.Argument(help="An ATIF file, a folder of them, or a .jsonl file of conversations.")
    ],
    out: Out = Path("runs"),
) -> None:
    """Write the trajectories of files into a new run, for `show` and `view`."""
    lost = Counter[str]()
    with clear_errors():
        if not path.exists():
            raise InvalidRequest(f"cannot read trajectories: {path} does not exist", param="path")
        records = [*(read_conversations(path, lost) if path.suffix == ".jsonl" else read_atif(path, lost))]
        if not records:
            raise InvalidRequest(f"{path} has no trajectory: expected ATIF files (*.json)", param="path")
        run_dir = asyncio.run(write_run(records, out))
    console = Console()
    console.print(f"{len(records)} trajectories in {run_dir}: agentloop view {run_dir}", **PLAIN)
    for name, count in sorted(lost.items()):
        console.print(f"lost in {count} trajectories: {name}", **PLAIN)


def read_atif(path: Path, lost: Counter[str]) -> Iterator[Trajectory]:
    """Yield the trajectories of an ATIF file or folder, with continuations. Counts missing fields in `lost`."""
    files = {file.name: _read(file) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])}
    continued = {document.get("continued_trajectory_ref") for document in files.values()}
    for name, first in files.items():
        if name in continued:
            continue
        chain, seen = [first], {name}
        while (following := chain[-1].get("continued_trajectory_ref")) is not None and following not in seen:
            seen.add(following)
            file = (path if path.is_dir() else path.parent) / following
            chain.append(files[following] if following in files else _read(file))
        missing: set[str] = set()
        try:
            yield _record_of(chain, Path(name).stem, missing)
        except (KeyError, TypeError, ValueError, AttributeError, InvalidRequest) as error:
            raise InvalidRequest(f"{name} is not an ATIF trajectory: {type(error).__name__}: {error}") from error
        lost.update(missing)


def read_conversations(path: Path, lost: Counter[str]) -> Iterator[Trajectory]:
    """Yield conversations of JSON lines: `messages` in the OpenAI format, and optionally `id` and `reward`."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            # Our own `jsonl` export has the messages as a string.
            listed = orjson.loads(row["messages"]) if isinstance(row["messages"], str) else row["messages"]
            messages = tuple(map(_openai_message, listed))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"{path}, line {number}: expected an object with `messages` in the OpenAI format, but found"
                f" {type(error).__name__}: {error}"
            ) from error
        name = str(row.get("id") or row.get("task_id") or f"line-{number}")
        turns = sum(message.role == "assistant" for message in messages)
        missing: set[str] = set()
        yield _new_record(name, (_path([{}] * turns, messages, PathFacts(0), missing),), row.get("reward"))
        lost.update(missing)


def _read(file: Path) -> Document:
    try:
        document = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}") from error
    if not isinstance(document, dict) or not str(document.get("schema_version", "")).startswith("ATIF-"):
        raise InvalidRequest(f"{file} is not an ATIF trajectory: it has no `schema_version` such as ATIF-v1.8")
    return document


def _record_of(chain: list[Document], name: str, lost: set[str]) -> Trajectory:
    paths: dict[int, TokenPath] = {}
    record: Trajectory | None = None
    last_root: int | None = None
    for root in chain:
        root_index = len(paths)
        for document in (root, *root.get("subagent_trajectories", ())):
            own = _own(document)
            if "record" in own:
                record = codec.from_builtins(own["record"], Trajectory)
            if "record" in own and "path" not in own:
                continue  # it failed before anything was rendered
            if "path" in own:
                facts = codec.from_builtins(own["path"], PathFacts)
            else:
                kind, parent = (
                    (PathKind.COMPACTS, last_root) if document is root else (PathKind.DELEGATES, root_index)
                )
                lineage = None if parent is None else Lineage(kind, parent, is_declared=True)
                facts = PathFacts(len(paths), lineage=lineage)
            messages, sampled = _messages_of(document["steps"], is_ours="path" in own)
            paths[facts.index] = _path(sampled, messages, facts, lost)
        last_root = root_index
    ordered = tuple(paths[index] for index in sorted(paths))
    if record is not None:
        return replace(record, paths=ordered)
    lost |= {"reward", "stop reason"}
    return _new_record(str(chain[0].get("trajectory_id") or chain[0].get("session_id") or name), ordered)


def _new_record(name: str, paths: tuple[TokenPath, ...], reward: float | None = None) -> Trajectory:
    """Return a record for a trajectory of another program."""
    reward = None if reward is None else float(reward)
    return Trajectory(name, name, 0, paths, StopReason.COMPLETED, True, reward=reward, rollout_id=ROLLOUT)


def _messages_of(steps: list[Document], *, is_ours: bool) -> tuple[tuple[Message, ...], list[Document]]:
    """Return the messages of steps, and the metrics of the sampled ones."""
    messages, sampled = list[Message](), list[Document]()
    for step in steps:
        own, source = _own(step), step["source"]
        role = {"agent": "assistant", "user": "user"}.get(source) or own.get("role", "system")
        calls = tuple(map(_call, step.get("tool_calls") or ()))
        if source == "agent" and step.get("llm_call_count") != 0 and ("metrics" in step or not is_ours):
            sampled.append(step.get("metrics") or {})
        if own.get("has_message", True):
            message = _message(role, step["message"], own)
            messages.append(replace(message, tool_calls=calls, reasoning=step.get("reasoning_content") or ""))
        names = {call.id: call.name for call in calls}
        for result in (step.get("observation") or {}).get("results", ()):
            if result.get("content") is not None:
                call_id = result.get("source_call_id")
                about = {"tool_call_id": call_id, "name": names.get(call_id), **_own(result)}
                messages.append(_message("tool", result["content"], about))
    return tuple(messages), sampled


def _message(role: str, content: str | list[Document], own: Mapping[str, Any]) -> Message:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = "".join(part.get("text") or "" for part in parts if part.get("type") in ("text", "input_text"))
    images = codec.from_builtins(own.get("images", []), tuple[ImageRef, ...])
    return Message(role, text, (), own.get("tool_call_id"), own.get("name"), images=images)


def _call(call: Document) -> ToolCall:
    about = {"id": call["tool_call_id"], "name": call["function_name"], "arguments": call["arguments"]}
    return codec.from_builtins({**about, **_own(call)}, ToolCall)


def _openai_message(message: Mapping[str, Any]) -> Message:
    read = _message(message["role"], message.get("content") or "", {**message, "images": []})
    calls = []
    for call in message.get("tool_calls") or ():
        name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
        try:
            calls.append(ToolCall(call.get("id") or "", name, dict(orjson.loads(text))))
        except (orjson.JSONDecodeError, TypeError, ValueError) as error:
            problem = f"the arguments are not a JSON object: {error}"
            calls.append(
                ToolCall(call.get("id") or "", name, {}, ToolCallStatus.MALFORMED, problem, text=str(text))
            )
    return replace(read, tool_calls=tuple(calls), reasoning=message.get("reasoning_content") or "")


def _path(sampled: list[Document], messages: tuple[Message, ...], facts: PathFacts, lost: set[str]) -> TokenPath:
    """Return the token path with these turns' metrics. Adds the names of missing fields to `lost`."""
    ids = [list(metrics.get("completion_token_ids") or ()) for metrics in sampled]
    prompts = [list(metrics.get("prompt_token_ids") or ()) for metrics in sampled]
    # Each prompt has to begin with all tokens before it. Otherwise only the sampled tokens are known.
    known = [prompt + turn for prompt, turn in zip(prompts, ids, strict=True)]
    is_whole = all(prompts) and all(after[: len(before)] == before for before, after in pairwise(known))
    if not is_whole:
        prompts = [[token_id for turn in ids[:number] for token_id in turn] for number in range(len(ids))]
        known = [prompt + turn for prompt, turn in zip(prompts, ids, strict=True)]
    prompt = prompts[0] if prompts else []
    response = [*(known[-1] if known else [])[len(prompt) :], *facts.trailing_ids]
    columns = {name: np.zeros(len(response), np.float32) for name in _COLUMNS}
    mask, spans, turns = np.zeros(len(response), np.bool_), list[WeightVersionSpan](), list[Turn]()
    has_columns = {"logprobs"}
    for number, metrics in enumerate(sampled):
        own, num, start = _own(metrics), len(ids[number]), len(prompts[number]) - len(prompt)
        for name, values in {**own, "logprobs": metrics.get("logprobs")}.items():
            if name in columns and values is not None and len(values) == num:
                # An unknown raw logprob is NaN in a record and null in JSON.
                columns[name][start : start + num] = [np.nan if value is None else value for value in values]
                has_columns.add(name)
        for begin, end in own.get("trained", [[0, num]]):
            mask[start + begin : start + end] = True
        versions = codec.from_builtins(own.get("weight_versions", []), tuple[WeightVersionSpan, ...])
        for span in shifted_spans(versions, start):
            append_span(spans, span)
        turn = {"finish_reason": "stop", "replica_id": "", "cached_tokens": metrics.get("cached_tokens") or 0}
        turn |= {"turn_id": str(number), **own.get("turn", {})}
        turn |= {"prompt_len": len(prompts[number]), "start": start, "end": start + num}
        turns.append(codec.from_builtins(turn, Turn))
    lost.update(_missing(sampled, has_prompts=is_whole))
    of_path = {name: getattr(facts, name) for name in PathFacts.__slots__ if name not in ("index", "trailing_ids")}
    of_path |= {name: columns[name] for name in has_columns}
    if not is_whole:
        of_path |= {"is_trainable": False, "images": (), "num_shared": 0}
    arrays = np.array(prompt, np.int32), np.array(response, np.int32), mask
    return TokenPath(*arrays, weight_versions=tuple(spans), turns=tuple(turns), messages=messages, **of_path)


def _missing(sampled: list[Document], *, has_prompts: bool) -> Iterator[str]:
    """Yield the names of fields that sampled steps lack."""
    num_ids = [len(metrics.get("completion_token_ids") or ()) for metrics in sampled]
    if not any(num_ids):
        yield "token ids and logprobs"
        return
    if not has_prompts:
        yield "prompt and observed token ids"
    if any(len(metrics.get("logprobs") or ()) != num for metrics, num in zip(sampled, num_ids, strict=True)):
        yield "logprobs"
    if not any("weight_versions" in _own(metrics) for metrics in sampled):
        yield "weight versions"


def _own(document: Document) -> Document:
    """Return our fields of a document, a step, a result or metrics."""
    own: Document = (document.get("extra") or {}).get(OWN) or {}
    return own
