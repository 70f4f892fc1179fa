"""Constraints in xgrammar's form, and the trial that each passes before an engine gets it.

An engine compiles a constraint beside its steps and walks it within them: one that allows no text, or takes long
for a token, would fail late or hold up every other request. So each is compiled and walked here once, over single
bytes, in a thread. A thread cannot be stopped: where it misses its deadline, the constraint is refused and the
thread left to itself; with `MAX_LATE` of those no further constraint is tried. Those that passed are remembered
by their digests.

Keywords that xgrammar takes and then does not enforce are refused here too: it would only log a warning.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import xxhash

from agentloop.errors import InvalidRequest, Overloaded
from agentloop.parsers.grammar import MAX_JSON_WHITESPACE_CHARS
from agentloop.types import JSON, Constraint, ConstraintKind
from agentloop_servers.engines.common.process import one_line

DEADLINE_S = 5.0
MAX_TOKEN_S = 0.02  # of a thread's own time, for one byte's mask; a real vocabulary takes longer
MAX_LATE = 2
NUM_REMEMBERED = 4096

_MAX_NESTING = 80  # of objects and arrays, a structural tag's own included; deeper ones overflow native stacks
_MAX_COUNTED_PROPERTIES = 64  # with minProperties or maxProperties; compiling them takes quadratic time and more
_MAX_PATTERNS = 64
_NUM_WALKS = 4
_NUM_STEPS = 192
_PLACE = re.compile(r"^(.*: )?\[[0-9:]+\] \S+\.cc:[0-9]+: ")
_STOP = 256  # the id after those of all bytes

_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"}
    | {"uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)


def structural_tag(constraint: Constraint) -> str | None:
    """Return a constraint as xgrammar's structural tag, in JSON; None for a regex."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_tag(constraint.text)
        case ConstraintKind.JSON_OBJECT:
            return _json_tag('{"type": "object"}')
        case ConstraintKind.STRUCTURAL_TAG:
            return constraint.text
        case ConstraintKind.REGEX:
            return None


def _json_tag(schema: str) -> str:
    """Return a structural tag for one JSON value with little whitespace.

    Engines' own forms for JSON put no bound on it: a policy may fill its turn with whitespace.
    """
    return (
        '{"type": "structural_tag", "format": {"type": "json_schema", '
        f'"max_whitespace_cnt": {MAX_JSON_WHITESPACE_CHARS}, "json_schema": {schema}}}}}'
    )


class ConstraintTrials:
    """The trials of constraints for one engine, on one event loop."""

    def __init__(self) -> None:
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._late: set[Future[str]] = set()

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequest for a constraint that an engine must not get, Overloaded if no trial can run."""
        digest = xxhash.xxh3_128_digest(f"{constraint.kind} {constraint.text}".encode("utf-8", "surrogatepass"))
        if digest not in self._passed:
            async with self._one_at_a_time:
                reason = "" if digest in self._passed else await self._try(constraint)
            if reason:
                raise InvalidRequest(f"the constraint cannot be used: {reason[:300]}", param="constraint")
            self._passed[digest] = None
            if len(self._passed) > NUM_REMEMBERED:
                self._passed.popitem(last=False)
        self._passed.move_to_end(digest)

    async def _try(self, constraint: Constraint) -> str:
        self._late = {trial for trial in self._late if not trial.done()}
        if len(self._late) >= MAX_LATE:
            raise Overloaded("earlier constraints are still being tried", param="constraint")
        trial: Future[str] = Future()
        # A daemon: the interpreter's end does not wait for it.
        threading.Thread(target=_run, args=(trial, constraint), name="constraint trial", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(trial)), DEADLINE_S)
        except TimeoutError:
            return f"it takes more than {DEADLINE_S:.0f} s to compile"
        finally:
            if not trial.done():
                self._late.add(trial)


def _run(trial: Future[str], constraint: Constraint) -> None:
    try:
        trial.set_result(problem_of(constraint))
    except Exception as error:
        # xgrammar begins its reason with a time and a place in its source.
        trial.set_result(_PLACE.sub("", one_line(error)))


def problem_of(constraint: Constraint) -> str:
    """Return the reason why a constraint cannot be used; empty if it can. Also raises xgrammar's errors."""
    import xgrammar

    tag, patterns = structural_tag(constraint), [constraint.text]
    if tag is not None:
        nodes = list(_objects(_parsed(tag)))
        if any(_counts_too_many(node) for node in nodes):
            return f"minProperties and maxProperties go with at most {_MAX_COUNTED_PROPERTIES} properties"
        patterns = list({node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)})
        if len(patterns) > _MAX_PATTERNS:
            return f"more than {_MAX_PATTERNS} patterns"
        if constraint.kind is ConstraintKind.JSON_SCHEMA and any(
            _is_not_enforced(node) for node in _objects(json.loads(constraint.text))
        ):
            return "the schema uses keywords, or combinations of them, that cannot be enforced"
    if any("\0" in str(pattern) for pattern in patterns):
        return "a pattern has a NUL character"
    compiler = _compiler(xgrammar)
    for pattern in patterns:
        if problem := _walks(xgrammar, compiler.compile_regex(pattern)):
            return problem
    return _walks(xgrammar, compiler.compile_structural_tag(tag)) if tag is not None else ""


