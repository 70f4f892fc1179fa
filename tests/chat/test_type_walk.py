"""Every field of the request types in the openai and anthropic packages is checked against the body models.

A `Table` lists the fields that a client can send: served, ignored on purpose, or refused by name. A field or a kind
of object that a newer package adds is in no list, so the test fails and names it. The lists are also tried on the
models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from typing_extensions import is_typeddict

from agentloop.chat.anthropic_bodies import MessagesBody
from agentloop.chat.fields import read_body
from agentloop.chat.openai_bodies import ChatBody
from agentloop.chat.responses_bodies import ResponsesBody
from agentloop.errors import InvalidRequest, UnsupportedParameter

Path = tuple[tuple[str, bool, dict[str, Any]], ...]
"""The way from a body to an object in it: fields, if each is a list, and the literals of the object that has it."""


@dataclass(frozen=True)
class Table:
    """The fields of one dialect by path. Each line is `path: fields`; the body itself is `.`."""

    served: str
    ignored: str
    refused: str = ""
    refused_kinds: str = ""  # values of `type`
    ignored_kinds: str = ""

    def group_of(self, place: str, name: str) -> str | None:
        return next((group for group in ("served", "ignored", "refused") if name in self.names(group, place)), None)

    def names(self, group: str, place: str) -> list[str]:
        lines = (line.strip().partition(": ") for line in getattr(self, group).strip().splitlines())
        return [name for at, _, names in lines if at == place for name in names.split()]


CHAT = Table(
    served="""
    .: frequency_penalty logit_bias logprobs max_completion_tokens max_tokens messages model n parallel_tool_calls
    .: presence_penalty reasoning_effort response_format seed stop stream stream_options temperature tool_choice
    .: tools top_logprobs top_p
    messages[]: content name refusal role tool_call_id tool_calls
    messages[].content[]: image_url refusal text type
    messages[].content[].image_url: url
    messages[].tool_calls[]: function id type
    messages[].tool_calls[].function: arguments name
    response_format: json_schema type
    response_format.json_schema: schema
    stream_options: include_usage
    tool_choice: allowed_tools function type
    tool_choice.allowed_tools: mode tools
    tool_choice.function: name
    tools[]: function type
    tools[].function: description name parameters
    """,
    ignored="""
    .: metadata moderation prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier
    .: service_tier store user verbosity
    messages[].content[]: prompt_cache_breakpoint
    messages[].content[].image_url: detail
    response_format.json_schema: description name strict
    stream_options: include_obfuscation
    tools[].function: strict
    """,
    refused="""
    .: audio function_call functions modalities prediction web_search_options
    messages[]: audio function_call
    """,
    refused_kinds="""
    messages[]: function
    messages[].content[]: file input_audio
    messages[].tool_calls[]: custom
    tool_choice: custom
    tools[]: custom
    """,
)
RESPONSES = Table(
    served="""
    .: include input instructions max_output_tokens metadata model parallel_tool_calls previous_response_id
    .: reasoning stream stream_options temperature text tool_choice tools top_logprobs top_p user
    input[]: arguments call_id content id name namespace output role summary type
    input[].content[]: image_url refusal text type
    input[].output[]: image_url text type
    input[].summary[]: text type
    reasoning: effort
    text: format
    text.format: schema type
    tool_choice: mode name tools type
    tools[]: description name parameters tools type
    tools[].tools[]: description name parameters type
    """,
    ignored="""
    .: access_programs image max_tool_calls moderation prompt_cache_key prompt_cache_options prompt_cache_retention
    .: safety_identifier service_tier store
    input[]: async caller encrypted_content phase status
    input[].content[]: annotations detail logprobs prompt_cache_breakpoint
    input[].output[]: detail prompt_cache_breakpoint
    reasoning: context generate_summary mode summary
    stream_options: include_obfuscation
    text: verbosity
    text.format: description name strict
    tools[]: allowed_callers async defer_loading output_schema strict
    tools[].tools[]: allowed_callers async defer_loading output_schema strict
    """,
    refused="""
    .: background context_management conversation prompt truncation
    input[].content[]: file_id
    input[].output[]: file_id
    """,
    refused_kinds="""
    input[]: additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction
    input[]: compaction_trigger computer_call computer_call_output configuration_update custom_tool_call
    input[]: custom_tool_call_output file_search_call image_generation_call local_shell_call local_shell_call_output
    input[]: mcp_approval_request mcp_approval_response mcp_call mcp_list_tools program program_output shell_call
    input[]: shell_call_output tool_search_call tool_search_output web_search_call
    input[].content[]: input_file
    input[].output[]: input_file
    tool_choice: apply_patch code_interpreter computer computer_use computer_use_preview custom file_search
    tool_choice: image_generation mcp programmatic_tool_calling shell web_search_preview
    tool_choice: web_search_preview_2025_03_11
    tools[]: apply_patch code_interpreter computer computer_use_preview custom file_search image_generation
    tools[]: local_shell mcp programmatic_tool_calling shell tool_search
    tools[].tools[]: custom
    """,
    ignored_kinds="tools[]: web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11",
)
MESSAGES = Table(
    served="""
    .: context_management max_tokens messages model output_config output_format stop_sequences stream system
    .: thinking tool_choice tools
    context_management: edits
    messages[]: content role
    messages[].content[]: content id input is_error name source text thinking tool_use_id type
    messages[].content[].content[]: source text type
    messages[].content[].content[].source: data media_type type url
    messages[].content[].source: data media_type type url
    output_config: effort format
    output_config.format: schema type
    system[]: text type
    thinking: budget_tokens type
    tool_choice: disable_parallel_tool_use name type
    tools[]: description input_examples input_schema name type
    tools[].input_schema: properties required type
    """,
    ignored="""
    .: betas billing_policy cache_control diagnostics fallback_credit_token fallbacks inference_geo metadata
    .: service_tier speed user_profile_id workspace_id
    messages[].content[]: cache_control caller citations data signature toolset_name transformations
    messages[].content[].content[]: cache_control citations transformations
    system[]: cache_control citations
    thinking: block_binding display
    tools[]: allowed_callers cache_control defer_loading eager_input_streaming strict
    """,
    refused="""
    .: compaction container mcp_servers thread
    messages[]: clear_at output_config
    output_config: task_budget
    """,
    refused_kinds="""
    context_management.edits[]: clear_tool_uses_20250919 compact_20260112
    messages[].content[]: advisor_tool_result bash_code_execution_tool_result code_execution_tool_result compaction
    messages[].content[]: container_upload document fallback mcp_tool_listing mcp_tool_result mcp_tool_use
    messages[].content[]: search_result server_tool_use text_editor_code_execution_tool_result tool_addition
    messages[].content[]: tool_removal tool_search_tool_result web_fetch_tool_result web_search_tool_result
    messages[].content[].content[]: browser_state document search_result tool_reference
    messages[].content[].content[].source: file
    messages[].content[].source: file
    thinking: between_tools
    tools[]: advisor_20260301 bash_20241022 bash_20250124 browser_toolset_20260801 code_execution_20250522
    tools[]: code_execution_20250825 code_execution_20260120 code_execution_20260521 computer_20241022
    tools[]: computer_20250124 computer_20251124 computer_toolset_20260801 mcp_toolset memory_20250818
    tools[]: text_editor_20241022 text_editor_20250124 text_editor_20250429 text_editor_20250728
    tools[]: tool_search_tool_bm25 tool_search_tool_bm25_20251119 tool_search_tool_regex
    tools[]: tool_search_tool_regex_20251119 web_fetch_20250910 web_fetch_20260209 web_fetch_20260309
    tools[]: web_fetch_20260318
    """,
    ignored_kinds="""
    context_management.edits[]: clear_thinking_20251015
    tools[]: web_search_20250305 web_search_20260209 web_search_20260318
    """,
)
NEEDED = {  # fields that identify the kind of an object, in addition to its literals
    "input_image": {"image_url": "data:,"},
    "image": {"source": {"type": "url", "url": "data:,"}},
    "base64": {"media_type": "image/png", "data": "x"},
    "url": {"url": "data:,"},
}


def messages_types() -> list[type]:
    return [
        pytest.importorskip(f"anthropic.types{part}.message_create_params").__dict__[f"MessageCreateParams{way}"]
        for part in ("", ".beta")
        for way in ("Streaming", "NonStreaming")
    ]


DIALECTS: dict[str, tuple[Any, Table, Any]] = {
    "chat completions": (
        ChatBody,
        CHAT,
        lambda: [CompletionCreateParamsStreaming, CompletionCreateParamsNonStreaming],
    ),
    "responses": (
        ResponsesBody,
        RESPONSES,
        lambda: [ResponseCreateParamsStreaming, ResponseCreateParamsNonStreaming],
    ),
    "messages": (MessagesBody, MESSAGES, messages_types),
}


def objects_of(annotation: Any) -> Iterator[Any]:
    """Return the TypedDicts in an annotation."""
    if is_typeddict(annotation):
        yield annotation
    for argument in () if is_typeddict(annotation) else get_args(annotation):
        yield from objects_of(argument)


def is_list(annotation: Any) -> bool:
    name = getattr(get_origin(annotation), "__name__", "")
    return name in ("list", "Iterable", "SequenceNotStr") or any(map(is_list, get_args(annotation)))


def literals(annotation: Any) -> list[str]:
    found = [argument for argument in get_args(annotation) if isinstance(argument, str)]
    return found + [one for argument in get_args(annotation) for one in literals(argument)]


def place_of(path: Path) -> str:
    return ".".join(name + "[]" * listed for name, listed, _ in path) or "."


def refusal(kind: Any, path: Path, leaf: dict[str, Any]) -> InvalidRequest | None:
    """Return the model's error for an object at a path, or None if the model accepts it."""
    value: Any = leaf
    for name, listed, own in reversed(path):
        value = {**own, name: [value] if listed else value}
    try:
        read_body(json.dumps(value).encode(), kind)
    except InvalidRequest as error:
        return error
    return None


