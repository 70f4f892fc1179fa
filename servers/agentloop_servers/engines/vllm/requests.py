"""The requests of one vLLM engine that are under way, and the gate that holds new ones.

A held request takes its cache salt (the KV version) when it enters, after an update, and so cannot meet older KV.
Code that ends a request for a reason of ours writes the reason to its `verdict` and aborts it in vLLM.

Constraints are tried before vLLM is given them. Its engine process compiles a constraint beside its steps and
walks it within them: one that allows no text, or takes long for a token, would fail late or hold up every other
request. So each is compiled and walked here once, over single bytes, in a thread. A thread cannot be stopped:
where it misses its deadline, the constraint is refused and the thread left to itself; with `MAX_LATE` of those
no further constraint is tried. Those that passed are remembered by their digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from agentloop.engine_lifecycle import EngineLifecycle
from agentloop.errors import AgentLoopError, Conflict, EngineLost, InvalidRequest, Overloaded
from agentloop.types import JSON, Constraint, ConstraintKind, GenerateRequest
from agentloop_servers.engines.vllm.convert import is_unbegun, one_line, structured_outputs
from agentloop_servers.engines.vllm.process import VllmProcess, vllm_call

DEADLINE_S = 5.0
MAX_TOKEN_S = 0.02  # of a thread's own time, for one byte's mask; a real vocabulary takes longer
MAX_LATE = 2
NUM_REMEMBERED = 4096

_MAX_COUNTED_PROPERTIES = 64  # with minProperties or maxProperties; compiling them takes quadratic time and more
_MAX_PATTERNS = 64
_NUM_WALKS = 4
_NUM_STEPS = 192
_PLACE = re.compile(r"^(.*: )?\[[0-9:]+\] \S+\.cc:[0-9]+: ")
_STOP = 256  # the id after those of all bytes


class ConstraintTrials:
    """The trials of one engine. Lives on one event loop."""

    def __init__(self) -> None:
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._late: set[Future[str]] = set()

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest for a constraint that vLLM must not get, Overloaded while none can be tried."""
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
        # vLLM hides xgrammar's reason behind its own, and xgrammar begins it with a time and a place in its source.
        trial.set_result(_PLACE.sub("", one_line(error.__cause__ or error)))


def problem_of(constraint: Constraint) -> str:
    """Say why a constraint cannot be used; empty if it can. Also raises what xgrammar and vLLM raise."""
    import xgrammar
    from vllm.sampling_params import SamplingParams, check_json_nesting
    from vllm.v1.structured_output.backend_xgrammar import (
        has_xgrammar_unsupported_json_features,
        validate_xgrammar_grammar,
    )

    params = structured_outputs(constraint)
    check_json_nesting(params.structural_tag, structural_tag=True)
    patterns = []
    if params.structural_tag is not None:
        nodes = list(_objects(json.loads(params.structural_tag)))
        if any(_counts_too_many(node) for node in nodes):
            return f"minProperties and maxProperties go with at most {_MAX_COUNTED_PROPERTIES} properties"
        patterns = list({node["pattern"] for node in nodes if isinstance(node.get("pattern"), str)})
        if len(patterns) > _MAX_PATTERNS:
            return f"more than {_MAX_PATTERNS} patterns"
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        schema = json.loads(constraint.text)
        if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
            return "the schema uses keywords, or combinations of them, that cannot be enforced"
    validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
    compiler = _compiler(xgrammar)
    for pattern in [params.regex] if params.regex is not None else patterns:
        if problem := _walks(xgrammar, compiler.compile_regex(pattern)):
            return problem
    if params.structural_tag is not None:
        return _walks(xgrammar, compiler.compile_structural_tag(params.structural_tag))
    return ""


def _compiler(xgrammar: Any) -> Any:
    tokens = [bytes([value]) for value in range(_STOP)] + [b"<stop>"]
    vocabulary = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_STOP])
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def _walks(xgrammar: Any, grammar: Any) -> str:
    """Write random texts of a grammar, half of them in ASCII, and look at the time each byte takes."""
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
            open_values += found.values()
        elif isinstance(found, list):
            open_values += found


