"""Trajectories as ATIF 1.8 documents (Agent Trajectory Interchange Format, github.com/harbor-framework/harbor).

A document is one token path. A path that compacts the main conversation is in a separate file, the continuation of
the file before it. All other paths are embedded in the file of the path that they come from. Standard fields have
the messages, ids and logprobs; `extra.agentloop` has the rest of the record, so that `read_atif` restores it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agentloop import __version__
from agentloop.images import IMAGES_FOLDER, ImageRef, ImageSpan, media_type, parts_of
from agentloop.types import (
    BoolArray,
    Lineage,
    Message,
    PathKind,
    SplitReason,
    TokenPath,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    Turn,
    clip_spans,
)
from agentloop.values import codec

ATIF_VERSION = "ATIF-v1.8"
OWN = "agentloop"
"""The key of our fields in every `extra`."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PathFacts:
    """The fields of a token path that ATIF has no place for."""

    index: int  # in `Trajectory.paths`
    split_reason: SplitReason | None = None
    parent: int | None = None
    num_shared: int = 0
    split_detail: str | None = None
    lineage: Lineage | None = None
    agent: str = ""
    reward: float | None = None
    is_trainable: bool = True
    images: tuple[ImageSpan, ...] = ()
    trailing_ids: tuple[int, ...] = ()  # observed tokens after the last turn


