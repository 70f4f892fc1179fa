"""Conversion of constraints to xgrammar's format, and a check compilation before a constraint reaches an engine.

An engine compiles a constraint concurrently with its steps and advances the grammar within a step: a constraint
that allows no text, or needs long for a token, would fail late or delay all other requests. Each constraint is
therefore first compiled and walked here, byte by byte, in a thread. The verdict does not depend on the host's load:
a check that uses more than `MAX_CPU_S` of CPU time rejects the constraint, and a check that is still short of CPU
time has no verdict yet. A thread cannot be stopped, so it continues; later calls for the same constraint wait for
it, and at most `MAX_CHECKS` run at the same time. Keywords that xgrammar accepts but does not enforce are rejected
too.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import xxhash

from agentloop.errors import InvalidRequest, ServiceUnavailable
from agentloop.parsers.grammar import constraint_of, format_of
from agentloop.parsers.json_schema import unenforced
from agentloop.types import JSON, Constraint, ConstraintKind
from agentloop_servers.engines.common.process import one_line

MAX_CPU_S = 5.0  # CPU time of one check; a constraint that takes longer to compile would delay the engine
PATIENCE_S = 10.0
MAX_CHECKS = 8
MAX_TOKEN_S = 0.02  # CPU time of the thread for one byte's mask; a real vocabulary takes longer
NUM_REMEMBERED = 4096

_MAX_NESTING = 80  # objects and arrays, including the structural tag itself; deeper nesting overflows native stacks
_MAX_COUNTED_PROPERTIES = 64  # limit with minProperties or maxProperties, whose compile time is at least quadratic
_MAX_PATTERNS = 64
_POLL_CPU_S = 0.1
_TOO_SLOW = f"it takes more than {MAX_CPU_S:.0f} s of CPU time to compile"
_TOO_DEEP = "it is nested too deeply"
_NUM_WALKS = 4
_NUM_STEPS = 192
_PLACE = re.compile(r"^(.*: )?\[[0-9:]+\] \S+\.cc:[0-9]+: ")
_STOP = 256  # the id after those of all bytes


def structural_tag(constraint: Constraint) -> str | None:
    """Convert a constraint to an xgrammar structural tag in JSON; return None for a regex.

    Raises ValueError for text that is not JSON, and for a schema with unresolved references.
    """
    match constraint.kind:
        case ConstraintKind.REGEX:
            return None
        case ConstraintKind.STRUCTURAL_TAG:
            return constraint.text
        case _:
            return constraint_of(format_of(constraint)).text


class ConstraintCheck:
    """The compilation of one constraint as a check, in a thread."""

    def __init__(self, constraint: Constraint) -> None:
        self.verdict: Future[str] = Future()  # the reason to reject the constraint; "" if it is valid
        # The thread's CPU clock, and its time at the start of the check.
        self._clock: tuple[int, float] | None = None
        # A daemon thread, so that interpreter shutdown does not wait for it.
        threading.Thread(target=self._run, args=(constraint,), name="constraint check", daemon=True).start()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the check has used, excluding the import of xgrammar."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock[0]) - self._clock[1]
        except OSError:  # the thread has ended
            return 0.0

    def _run(self, constraint: Constraint) -> None:
        try:
            import xgrammar

            self._clock = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
            problem = problem_of(xgrammar, constraint)
            # Apply the limit also to a check that finished before a caller polled its CPU time.
            self.verdict.set_result(problem if problem or self.cpu_s() <= MAX_CPU_S else _TOO_SLOW)
        except Exception as error:
            # Remove the timestamp and source location with which xgrammar's messages start.
            self.verdict.set_result(_PLACE.sub("", one_line(error)))


class ConstraintChecks:
    """Runs the checks of one engine's constraints, on one event loop. Passed constraints are cached."""

    def __init__(
        self, start: Callable[[Constraint], ConstraintCheck] = ConstraintCheck, patience_s: float = PATIENCE_S
    ) -> None:
        """`patience_s` is the wall time that a call waits for a check, in seconds."""
        self._start = start
        self._patience_s = patience_s
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        # Running checks, and finished checks whose verdict was not read yet.
        self._checks: dict[bytes, ConstraintCheck] = {}

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequest for a constraint that must not reach an engine.

        Raise ServiceUnavailable if its check has not had enough CPU time yet, or cannot start.
        """
        digest = xxhash.xxh3_128_digest(f"{constraint.kind} {constraint.text}".encode("utf-8", "surrogatepass"))
        if digest not in self._passed:
            if reason := await self._try(digest, constraint):
                raise InvalidRequest(f"the constraint cannot be used: {reason[:300]}", param="constraint")
            self._passed[digest] = None
            if len(self._passed) > NUM_REMEMBERED:
                self._passed.popitem(last=False)
        self._passed.move_to_end(digest)

    async def _try(self, digest: bytes, constraint: Constraint) -> str:
        """Return the verdict of the constraint's check. Calls with equal constraints share one check."""
        check = self._checks.get(digest)
        if check is None:
            self._checks = {key: check for key, check in self._checks.items() if not check.verdict.done()}
            if len(self._checks) >= MAX_CHECKS:
                raise ServiceUnavailable(
                    f"{len(self._checks)} other constraints are being compiled, which is the limit: retry later",
                    param="constraint",
                )
            check = self._checks[digest] = self._start(constraint)
        verdict = asyncio.wrap_future(check.verdict)
        give_up_at = time.monotonic() + self._patience_s
        while True:
            done, _ = await asyncio.wait(
                [verdict], timeout=min(_POLL_CPU_S, max(give_up_at - time.monotonic(), 0.0))
            )
            if done:
                self._checks.pop(digest, None)
                return verdict.result()
            if check.cpu_s() > MAX_CPU_S:
                return _TOO_SLOW
            if time.monotonic() >= give_up_at:
                raise ServiceUnavailable(
                    f"this host is too busy to try the constraint: the check got {check.cpu_s():.1f} s of CPU time "
                    f"in {self._patience_s:.0f} s and continues; retry the request",
                    param="constraint",
                )


