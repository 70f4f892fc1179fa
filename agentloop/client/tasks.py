"""Reading task files: JSON lines, one `RolloutTask` each, in the shape that the HTTP API takes."""

from __future__ import annotations

from pathlib import Path

from agentloop.api import TaskBody, parse_body
from agentloop.errors import InvalidRequest
from agentloop.types import RolloutTask


def load_tasks(path: str | Path) -> list[RolloutTask]:
    """The tasks of a JSONL file, in order; blank lines are skipped.

    Raises InvalidRequest naming file and line for what is no task, for a task id seen before, and for a file
    that cannot be read or holds none.
    """
    tasks: dict[str, RolloutTask] = {}
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read tasks from {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = parse_body(line.strip(), TaskBody).to_task()
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}, line {number}: {error.message}", param=error.param) from error
        if task.task_id in tasks:
            raise InvalidRequest(f"{path}, line {number}: task_id {task.task_id!r} occurs twice", param="task_id")
        tasks[task.task_id] = task
    if not tasks:
        raise InvalidRequest(f"{path} holds no task")
    return list(tasks.values())