def _parsed(tag: str) -> JSON:
    """Return a tag's JSON value. Raises ValueError for none, and for one that is nested too deeply."""
    try:
        value: JSON = json.loads(tag)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(_MAX_NESTING):
        inner = [child for node in level for child in _children(node)]
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _children(value: JSON) -> list[JSON]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _compiler(xgrammar: Any) -> Any:
    tokens = [bytes([value]) for value in range(_STOP)] + [b"<stop>"]
    vocabulary = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_STOP])
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def _walks(xgrammar: Any, grammar: Any) -> str:
    """Write random texts of a grammar, half of them in ASCII, and time each byte. Returns a problem, or ""."""
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
                return "no text fits it" if step == 0 else "some text that begins as it asks for cannot be ended"
            if not allowed:
                break
            printable = [value for value in allowed if 32 <= value < 127]
            matcher.accept_token(choose.choice(printable if seed % 2 and printable else allowed))
            num_slow += time.thread_time() - started_at > MAX_TOKEN_S
            if num_slow > 1:  # once may be the host: an ambiguous grammar grows slower with every byte
                return "it is too ambiguous: following it takes too long"
    return ""


def _objects(value: JSON) -> Iterator[dict[str, JSON]]:
    """Iterate over every object in a JSON value, without recursion."""
    open_values = [value]
    while open_values:
        found = open_values.pop()
        if isinstance(found, dict):
            yield found
        open_values += _children(found)


def _counts_too_many(node: dict[str, JSON]) -> bool:
    properties = node.get("properties")
    is_counted = "minProperties" in node or "maxProperties" in node
    return is_counted and isinstance(properties, dict) and len(properties) > _MAX_COUNTED_PROPERTIES


def _is_not_enforced(node: dict[str, JSON]) -> bool:
    """True for an object of a JSON Schema with keywords that xgrammar 0.2 ignores, alone or together.

    Its open issues are the source: 937, 958 to 961, 964 to 968, and its own warning for multipleOf.
    """
    types = node.get("type")
    kinds = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    branches = node.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        return True
    if kinds & {"integer", "number"} and "multipleOf" in node:
        return True
    if "array" in kinds and node.keys() & {"uniqueItems", "contains", "minContains", "maxContains"}:
        return True
    if "string" in kinds and (_has_form_and_length(node) or node.get("format", "date") not in _FORMATS):
        return True
    return "object" in kinds and _has_ignored_names(node)


def _has_form_and_length(node: dict[str, JSON]) -> bool:
    return bool(node.keys() & {"pattern", "format"}) and bool(node.keys() & {"minLength", "maxLength"})


def _has_ignored_names(node: dict[str, JSON]) -> bool:
    """True for rules on the names of properties that exclude one another."""
    names, patterns = node.get("propertyNames"), node.get("patternProperties")
    if names is not None and (
        node.keys() & {"patternProperties", "properties"}
        or node.get("unevaluatedProperties", True) is not True
        or (isinstance(names, dict) and _has_form_and_length(names))
    ):
        return True
    return isinstance(patterns, dict) and ("properties" in node or len(patterns) > 1)
