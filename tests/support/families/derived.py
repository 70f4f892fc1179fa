"""Parsers that are derived from the templates of model families."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from agentloop.generation.round_trip import derived_parser
from agentloop.parsers.call_format import FormatParser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from tests.support.families import table

NAMES = tuple(family.name for family in table.DERIVED)


@functools.cache
def derived_chat(name: str) -> tuple[TemplateRenderer, FormatParser]:
    """Return the renderer of a family, and the parser derived from its output."""
    row = next(row for row in table.DERIVED if row.name == name)
    with tempfile.TemporaryDirectory() as folder:
        model = table.write_model(Path(folder), row, row.template)
        renderer = TemplateRenderer.from_directory(model, RenderSettings(on_unstable=OnUnstable.FORK))
    return renderer, derived_parser(renderer)[1]
