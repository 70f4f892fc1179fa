"""The `python` tool: runs code in pydantic-monty, a separate Python interpreter, in a worker process.

Isolation: no CPython, no C extensions, no imports except monty's modules; no files, network, processes, environment
or arguments. Each call runs in a process with limits on execution time, memory, recursion and output; the process
is killed and replaced if it exceeds a limit or crashes. The host does not convert computed values, because shared
references could expand a small value without limit: values are rendered as text in the sandbox.

Not isolated: the worker process has the service's user and kernel, without namespaces or a seccomp filter, so a
memory-safety bug in the interpreter is not contained. CPython parses the source in this process (at most 16 KiB),
but does not execute it.

State: between calls a trajectory has no process, only its serialized variables (at most 1 MiB). A call that exceeds
a limit does not change them; a call that raises keeps its changes. The random seed is the trajectory's, the clock
is constant and sleeps return immediately, so that equal calls have equal results.
"""

from __future__ import annotations

import ast
import asyncio
import datetime
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from pydantic_monty import (
    CollectString,
    Monty,
    MontyComplete,
    MontyCrashedError,
    MontyError,
    MontyRuntimeError,
    MontySession,
    MontySyntaxError,
)

from agentloop.errors import ToolError
from agentloop.rollout.tool import ToolSpec, arguments_model, parameters_schema, validated
from agentloop.types import JSON

MAX_SOURCE_BYTES = 16_384
MAX_PRINTED_BYTES = 262_144
MAX_STATE_BYTES = 1 << 20
_CLOCK = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_MAX_RAISED_CHARS = 300
_PRINT = "_print_of_the_tool"  # a trajectory's first variable
# Only escapes of quotes, backslashes and line ends affect where expressions end. The others are replaced, because
# the parser would log a warning for an invalid one, such as "\d".
_ESCAPE = re.compile(r"(\\[\\\"'\r\n])|\\")
_KILL_GRACE_S = 1.0  # after the time limit, until the pool kills a worker that did not stop


def _signature(
    code: Annotated[str, Field(description="Python source. No files, no network, few modules.")],
) -> None:
    """Run Python code and return what it prints, or else the value of its last expression."""


_ARGUMENTS = arguments_model(_signature)


@dataclass(frozen=True, slots=True)
class _Run:
    """The outcome of one run: the text or the error, and the variables after it."""

    text: str
    error: str | None
    state: bytes


class PythonTool:
    """The `python` tool. It owns the worker processes, which start with the first call.

    `max_run_s` limits the execution time of a call, `max_memory_bytes` its heap. Threads use monty's synchronous
    API: after a worker was killed, the asynchronous API can abort this process at its exit (observed with 1.4.0).
    """

    def __init__(
        self, *, num_workers: int | None = None, max_run_s: float = 1.0, max_memory_bytes: int = 32 << 20
    ) -> None:
        if num_workers is None:
            num_workers = min(4, os.cpu_count() or 1)
        self._max_run_s = max_run_s
        self._max_memory_bytes = max_memory_bytes
        max_call_s = max_run_s + _KILL_GRACE_S
        # Up to four calls per worker are in progress: one runs, the others wait for it or for an earlier call of
        # their trajectory. The timeout is sufficient even if all of them exceed their limits.
        self._spec = ToolSpec(
            name="python",
            description=_signature.__doc__ or "",
            parameters=parameters_schema(_ARGUMENTS),
            timeout_s=4 * max_call_s + 10.0,
            max_concurrency=4 * num_workers,
        )
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="python-tool")
        self._pool = Monty(
            max_processes=num_workers,
            checkout_timeout=self._spec.timeout_s,
            request_timeout=max_call_s + _KILL_GRACE_S,
            feed_duration_limit_grace=_KILL_GRACE_S,
            max_checkouts_per_worker=1000,
        )
        self._starting = threading.Lock()
        self._is_started = False
        self._is_closed = False

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def open_session(self, trajectory_id: str, seed: int) -> PythonSession:
        return PythonSession(self, seed)

    async def close(self) -> None:
        """Stop the workers after the running calls, each of which ends within its limits. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._threads, self._stop)
        self._threads.shutdown(wait=False)

    async def run(self, code: str, state: bytes | None, seed: int) -> _Run:
        """Run code with the variables in `state` (None: without variables).

        Raises ToolError if a limit stopped it. An exception of the code itself is in `_Run.error`.
        """
        if self._is_closed:
            raise ToolError("the python tool is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, code, state, seed)

    def _start(self) -> None:
        with self._starting:
            if not self._is_started:
                self._pool.__enter__()
                self._is_started = True

    def _stop(self) -> None:
        with self._starting:
            if self._is_started:
                self._pool.__exit__(None, None, None)

    def _run(self, code: str, state: bytes | None, seed: int) -> _Run:
        self._start()
        marker = f"\0{secrets.token_hex(16)}\0"  # unknown to the code, so that it cannot forge a value
        source = with_value_printed(with_exit_texts(code), marker)
        output = CollectString(max_bytes=MAX_PRINTED_BYTES)
        error, last_words = None, ""
        try:
            with self._checkout(seed) as session:
                if state is not None:
                    session.load_session(state)
                else:
                    _drive(session, f"{_PRINT} = print", output)  # saved before the code can rebind `print`
                started_s = time.monotonic()
                try:
                    _drive(session, source, output)
                except (MontyRuntimeError, MontySyntaxError) as raised:
                    self._refuse_overrun(raised, time.monotonic() - started_s)
                    if isinstance(ended := raised.exception(), SystemExit):
                        last_words = _exit_words(str(ended))
                    else:
                        error = _one_line(raised.display("type-msg"))
                new_state = session.dump()
        except MontyCrashedError as crash:
            raise ToolError(self._too_long() if crash.timed_out else "SystemError: worker died") from crash
        except MontyError as failure:
            self._refuse_overrun(failure, 0.0)
            raise
        if len(new_state) > MAX_STATE_BYTES:
            raise ToolError(f"MemoryError: variables of more than {MAX_STATE_BYTES >> 10} KiB")
        printed, _, value = output.output.partition(marker)
        text = (printed or value).removesuffix("\n")
        return _Run("\n".join(filter(None, (text, last_words))), error, new_state)

    def _checkout(self, seed: int) -> MontySession:
        return self._pool.checkout(
            script_name="code.py",
            limits={"max_feed_duration_secs": self._max_run_s, "max_memory": self._max_memory_bytes},
            os_policy={"datetime": _CLOCK, "sleep": "zero", "random_start": {"seed": seed}},
        )

    def _refuse_overrun(self, raised: MontyError, elapsed_s: float) -> None:
        """Raise ToolError if a limit stopped the code, after which the interpreter must not be used.

        Monty's own messages contain the measured time and size, which differ between runs.
        """
        inner = raised.exception()
        if isinstance(inner, TimeoutError) and elapsed_s >= self._max_run_s:
            raise ToolError(self._too_long()) from raised
        if isinstance(inner, MemoryError):
            limits = f"{self._max_memory_bytes >> 20} MiB of memory or {MAX_PRINTED_BYTES >> 10} KiB of output"
            raise ToolError(f"MemoryError: more than {limits}") from raised

    def _too_long(self) -> str:
        return f"TimeoutError: ran longer than {self._max_run_s:g} s"


class PythonSession:
    """One trajectory's variables. Its calls run one at a time, in call order."""

    def __init__(self, tool: PythonTool, seed: int) -> None:
        self._tool = tool
        self._seed = seed
        self._state: bytes | None = None
        self._turn = asyncio.Lock()

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        code = validated(_ARGUMENTS, arguments)["code"]
        if len(code.encode(errors="replace")) > MAX_SOURCE_BYTES:
            raise ToolError(f"code longer than {MAX_SOURCE_BYTES} bytes")
        async with self._turn:
            run = await self._tool.run(code, self._state, self._seed)
            self._state = run.state
        if run.error is not None:
            raise ToolError(run.error)
        return run.text

    async def snapshot(self) -> bytes:
        """Return the variables in the interpreter's serialization; empty without variables."""
        return self._state or b""

    async def restore(self, state: bytes) -> None:
        """Replace the variables by those of another session."""
        self._state = state or None

    async def close(self) -> None:
        self._state = None


