"""`bfcl:CATEGORY`: the Berkeley Function Calling Leaderboard, version 4, of the package `bfcl-eval`.

In the multi-turn categories the policy calls methods of Python objects such as a file system or a vehicle. BFCL's
executor evaluates the policy's text as Python, and keeps the objects in module globals that samples of one task
share. This module does not use it: it calls documented methods by name with the parsed JSON arguments, on objects
of one trajectory. At the end it repeats the calls of the policy and the gold calls on new objects and compares them
after each user turn, with BFCL's two comparisons. A trajectory's state is thus its list of calls, by user turn.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson

from agentloop.errors import InvalidRequest, ToolError
from agentloop.rollout import Environment, ScriptedTurn, call
from agentloop.rollout.tool import ToolSpec
from agentloop.score import Score
from agentloop.types import JSON, Limits, Message, RolloutTask, ToolCall
from agentloop_environments.packages import import_package

BFCL_COMMAND = "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"
"""Without its dependencies, which pin numpy and include the SDKs of many vendors."""

MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
NO_CALL = ("irrelevance", "live_irrelevance")
"""The categories in which no tool fits: a policy that makes no call has the full reward."""

ANY_CALL = ("live_relevance",)
SINGLE_TURN = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE = tuple(f"live_{name}" for name in ("simple", "multiple", "parallel", "parallel_multiple"))

MULTI_TURN_LIMITS = Limits(
    max_turns=64,
    max_tool_calls_per_turn=64,
    max_tool_calls=256,
    max_tokens_per_turn=4096,
    max_sampled_tokens=32_768,
    max_tool_response_bytes=65_536,
)
"""Enough for the gold calls of each task. BFCL allows 20 turns of the policy for each turn of the user."""

MAX_PRECISION = 1000
_BOUNDED = frozenset({"precision", "exponent", "decimal_places"})
"""Arguments of MathAPI with which a single call could occupy a worker for hours."""

# Some methods use globals: mpmath's precision, and a dictionary that is returned and changed later.
_one_call = Lock()
_one_import = Lock()

CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
AST_CHECKER = "bfcl_eval.eval_checker.ast_eval.ast_checker"
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}

Calls = list[tuple[str, dict[str, JSON]]]


@dataclass(frozen=True, slots=True)
class BfclEntry:
    """A task of BFCL's data; `gold` has its answers."""

    category: str
    fields: Mapping[str, Any]
    gold: Sequence[Any]

    @property
    def task_id(self) -> str:
        return str(self.fields["id"])

    def user_turn(self, index: int) -> tuple[Message, ...]:
        """Return the messages of a user turn. Functions that become available in it are described in its text."""
        messages = tuple(Message(one["role"], one["content"]) for one in self.fields["question"][index])
        names = self.fields.get("missed_function", {}).get(str(index), ())
        if not names:
            return messages
        prompts = import_package("bfcl_eval.constants.default_prompts", BFCL_COMMAND)
        docs = json.dumps([_spec(doc).definition() for doc in self.docs() if doc["name"] in names])
        text = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=docs)
        return (*messages, Message("user", text))

    def docs(self) -> list[dict[str, Any]]:
        """Return the descriptions of the task's functions."""
        if self.category not in MULTI_TURN:
            return list(self.fields["function"])
        excluded = self.fields.get("excluded_function", ())
        docs = (doc for name in self.fields["involved_classes"] for doc in _api_docs(name))
        return [doc for doc in docs if doc["name"] not in excluded]

    def gold_turns(self) -> list[Calls]:
        """Return the gold calls of a multi-turn task, by user turn."""
        apis = Apis(self)
        return [[apis.parsed(text) for text in texts] for texts in self.gold]

    def gold_calls(self) -> Calls:
        """Return one accepted answer of a single-turn task."""
        required = {doc["name"]: doc["parameters"].get("required", ()) for doc in self.docs()}
        answers = [next(iter(answer.items())) for answer in self.gold]
        return [(_tool_name(name), _first_accepted(values, required.get(name, ()))) for name, values in answers]


