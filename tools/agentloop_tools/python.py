"""The `python` tool: code runs in pydantic-monty, a Python interpreter of its own in a worker process.

Isolation it gives: no CPython, no C extensions, no imports but monty's own modules; no files, network, processes,
environment or arguments; each call in a separate process under limits of execution time, memory, recursion and
output, which is killed and replaced when it overruns or crashes. Code that hides from the limit inside one long
operation is killed by the pool a grace period later. The host never converts a value that code computed (shared
references would let a small one expand without end): the value is rendered in the sandbox, as printed text.

Isolation it does not give: the worker process has the service's user and shares its kernel, with no namespace or
seccomp filter around it, so a memory-safety bug in the interpreter is not contained. Time of the host's cores is
bounded a call, not reserved. CPython parses the source here (16 KiB at most) to find its last expression and its
exits; nothing of it is executed here.

State: between calls a trajectory holds no process, only its variables, serialised (1 MiB at most). A call that
overruns a limit leaves them as they were before it; one that raises keeps what it changed. Randomness starts from
the trajectory's seed, the clock stands still and sleeps return at once, so the same calls give the same answers.
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
# Escapes other than of a quote, a backslash or a line end do not matter to where expressions end, and a wrong one
# (as in "\d") would make the parser warn on the service's behalf.
_ESCAPE = re.compile(r"(\\[\\\"'\r\n])|\\")
_KILL_GRACE_S = 1.0  # beyond the time limit, before the pool kills a worker that did not stop by itself


def _signature(
    code: Annotated[str, Field(description="Python source. No files, no network, few modules.")],
) -> None:
    """Run Python code and return what it prints, or else the value of its last expression."""


_ARGUMENTS = arguments_model(_signature)


@dataclass(frozen=True, slots=True)
class _Run:
    """The outcome of one run: its answer, or the error it raised, and the variables after it."""

    text: str
    error: str | None
    state: bytes


class PythonTool:
    """The tool; owns the worker processes, which start with the first call.

    `max_run_s` limits a call's execution, `max_memory_bytes` its heap. Workers are driven through the
    synchronous API from threads: after a worker was killed, the asynchronous one can abort this process at its
    exit (seen with 1.4.0).
    """

    def __init__(
        self, *, num_workers: int | None = None, max_run_s: float = 1.0, max_memory_bytes: int = 32 << 20
    ) -> None:
        if num_workers is None:
            num_workers = min(4, os.cpu_count() or 1)
        self._max_run_s = max_run_s
        self._max_memory_bytes = max_memory_bytes
        max_call_s = max_run_s + _KILL_GRACE_S
        # Four calls may be under way for each worker: one runs, the others wait for it, or for their own
        # trajectory's earlier call. The timeout has room for all of them to overrun.
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
        """Stop the workers, after the calls that run (each ends within its limits). Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._threads, self._stop)
        self._threads.shutdown(wait=False)

    async def run(self, code: str, state: bytes | None, seed: int) -> _Run:
        """Run code on the variables in `state` (None: on none).

        Raises ToolError if a limit stopped it; what the code itself raised is in the answer.
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
        marker = f"\0{secrets.token_hex(16)}\0"  # the code cannot know it, so it cannot forge a value
        source = with_value_printed(with_exit_texts(code), marker)
        output = CollectString(max_bytes=MAX_PRINTED_BYTES)
        error, last_words = None, ""
        try:
            with self._checkout(seed) as session:
                if state is not None:
                    session.load_session(state)
                else:
                    _drive(session, f"{_PRINT} = print", output)  # what code binds to `print` later is its own
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
        """Raise ToolError if a limit stopped the code, which leaves an interpreter that must not go on.

        Our own words, since monty's hold the measured time and size, which differ from run to run.
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
    """One trajectory's variables. Calls of one turn run one after the other, in the order they were made."""

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
        """Return the variables as the interpreter dumps them; empty: there are none."""
        return self._state or b""

    async def restore(self, state: bytes) -> None:
        """Go on with the variables of another session."""
        self._state = state or None

    async def close(self) -> None:
        self._state = None


def with_value_printed(code: str, marker: str) -> str:
    """Change code to print `marker` and the repr of its last statement's value, if that is an expression.

    None prints nothing. Code that CPython cannot parse comes back as it is: monty then says what is wrong.
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
    """Change code to give `SystemExit` texts: monty's exceptions take nothing else."""
    given: list[ast.expr] = []
    for node in ast.walk(_parsed(code)) if SystemExit.__name__ in code else ():
        match node:
            case ast.Call(func=ast.Name(id="SystemExit"), args=[one], keywords=[]):
                given.append(one)
    if not given:
        return code
    data = code.encode()
    starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    inserts = [(starts[one.lineno - 1] + one.col_offset, b"(lambda code: f'{code}')(") for one in given]
    inserts += [(starts[(one.end_lineno or 1) - 1] + (one.end_col_offset or 0), b")") for one in given]
    for place, text in sorted(inserts, reverse=True):
        data = data[:place] + text + data[place:]
    return data.decode()


def _exit_words(code: str) -> str:
    """Return what Python leaves behind when it exits with this code: nothing where all is well."""
    if code in ("", "0", "None", "False"):
        return ""
    is_number = code.removeprefix("-").isdecimal()
    return f"[exit status {code}]" if is_number else f"{_one_line(code)}\n[exit status 1]"


def _parsed(code: str) -> ast.Module:
    """Parse code; what CPython cannot parse is as nothing."""
    try:
        return ast.parse(_ESCAPE.sub(lambda escape: escape[1] or "_", code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _drive(session: MontySession, source: str, output: CollectString) -> None:
    """Run to the end. The result object's `output` is not touched: reading it would convert the value."""
    step = session.feed_start(source, print_callback=output)
    while not isinstance(step, MontyComplete):
        step = step.resume_auto()  # a missing name or a file: refused, as no host object is on offer


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_RAISED_CHARS else line[:_MAX_RAISED_CHARS] + "..."