def with_value_printed(code: str, marker: str) -> str:
    """Change code to print `marker` and the repr of its last statement, if that is an expression other than None.

    Code that CPython cannot parse is returned unchanged, so that monty reports the error.
    """
    body = _parsed(code).body
    if not body or not isinstance(last := body[-1], ast.Expr):
        return code
    lines = code.encode().splitlines(keepends=True)
    before = b"".join(lines[: last.lineno - 1]) + lines[last.lineno - 1][: last.col_offset]
    expression = ast.get_source_segment(code, last) or ""
    show = f"(lambda value: None if value is None else {_PRINT}({marker!r} + f'{{value!r}}', end=''))"
    return f"{before.decode()}{show}((\n{expression}\n))"


def with_exit_texts(code: str) -> str:
    """Change code to pass text to `SystemExit`, because monty's exceptions accept only text."""
    arguments: list[ast.expr] = []
    for node in ast.walk(_parsed(code)) if SystemExit.__name__ in code else ():
        match node:
            case ast.Call(func=ast.Name(id="SystemExit"), args=[argument], keywords=[]):
                arguments.append(argument)
    if not arguments:
        return code
    data = code.encode()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    inserts = [(starts[each.lineno - 1] + each.col_offset, b"(lambda code: f'{code}')(") for each in arguments]
    inserts += [(starts[(each.end_lineno or 1) - 1] + (each.end_col_offset or 0), b")") for each in arguments]
    for offset, text in sorted(inserts, reverse=True):
        data = data[:offset] + text + data[offset:]
    return data.decode()


def _exit_words(code: str) -> str:
    """Return the text for an exit code, like Python prints it; empty for success."""
    if code in ("", "0", "None", "False"):
        return ""
    is_number = code.removeprefix("-").isdecimal()
    return f"[exit status {code}]" if is_number else f"{_one_line(code)}\n[exit status 1]"


def _parsed(code: str) -> ast.Module:
    """Parse code. Returns an empty module if CPython cannot parse it."""
    try:
        return ast.parse(_ESCAPE.sub(lambda escape: escape[1] or "_", code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _drive(session: MontySession, source: str, output: CollectString) -> None:
    """Run to the end. Do not read the result object's `output`: that would convert the value in this process."""
    step = session.feed_start(source, print_callback=output)
    while not isinstance(step, MontyComplete):
        step = step.resume_auto()  # refuse access to a missing name or a file: there are no host objects


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_RAISED_CHARS else line[:_MAX_RAISED_CHARS] + "..."