def _counts_too_many(node: dict[str, JSON]) -> bool:
    properties = node.get("properties")
    is_counted = "minProperties" in node or "maxProperties" in node
    return is_counted and isinstance(properties, dict) and len(properties) > _MAX_COUNTED_PROPERTIES


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` or `stream` under way."""

    request: GenerateRequest
    is_admitted: bool = False  # vLLM knows it
    is_aborted: bool = False
    is_recalled: bool = False  # aborted in vLLM, to pass the gate once more
    verdict: AgentLoopError | None = None  # raised instead of an answer
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set to look at the gate again


class Calls:
    """All calls of one engine. Its lifecycle opens and shuts the gate, and hears of every call that has ended."""

    def __init__(self, process: VllmProcess, lifecycle: EngineLifecycle) -> None:
        self._process = process
        self._lifecycle = lifecycle
        self._by_id: dict[str, Call] = {}
        self._trials = ConstraintTrials()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_admitted(self) -> int:
        return sum(call.is_admitted for call in self._by_id.values())

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the prompts that vLLM does not know yet."""
        return sum(len(call.request.token_ids) for call in self._by_id.values() if not call.is_admitted)

    @contextlib.contextmanager
    def entered(self, request: GenerateRequest) -> Iterator[Call]:
        """Raises Conflict for an id that is under way."""
        if request.request_id in self._by_id:
            raise Conflict(f"request {request.request_id} is already running", param="request_id")
        call = self._by_id[request.request_id] = Call(request)
        try:
            yield call
        finally:
            del self._by_id[request.request_id]
            self._lifecycle.refresh()

    async def pass_gate(self, call: Call) -> bool:
        """Try the call's constraint, and wait until the engine serves. False if the call was aborted meanwhile;
        raises its verdict, or InvalidRequest for the constraint.

        The caller awaits nothing between a True and handing the request on, so an abort cannot miss it.
        """
        constraint = call.request.sampling.constraint
        if constraint is not None:
            await self._trials.check(constraint)
        while not self._lifecycle.is_serving and call.verdict is None and not call.is_aborted:
            call.wake.clear()
            await call.wake.wait()  # bounded by the request's own deadline
        if call.verdict is not None:
            raise call.verdict
        return not call.is_aborted

    def find(self, request_id: str) -> Sequence[Call]:
        call = self._by_id.get(request_id)
        return [call] if call is not None else []

    def all(self) -> Sequence[Call]:
        return list(self._by_id.values())

    def wake_all(self) -> None:
        for call in self._by_id.values():
            call.wake.set()

    async def abort(self, calls: Sequence[Call]) -> None:
        """End these now; each gives out what it has."""
        for call in calls:
            call.is_aborted = True
            call.wake.set()
        await self._abort_in_vllm([call for call in calls if call.is_admitted])

    async def end_all(self, verdict: AgentLoopError) -> None:
        """Make every call raise `verdict`."""
        calls = self.all()
        for call in calls:
            call.verdict = verdict
        with contextlib.suppress(EngineLost):  # then vLLM itself has ended them
            await self.abort(calls)

    async def recall(self, *, has_all: bool) -> None:
        """Take requests that vLLM has admitted but not begun back behind the gate: after a commit they enter with
        its salt, and so meet no KV of older weights. Unless `has_all`, those that may go on with older KV stay."""
        calls = [call for call in self.all() if call.is_admitted and (has_all or call.request.kv_version is None)]
        waiting = [call for call in calls if is_unbegun(self._process.llm, call.request.request_id)]
        for call in waiting:
            call.is_recalled = True
        await self._abort_in_vllm(waiting)

    async def _abort_in_vllm(self, calls: Sequence[Call]) -> None:
        if calls:
            async with vllm_call("abort"):
                await self._process.llm.abort([call.request.request_id for call in calls])