@dataclass
class Walk:
    """Walks the types of one dialect and collects the fields that the table does not cover."""

    kind: Any
    table: Table
    problems: list[str] = field(default_factory=list)
    seen: set[tuple[Any, str]] = field(default_factory=set)

    def object(self, described: Any, path: Path) -> None:
        place, hints = place_of(path), get_type_hints(described)
        if (described, place) in self.seen:
            return
        self.seen.add((described, place))
        tag = next((name for name in ("type", "role") if literals(hints.get(name))), None)
        own: dict[str, Any] = {}
        if tag is not None and path:
            kinds = literals(hints[tag])
            if set(kinds) <= set(self.table.names("ignored_kinds", place)):
                return
            own = {tag: kinds[0], **NEEDED.get(kinds[0], {})}
            is_refused = set(kinds) <= set(self.table.names("refused_kinds", place))
            error = refusal(self.kind, path, own)
            if is_refused:
                if error is None:
                    self.problems.append(f"{place} of {tag} {kinds[0]!r} is not refused")
                return
            at = place.replace("[]", ".0")
            if isinstance(error, UnsupportedParameter) and error.param in (at, f"{at}.type"):
                self.problems.append(f"{place} of {tag} {kinds[0]!r} is in no list, and refused")
                return
        for name, annotation in hints.items():
            self.field(name, annotation, path, own)

    def field(self, name: str, annotation: Any, path: Path, own: dict[str, Any]) -> None:
        place = place_of(path)
        group = self.table.group_of(place, name)
        where = f"{place.replace('[]', '.0')}.{name}".removeprefix("..")
        error = refusal(self.kind, path, {**own, name: own.get(name, "x")})
        if group is None:
            self.problems.append(f"{place} {name}: in no list")
        elif group == "refused" and not (isinstance(error, UnsupportedParameter) and name in str(error)):
            self.problems.append(f"{place} {name}: not refused by name, but {error!r}")
        elif group != "refused" and error is not None and f"{where}: this field is unknown" in error.message:
            self.problems.append(f"{place} {name}: unknown to the model")
        if group == "served":
            for described in objects_of(annotation):
                self.object(described, (*path, (name, is_list(annotation), own)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_field_of_the_clients_types_is_served_ignored_or_refused(dialect: str) -> None:
    kind, table, types = DIALECTS[dialect]
    walk = Walk(kind, table)
    for described in types():
        walk.object(described, ())
    assert len(walk.seen) > 10
    assert not walk.problems, "\n".join(walk.problems)


class Hologram(TypedDict):
    type: Literal["hologram"]


class MoodyMessage(TypedDict):
    role: Literal["user"]
    content: list[Hologram]
    mood: str


def test_a_new_field_and_a_new_kind_fail_with_their_names() -> None:
    walk = Walk(ChatBody, CHAT)
    walk.object(MoodyMessage, (("messages", True, {}),))
    assert len(walk.problems) == 2
    assert "hologram" in walk.problems[0]
    assert "mood" in walk.problems[1]
