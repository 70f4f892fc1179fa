"""A model folder's own `response_template` behind the Parser port, for calls that nothing of ours reads.

transformers reads whole turns with it: it tells nothing before a turn's end, and knows no grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentloop.errors import UnsupportedParameter
from agentloop.parsers.base import DecodedText, Marks, ParsedTurn, ThoughtMarks
from agentloop.plugins import resolve
from agentloop.types import JSON, Constraint
from agentloop_servers.engines.vllm.parsers import turn_of

RESPONSE_TEMPLATE = "response_template"
_READER = "transformers.utils.chat_parsing:parse_response"


class ResponseTemplateParser:
    """Any text may be a call to it, so that a stream waits for the turn's end."""

    def __init__(self, template: JSON, thoughts: ThoughtMarks) -> None:
        """Raises InvalidRequest without transformers."""
        self.marks = Marks(("",), thoughts=thoughts)
        self._template = template
        self._read = cast(
            Callable[..., Any], resolve("transformers.utils.chat_parsing:parse_response", param="parser")
        )

    def parse(self, decoded: DecodedText, tools: Sequence[Mapping[str, JSON]], turn_index: int) -> ParsedTurn:
        """See `Parser.parse`. Text on which transformers fails is content."""
        try:
            found = self._read(decoded.text, self._template, prefix="", tools=list(tools) or None)
            calls = [call["function"] for call in found.get("tool_calls") or ()]
            written = [(str(call["name"]), json.dumps(call["arguments"])) for call in calls]
            return turn_of(decoded, str(found.get("content") or ""), written, turn_index)
        except Exception:  # foreign code on a policy's text
            return ParsedTurn(decoded.text.strip(), ())

    def call_constraint(
        self, tools: Sequence[Mapping[str, JSON]], *, forced: str | None, is_parallel: bool
    ) -> Constraint:
        """Raise UnsupportedParameter: a response template has no grammar."""
        raise UnsupportedParameter("the model's response_template cannot force calls", param="tool_choice")
