"""The parser of a model, by its chat template and its tokenizer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from agentloop.parsers.by_name import PARSER_NAMES


@dataclass(frozen=True, slots=True)
class ChosenParser:
    """The name of a chosen parser, and the reason in one line; no name if none reads the template's calls."""

    name: str | None
    reason: str


# What a template holds if it writes a family's calls, with the parser. Of several that are there the first counts.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("harmony", ("<|channel|>", "<|message|>", "functions")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_list_start|>", "<|im_start|>")),
    ("lfm2", ("List of tools: [", "keep_past_thinking")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ', "tool_calls")),
    ("hermes", ("<tool_call>", '"arguments"')),
    ("hermes", ("<tool_call>", "tool_calls")),
)


def choose_parser(template_source: str, literals: Collection[str]) -> ChosenParser:
    """Choose a parser by a template's text. The reason names `literals`, the tokenizer's added tokens."""
    if "tool" not in template_source:
        return ChosenParser(None, "the chat template shows no tools")
    for name, signs in _SIGNS:
        if all(sign in template_source for sign in signs):
            tokens = [sign for sign in signs if sign in literals]
            known = f", and {', '.join(tokens)} in the tokenizer" if tokens else ""
            return ChosenParser(name, f"the chat template writes {' '.join(signs)}{known}")
    return ChosenParser(None, f"the chat template writes calls as none of {', '.join(PARSER_NAMES)} reads them")