def problem_of(xgrammar: Any, constraint: Constraint) -> str:
    """Return the reason to reject a constraint; "" if it is valid. Also raises xgrammar's errors."""
    patterns = [constraint.text]
    try:
        tag = structural_tag(constraint)
        value = None if tag is None else json.loads(tag)
    except RecursionError:
        return _TOO_DEEP
    if tag is not None:
        if _is_too_deep(value):
            return _TOO_DEEP
        nodes = list(_objects(value))
        if any(_counts_too_many(node) for node in nodes):
            return (
                f"minProperties and maxProperties are supported with at most {_MAX_COUNTED_PROPERTIES} properties"
            )
        patterns = list({node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)})
        if len(patterns) > _MAX_PATTERNS:
            return f"it has {len(patterns)} patterns: the limit is {_MAX_PATTERNS}"
        for schema in _schemas(value):
            if problem := unenforced(schema):
                return problem
    if any("\0" in str(pattern) for pattern in patterns):
        return "a pattern contains a NUL character"
    compiler = _compiler(xgrammar)
    for pattern in patterns:
        if problem := _walks(xgrammar, compiler.compile_regex(pattern)):
            return problem
    return _walks(xgrammar, compiler.compile_structural_tag(tag)) if tag is not None else ""


def _is_too_deep(value: JSON) -> bool:
    level = [value]
    for _ in range(_MAX_NESTING):
        inner = [child for node in level for child in _children(node)]
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)


def _children(value: JSON) -> list[JSON]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _compiler(xgrammar: Any) -> Any:
    tokens = [bytes([value]) for value in range(_STOP)] + [b"<stop>"]
    vocabulary = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_STOP])
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def _walks(xgrammar: Any, grammar: Any) -> str:
    """Generate random texts of a grammar, half of them ASCII, and time each byte. Return a problem, or ""."""
    mask = xgrammar.allocate_token_bitmask(1, _STOP + 1)
    num_slow = 0
    for seed in range(_NUM_WALKS):
        matcher, choose = xgrammar.GrammarMatcher(grammar), random.Random(seed)
        for step in range(_NUM_STEPS):
            started_at = time.thread_time()
            matcher.fill_next_token_bitmask(mask, 0)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: _STOP + 1]
            allowed = [int(value) for value in bits[:_STOP].nonzero()[0]]
            if not allowed and not bits[_STOP]:
                return (
                    "no text matches it" if step == 0 else "a text that matches so far has no possible continuation"
                )
            if not allowed:
                break
            printable = [value for value in allowed if 32 <= value < 127]
            matcher.accept_token(choose.choice(printable if seed % 2 and printable else allowed))
            num_slow += time.thread_time() - started_at > MAX_TOKEN_S
            # A single slow byte can be the host's fault: an ambiguous grammar becomes slower with every byte.
            if num_slow > 1:
                return "it is too ambiguous: computing the allowed tokens takes too long"
    return ""


def _objects(value: JSON) -> Iterator[dict[str, JSON]]:
    """Iterate over every object in a JSON value, without recursion."""
    open_values = [value]
    while open_values:
        node = open_values.pop()
        if isinstance(node, dict):
            yield node
        open_values += _children(node)


def _schemas(value: JSON) -> Iterator[JSON]:
    """Iterate over the JSON Schemas in a structural tag, for example the arguments of each tool."""
    open_values = [value]
    while open_values:
        node = open_values.pop()
        if isinstance(node, dict) and "json_schema" in node:
            yield node["json_schema"]
        else:
            open_values += _children(node)


def _counts_too_many(node: dict[str, JSON]) -> bool:
    properties = node.get("properties")
    is_counted = "minProperties" in node or "maxProperties" in node
    return is_counted and isinstance(properties, dict) and len(properties) > _MAX_COUNTED_PROPERTIES
