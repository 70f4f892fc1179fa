"""Logging: one line per event, as JSON in the run's `service.log`, and warnings on the console.

Several processes append to one file; each line is a single `write`, so lines are never interleaved. If another
program moves the file, each process creates or opens a new file before its next line.

All loggers, including those of the standard library (uvicorn, Ray, engines), use one chain of processors. It
redacts secrets, escapes newlines, and omits prompts, ids and tool output unless the level is debug.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import Processor

LOG_NAME = "service.log"
"""The name of the log file in a run directory."""

MAX_VALUE_CHARS = 2000
MAX_LOGGED_DEPTH = 4

_SECRET_KEY = re.compile(r"(?i)^(.*[_-])?(authorization|api[_-]?keys?|admin[_-]?keys?|secret|password|cookie)$")
_SECRET_VALUE = re.compile(r"(?i)\b(bearer|basic)\s+[^\s,;\"']+")
_CONTENT_KEYS = frozenset(
    {"prompt", "messages", "content", "arguments", "token_ids", "prompt_ids", "response_ids", "tool_output", "body"}
)
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), 127]} | {9: "\\t", 10: "\\n", 13: "\\r"}

_installed: list[logging.Handler] = []


def configure_logging(
    path: Path | None,
    *,
    level: str = "info",
    console_level: str = "warning",
    console: TextIO | None = None,
    adopt: Sequence[str] = ("uvicorn", "uvicorn.error", "uvicorn.access", "ray", "ray.serve", "vllm"),
    on_problem: Callable[[str, str], None] = lambda event, level: None,
) -> None:
    """Configure this process's logging, replacing an earlier configuration.

    `on_problem` is called with the event and level of each warning and error of agentloop's loggers, in any thread.

    With `path` None no file is written. The loggers in `adopt` lose their own handlers, so that their messages use
    this configuration; other loggers of the standard library propagate to the root logger.
    """
    close_logging()
    is_debug = logging.getLevelName(level.upper()) <= logging.DEBUG
    shared = _shared_processors(is_debug)
    if path is not None:
        file = _SharedFile(path, encoding="utf-8", errors="backslashreplace")
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
        cache_logger_on_first_use=False,  # loggers are created at import, before this function runs
    )


def close_logging() -> None:
    """Undo `configure_logging`: remove its handlers and close the file. Idempotent."""
    root = logging.getLogger()
    while _installed:
        handler = _installed.pop()
        root.removeHandler(handler)
        handler.close()


class _SharedFile(WatchedFileHandler):
    """A log file that several processes append to."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the replacement of a moved file cannot be opened: drop the line and continue
            self.handleError(record)


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
        event[key] = f"[{len(value)} omitted]" if hasattr(value, "__len__") else "[omitted]"
    return event


def _clean(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in list(event.items()):
        if not key.startswith("_"):  # keys with an underscore are structlog's own, such as the log record
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