@dataclass(frozen=True, slots=True)
class AtifWriter:
    """Writes trajectories into a folder, which exists."""

    folder: Path
    target: Path  # the folder's final place, for relative paths of images
    run_dir: Path  # has the images
    model_name: str | None = None
    has_prompt_ids: bool = True

    def write(self, record: Trajectory, number: int) -> int:
        """Write a trajectory's files; `number` makes their names unique. Returns the number of files."""
        place = re.sub(r"[^A-Za-z0-9._-]", "_", f"{record.group_id}-{record.sample_index}")[:100]
        roots = _roots(record)
        names = [f"{number:06}-{place}{f'.part-{part}' if part else ''}.json" for part in range(len(roots))]
        documents = {root: self._document(record, root) for root in roots}
        for index, path in enumerate(record.paths):
            if index not in documents:
                document = self._document(record, index)
                file = documents[_root_of(record, index, roots)]
                file.setdefault("subagent_trajectories", []).append(document)
                if path.lineage is not None and path.lineage.kind is PathKind.DELEGATES:
                    _refer(file, path, path.lineage, document["trajectory_id"])
        for root, name, following in zip(roots, names, [*names[1:], None], strict=True):
            if following is not None:
                documents[root]["continued_trajectory_ref"] = following
            (self.folder / name).write_bytes(orjson.dumps(documents[root], option=orjson.OPT_INDENT_2))
        return len(roots)

    def _document(self, record: Trajectory, index: int) -> Document:
        session = f"{record.rollout_id}/{record.group_id}/{record.sample_index}"
        extra: dict[str, Any] = {}
        metrics: list[dict[str, Any]] = []
        if record.paths:
            path = record.paths[index]
            end = path.turns[-1].end if path.turns else 0
            facts = {name: getattr(path, name) for name in PathFacts.__slots__ if hasattr(path, name)}
            trailing = tuple(path.response_ids[end:].tolist())
            extra["path"] = codec.to_builtins(PathFacts(index=index, trailing_ids=trailing, **facts))
            steps = self._steps(path.messages, path, record)
            metrics = [step["metrics"] for step in steps if "metrics" in step]
        else:
            steps = self._steps(record.task_messages, None, record)
        if index == 0:
            extra["record"] = codec.to_builtins(replace(record, paths=()))
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        totals = {f"total_{name}": sum(one[name] for one in metrics) for name in names}
        model = {} if self.model_name is None else {"model_name": self.model_name}
        return {
            "schema_version": ATIF_VERSION,
            "session_id": session,
            "trajectory_id": f"{session}/{index}",
            "agent": {"name": record.loop or "session", "version": f"agentloop {__version__}", **model},
            # ATIF requires a step: a trajectory that failed at its start has its error as the only one.
            "steps": steps or [{"step_id": 1, "source": "system", "message": record.error or ""}],
            "final_metrics": {**totals, "total_steps": max(len(steps), 1)},
            "extra": {OWN: extra},
        }

    def _steps(self, messages: Sequence[Message], path: TokenPath | None, record: Trajectory) -> list[Document]:
        """Return messages as steps. A path's last assistant messages are its turns."""
        turns = [*path.turns] if path is not None else []
        num_before = max(sum(message.role == "assistant" for message in messages) - len(turns), 0)
        steps: list[Document] = []
        for message in messages:
            if message.role == "tool" and steps:
                results = steps[-1].setdefault("observation", {"results": []})["results"]
                results.append(self._result(message, steps[-1]))
                continue
            step = {"step_id": len(steps) + 1, **self._step(message)}
            if message.role == "assistant" and path is not None:
                num_before -= 1
                if num_before < 0:
                    step |= self._sampled(path, turns.pop(0), record)
            steps.append(step)
        for turn in turns:  # a record without messages
            assert path is not None
            extra = {"extra": {OWN: {"has_message": False}}}
            step = {"step_id": len(steps) + 1, "source": "agent", "message": "", **extra}
            steps.append(step | self._sampled(path, turn, record))
        return steps

    def _step(self, message: Message) -> Document:
        sources = {"assistant": "agent", "user": "user"}
        source = sources.get(message.role, "system")
        step: Document = {"source": source, "message": self._content(message)}
        own: dict[str, Any] = {}
        if message.role not in (*sources, "system"):
            own["role"] = message.role
        for name in ("name", "tool_call_id", "images"):
            if value := getattr(message, name):
                own[name] = codec.to_builtins(value)
        if source == "agent" and message.reasoning:
            step["reasoning_content"] = message.reasoning
        if source == "agent" and message.tool_calls:
            step["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        return {**step, "extra": {OWN: own}} if own else step

    def _content(self, message: Message) -> str | list[Document]:
        if not message.images:
            return message.content
        parts: list[Document] = []
        for part in parts_of(message.content, message.images):
            if isinstance(part, ImageRef):
                file = self.run_dir / IMAGES_FOLDER / part.sha256
                source = {"media_type": media_type(file.read_bytes()), "path": os.path.relpath(file, self.target)}
                parts.append({"type": "image", "source": source})
            else:
                parts.append({"type": "text", "text": part})
        return parts

    def _result(self, message: Message, step: Document) -> Document:
        """Return a tool message as a result of the step; a call id that the step has not is in `extra`."""
        names = {call["tool_call_id"]: call["function_name"] for call in step.get("tool_calls", ())}
        result: Document = {"content": self._content(message)}
        own = {"images": codec.to_builtins(message.images)} if message.images else {}
        if message.tool_call_id in names:
            result["source_call_id"] = message.tool_call_id
        elif message.tool_call_id is not None:
            own["tool_call_id"] = message.tool_call_id
        if message.name != names.get(message.tool_call_id or ""):
            own["name"] = message.name
        return {**result, "extra": {OWN: own}} if own else result

    def _sampled(self, path: TokenPath, turn: Turn, record: Trajectory) -> Document:
        """Return the fields of a step that the policy sampled."""
        sampled = slice(turn.start, turn.end)
        own = {
            "turn": codec.to_builtins(turn),
            "weight_versions": codec.to_builtins(clip_spans(path.weight_versions, turn.start, turn.end)),
            "trained": _runs(path.response_mask[sampled]),
        }
        for name in ("raw_logprobs", "token_rewards"):
            if (values := getattr(path, name)) is not None:
                own[name] = values[sampled].tolist()
        metrics = {
            "prompt_tokens": turn.prompt_len,
            "completion_tokens": turn.end - turn.start,
            "cached_tokens": turn.cached_tokens,
            "completion_token_ids": path.response_ids[sampled].tolist(),
            "logprobs": path.logprobs[sampled].tolist(),
            "extra": {OWN: own},
        }
        if self.has_prompt_ids:
            ids = np.concatenate([path.prompt_ids, path.response_ids])
            metrics["prompt_token_ids"] = ids[: turn.prompt_len].tolist()
        fields: Document = {"metrics": metrics, "llm_call_count": 1}
        if turn not in path.own_turns:
            fields["is_copied_context"] = True
        if turn.times is not None and record.times is not None:
            at = record.times.began_at + turn.times.begun_us / 1e6
            fields["timestamp"] = datetime.fromtimestamp(at, UTC).isoformat()
        return fields


def _tool_call(call: ToolCall) -> Document:
    own = {
        name: codec.to_builtins(value)
        for name in ("status", "error", "token_start", "token_end", "text", "written_id", "partial_arguments")
        if (value := getattr(call, name)) and value != ToolCallStatus.OK
    }
    arguments = codec.to_builtins(call.arguments)
    document = {"tool_call_id": call.id, "function_name": call.name, "arguments": arguments}
    return {**document, "extra": {OWN: own}} if own else document


def _runs(mask: BoolArray) -> list[list[int]]:
    """Return the ranges [start, end) in which the mask is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [[int(start), int(end)] for start, end in edges.reshape(-1, 2)]


def _roots(record: Trajectory) -> list[int]:
    """Return the paths that are files: the first of the main conversation, and those that compact it."""
    main = record.main_conversation
    lineages = {index: record.paths[index].lineage for index in main}
    compactions = [index for index, one in lineages.items() if one is not None and one.kind is PathKind.COMPACTS]
    return [*main[:1], *(index for index in compactions if index not in main[:1])] or [0]


def _root_of(record: Trajectory, index: int, roots: Sequence[int]) -> int:
    """Return the file of an embedded path: that of its nearest ancestor, or the first one."""
    for _ in record.paths:  # a chain of parents is at most this long
        lineage = record.paths[index].lineage
        if lineage is None or lineage.parent is None:
            break
        if (index := lineage.parent) in roots:
            return index
    return roots[0]


def _refer(file: Document, path: TokenPath, lineage: Lineage, trajectory_id: str) -> None:
    """Add a reference to a sub-agent to the step that started it: the parent's last one before its first turn."""
    documents = [file, *file["subagent_trajectories"]]
    parents = [one for one in documents if one["extra"][OWN]["path"]["index"] == lineage.parent]
    sampled = [step for one in parents for step in one["steps"] if "metrics" in step]
    began_us = _began_us(path.own_turns)
    earlier = [step for step in sampled if _began_us([_turn_of(step)]) <= began_us]
    for step in (earlier or sampled)[-1:]:
        results = step.setdefault("observation", {"results": []})["results"]
        results.append({"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]})


def _turn_of(step: Document) -> Turn:
    return codec.from_builtins(step["metrics"]["extra"][OWN]["turn"], Turn)


def _began_us(turns: Sequence[Turn]) -> int:
    return turns[0].times.begun_us if turns and turns[0].times is not None else 0
