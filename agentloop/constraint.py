"""What the text of a generation must be, as engines with constrained decoding take it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConstraintKind(StrEnum):
    """What language the `text` of a Constraint is in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON: one JSON value that fits it
    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's structural tag, as JSON: text with marked regions
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a generation must be; the engine masks every token that would leave it."""

    kind: ConstraintKind
    text: str = ""