class Apis:
    """The API objects of one trajectory or one replay."""

    def __init__(self, entry: BfclEntry) -> None:
        config = import_package("bfcl_eval.constants.executable_backend_config", BFCL_COMMAND)
        self.instances: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        for name in entry.fields["involved_classes"]:
            self.instances[name] = getattr(
                import_package(config.CLASS_FILE_PATH_MAPPING[name], BFCL_COMMAND), name
            )()
            if name not in config.STATELESS_CLASSES:
                scenario = deepcopy(entry.fields["initial_config"].get(name, {}))
                self.instances[name]._load_scenario(scenario, long_context="long_context" in entry.category)
            self._owners |= dict.fromkeys((doc["name"] for doc in _api_docs(name)), name)

    def call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call a documented method and return its result as BFCL writes it. Raises ToolError."""
        owner = self._owners.get(name)
        if owner is None:
            raise ToolError(f"unknown function {name!r}")
        large = [key for key in _BOUNDED & arguments.keys() if not _is_small(arguments[key])]
        if owner == "MathAPI" and large:
            raise ToolError(f"{large[0]} must be a number of at most {MAX_PRECISION}")
        with _one_call:
            try:
                result = getattr(self.instances[owner], name)(**deepcopy(dict(arguments)))
                return result if isinstance(result, str) else _text(result)
            except Exception as error:
                raise ToolError(str(error) or type(error).__name__) from error

    def results(self, calls: Iterable[tuple[str, Mapping[str, JSON]]]) -> list[str]:
        """Call methods and return their results, errors included."""
        results = []
        for name, arguments in calls:
            try:
                results.append(self.call(name, arguments))
            except ToolError as error:
                results.append(f"Error during execution: {error.message}")
        return results

    def parsed(self, text: str) -> tuple[str, dict[str, JSON]]:
        """Parse a call of BFCL's data, whose arguments are literals, into its name and named arguments."""
        node = ast.parse(text, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise InvalidRequest(f"BFCL's gold answer {text!r} is not a call", param="environment")
        named = {one.arg: ast.literal_eval(one.value) for one in node.keywords if one.arg is not None}
        method = getattr(self.instances[self._owners[node.func.id]], node.func.id)
        bound = inspect.signature(method).bind(*map(ast.literal_eval, node.args), **named)
        return node.func.id, dict(bound.arguments)


class Bfcl(Environment):
    """A BFCL task. The reward is 1 or 0."""

    turns: list[Calls]
    apis: Apis | None  # in the multi-turn categories

    @classmethod
    def variants(cls) -> Collection[str]:
        return (*MULTI_TURN, *SINGLE_TURN, *LIVE, *NO_CALL, *ANY_CALL)

    @classmethod
    def tasks(cls) -> Iterable[RolloutTask]:
        for entry in entries_of(cls.variant).values():
            is_multi_turn = entry.category in MULTI_TURN
            yield RolloutTask(
                entry.task_id,
                entry.user_turn(0),
                loop="tool_loop" if is_multi_turn else "single_turn",
                reference={"id": entry.task_id},
                limits=MULTI_TURN_LIMITS if is_multi_turn else Limits(max_turns=1),
            )

    @classmethod
    def task_tools(cls, task: RolloutTask) -> Sequence[ToolSpec]:
        entry = _entry_of(cls, task)
        missed = entry.fields.get("missed_function", {}).values()
        hidden = {name for names in missed for name in names}
        specs = [_spec(doc, is_listed=doc["name"] not in hidden) for doc in entry.docs()]
        return list({spec.name: spec for spec in specs}.values())

    @classmethod
    def gold(cls, task: RolloutTask) -> Sequence[ScriptedTurn] | None:
        entry = _entry_of(cls, task)
        if entry.category in MULTI_TURN:
            turns: list[ScriptedTurn] = []
            for calls in entry.gold_turns():
                made = [call(name, **arguments) for name, arguments in calls]
                turns += [made, "Done."] if made else ["Done."]
            return turns
        if entry.category in NO_CALL:
            return ["None of the functions can help with this."]
        if entry.category in ANY_CALL:
            return [call(cls.task_tools(task)[0].name)]
        return [[call(name, **arguments) for name, arguments in entry.gold_calls()]]

    def open(self, task: RolloutTask) -> None:
        self.entry = _entry_of(type(self), task)
        self.turns = [[]]
        self.apis = Apis(self.entry) if self.entry.category in MULTI_TURN else None

    def call_tool(self, name: str, arguments: Mapping[str, JSON]) -> str:
        if self.apis is None:
            raise ToolError(f"function {name!r} is only described here, not run")
        self.turns[-1].append((name, deepcopy(dict(arguments))))
        return self.apis.call(name, arguments)

    def react(self, messages: Sequence[Message]) -> str | None:
        if len(self.turns) == len(self.entry.fields["question"]) or self.apis is None:
            return None
        self.turns.append([])
        return "\n".join(message.content for message in self.entry.user_turn(len(self.turns) - 1))

    def score(self, task: RolloutTask, messages: Sequence[Message]) -> float | Score:
        if self.entry.category in MULTI_TURN:
            return float(_are_right(self.entry, self.turns))
        calls = next((one.tool_calls for one in reversed(messages) if one.role == "assistant"), ())
        if self.entry.category in NO_CALL:
            return float(not calls)
        if self.entry.category in ANY_CALL:
            return float(bool(calls))
        return float(_is_accepted(self.entry, calls))

    def snapshot(self) -> bytes:
        return orjson.dumps(self.turns)

    def restore(self, state: bytes) -> None:
        self.turns = [[(name, arguments) for name, arguments in turn] for turn in orjson.loads(state)]
        if self.apis is not None:
            self.apis = Apis(self.entry)
            for turn in self.turns:
                self.apis.results(turn)

    def close(self) -> None:
        self.apis, self.turns = None, []


def _are_right(entry: BfclEntry, turns: Sequence[Calls]) -> bool:
    """Return True if the calls reach the gold state and results after each user turn.

    The policy's results of a turn and the turns before it must contain the gold results of the turn, in any order.
    """
    if len(turns) != len(entry.gold):
        return False  # a limit ended the conversation
    checker = import_package(CHECKER, BFCL_COMMAND)
    apis, gold, results = Apis(entry), Apis(entry), list[str]()
    for index, gold_calls in enumerate(entry.gold_turns()):
        results += apis.results(turns[index])
        gold_results = gold.results(gold_calls)
        if not gold_calls:
            continue  # the turn lacks a function or a value: BFCL does not judge the calls in it
        state = checker.state_checker(apis.instances, gold.instances)
        response = checker.response_checker(results, gold_results, index)
        if not (turns[index] and state["valid"] and response["valid"]):
            return False
    return True


def _is_accepted(entry: BfclEntry, calls: Sequence[ToolCall]) -> bool:
    """Return BFCL's verdict on the calls of a single turn."""
    output = [{one.name: dict(one.arguments)} for one in calls]
    python = import_package("bfcl_eval.constants.enums", BFCL_COMMAND).Language.PYTHON
    checker = ast_checker()
    return bool(checker.ast_checker(entry.docs(), output, entry.gold, python, entry.category, "agentloop")["valid"])


def ast_checker() -> ModuleType:
    """Import the single-turn checker without the SDKs of all vendors, which it imports for one table."""
    name = "bfcl_eval.constants.model_config"
    stub = ModuleType(name)
    # Dots in the names of functions become underscores, as in `_tool_name`.
    vars(stub)["MODEL_CONFIG_MAPPING"] = {"agentloop": SimpleNamespace(underscore_to_dot=True)}
    with _one_import:  # samples are judged in threads, and each would replace the module of the others
        if AST_CHECKER in sys.modules:
            return sys.modules[AST_CHECKER]
        replaced = sys.modules.get(name)
        sys.modules[name] = stub
        try:
            return import_package(AST_CHECKER, BFCL_COMMAND)
        finally:
            del sys.modules[name]
            if replaced is not None:
                sys.modules[name] = replaced


def _entry_of(kind: type[Environment], task: RolloutTask) -> BfclEntry:
    entry_id = task.reference.get("id") if isinstance(task.reference, dict) else None
    entry = entries_of(kind.variant).get(entry_id)  # type: ignore[arg-type] # None is in no category
    if entry is None:
        raise InvalidRequest(
            f"bfcl:{kind.variant} has no task {entry_id!r} (reference.id): make the tasks with "
            f"tasks_of('bfcl:{kind.variant}')",
            param="reference",
        )
    return entry


@cache
def entries_of(category: str) -> dict[str, BfclEntry]:
    """Return the tasks of a category by id. BFCL aligns its two files by position."""
    fields = _lines(f"BFCL_v4_{category}.json")
    has_gold = category not in (*NO_CALL, *ANY_CALL)
    gold = _lines(f"possible_answer/BFCL_v4_{category}.json") if has_gold else [{"ground_truth": ()}] * len(fields)
    entries = [BfclEntry(category, one, answer["ground_truth"]) for one, answer in zip(fields, gold, strict=True)]
    return {entry.task_id: entry for entry in entries}


@cache
def _api_docs(name: str) -> list[dict[str, Any]]:
    config = import_package("bfcl_eval.constants.executable_backend_config", BFCL_COMMAND)
    return _lines(f"multi_turn_func_doc/{config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]}")


def _lines(file: str) -> list[dict[str, Any]]:
    folder = Path(import_package("bfcl_eval", BFCL_COMMAND).__path__[0])
    return [json.loads(line) for line in (folder / "data" / file).read_text().splitlines() if line]


def _spec(doc: Mapping[str, Any], *, is_listed: bool = True) -> ToolSpec:
    """Return the tool of a function's description."""
    return ToolSpec(
        _tool_name(doc["name"]), doc["description"], _json_schema(doc["parameters"]), is_listed=is_listed
    )


def _tool_name(name: str) -> str:
    return name.replace(".", "_")


def _json_schema(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema of BFCL's description of a parameter, which has names of Python's types."""
    schema = {**node, "type": _JSON_TYPES.get(node["type"], node["type"])} if "type" in node else dict(node)
    if isinstance(properties := schema.get("properties"), dict):
        schema["properties"] = {name: _json_schema(value) for name, value in properties.items()}
    if isinstance(items := schema.get("items"), dict):
        schema["items"] = _json_schema(items)
    return schema


def _first_accepted(values: Mapping[str, Any], required: Collection[str] = ()) -> dict[str, Any]:
    """Return the first accepted value of each argument. An empty string means that the argument is absent."""
    chosen = {}
    for name, accepted in values.items():
        options = accepted if isinstance(accepted, list) else [accepted]
        if name in required:
            options = sorted(options, key=lambda option: option == "")
        if options and (options[0] != "" or name in required):
            chosen[name] = _nested(options[0])
    return chosen


def _nested(value: Any) -> Any:
    """Return an accepted value; a dictionary in it has a list of accepted values for each key."""
    if isinstance(value, dict):
        return _first_accepted(value)
    return [_nested(one) for one in value] if isinstance(value, list) else value


def _is_small(value: JSON) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_PRECISION


def _text(result: Any) -> str:
    if isinstance(result, dict):
        with suppress(TypeError, ValueError):
            return json.dumps(result)
    return str(result)
