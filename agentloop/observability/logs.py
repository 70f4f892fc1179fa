"""Logging: one line an event, JSON into the run's `service.log`, warnings on the console.

Several processes append to one file: each line is flushed as a single `write`, so lines never mix. The standard
library's handler rotates it, in one process, under a lock on the file itself; all others see at their next line
that the name leads to a new file. A line that is written meanwhile stands at the end of the old one.

Everything goes through one chain, stdlib loggers too (uvicorn, Ray, engines). The chain redacts secrets, escapes
newlines, and leaves out prompts, ids and tool output unless the level is debug.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import Processor

LOG_NAME = "service.log"
"""The log's file within a run directory."""

MAX_VALUE_CHARS = 2000
MAX_LOGGED_DEPTH = 4

_SECRET_KEY = re.compile(r"(?i)^(.*[_-])?(authorization|api[_-]?keys?|admin[_-]?keys?|secret|password|cookie)$")
_SECRET_VALUE = re.compile(r"(?i)\b(bearer|basic)\s+[^\s,;\"']+")
_CONTENT_KEYS = frozenset(
    {"prompt", "messages", "content", "arguments", "token_ids", "prompt_ids", "response_ids", "tool_output", "body"}
)
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), 127]} | {9: "\\t", 10: "\\n", 13: "\\r"}

_installed: list[logging.Handler] = []


@dataclass(frozen=True, slots=True)
class LogRotation:
    """Bounds of a log: of the file that is written, and of the older ones that are kept beside it."""

    max_bytes: int = 64 * 2**20
    num_older: int = 4


def configure_logging(
    path: Path | None,
    *,
    rotation: LogRotation = LogRotation(),
    level: str = "info",
    console_level: str = "warning",
    console: TextIO | None = None,
    adopt: Sequence[str] = ("uvicorn", "uvicorn.error", "uvicorn.access", "ray", "ray.serve", "vllm"),
    on_problem: Callable[[str, str], None] = lambda event, level: None,
) -> None:
    """Set up this process's logging; again replaces what was set up before.

    `on_problem` is told the event and level of each warning and error of our own, in any thread.

    `path` None writes no file. Loggers named in `adopt` lose their own handlers, so that what they say goes the
    same way; others of the standard library come through the root logger.
    """
    close_logging()
    is_debug = logging.getLevelName(level.upper()) <= logging.DEBUG
    shared = _shared_processors(is_debug)
    if path is not None:
        file = _SharedFile(
            path,
            maxBytes=rotation.max_bytes,
            backupCount=rotation.num_older,
            encoding="utf-8",
            errors="backslashreplace",
        )
        file.setFormatter(_formatter(shared, _render_json))
        file.setLevel(level.upper())
        _installed.append(file)
    terminal = logging.StreamHandler(console or sys.stderr)
    terminal.setFormatter(_formatter(shared, _escape_controls, structlog.dev.ConsoleRenderer(colors=False)))
    terminal.setLevel(console_level.upper())
    _installed.append(terminal)
    root = logging.getLogger()
    for handler in _installed:
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in _installed))
    for name in adopt:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            _telling(on_problem),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # loggers are made at import, before this runs
    )


def close_logging() -> None:
    """Undo `configure_logging`: remove its handlers and close the file. Idempotent."""
    root = logging.getLogger()
    while _installed:
        handler = _installed.pop()
        root.removeHandler(handler)
        handler.close()


class _SharedFile(RotatingFileHandler):
    """A log file that several processes append to. A full disk drops the line, and not the work."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if (stream := self.stream) is not None and not self._leads_to(stream):
                self.stream = self._open()
                stream.close()
        except OSError:
            self.handleError(record)
        super().emit(record)

    def doRollover(self) -> None:
        """Rename the files, unless another process does. The lock goes with the file that is full."""
        with contextlib.suppress(FileNotFoundError), open(self.baseFilename, "rb") as full:
            try:
                fcntl.flock(full, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if self.stream is not None and self._leads_to(self.stream):
                if self.backupCount == 0:
                    os.unlink(self.baseFilename)
                super().doRollover()

    def _leads_to(self, stream: TextIO) -> bool:
        """Tell whether the name still leads to the file that is open."""
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(stream.fileno()))
        except FileNotFoundError:
            return False


def _shared_processors(is_debug: bool) -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _keep_all if is_debug else _drop_content,
        _clean,
    ]


def _formatter(shared: list[Processor], *render: Processor) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )


def _telling(on_problem: Callable[[str, str], None]) -> Processor:
    def tell(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event["level"] in ("warning", "error", "critical"):
            on_problem(event["event"], event["level"])
        return event

    return tell


def _keep_all(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return event


def _drop_content(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _CONTENT_KEYS & event.keys():
        value = event[key]
        event[key] = f"[{len(value)} left out]" if hasattr(value, "__len__") else "[left out]"
    return event


def _clean(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in list(event.items()):
        if not key.startswith("_"):  # structlog's own: the record, and where it came from
            event[key] = _cleaned(key, value, MAX_LOGGED_DEPTH)
    return event


def _cleaned(key: str, value: Any, depth: int) -> Any:
    if _SECRET_KEY.match(key):
        return "[redacted]"
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping) and depth > 0:
        return {str(name): _cleaned(str(name), item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth > 0:
        return [_cleaned("", item, depth - 1) for item in value]
    text = _SECRET_VALUE.sub(r"\1 [redacted]", str(value))
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… [{len(text)} characters]"


def _escape_controls(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = value.translate(_CONTROL)
    return event


def _render_json(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    return orjson.dumps(dict(event), default=str, option=orjson.OPT_NON_STR_KEYS).decode()
