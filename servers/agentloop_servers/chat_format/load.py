"""Loading of the renderer and the parser of a model folder, according to the `chat` settings of a service.

Workers, the endpoint and `agentloop doctor` use this module, so `doctor` reports exactly how a service treats a
folder. Every returned chat format has passed its self-test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import structlog

from agentloop import parts
from agentloop.errors import InvalidRequest, ParserMismatch, TemplateError
from agentloop.generation.round_trip import DERIVED, RoundTripTest, derived_parser, round_trip_test, without_calls
from agentloop.parsers.base import NoCallsParser, Parser, ReasoningDelimiters
from agentloop.parsers.by_name import choose_parser, get_parser
from agentloop.parsers.call_format import FormatParser
from agentloop.plugins import resolve
from agentloop.rendering.port import Renderer
from agentloop.rendering.prompt_text import has_template
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer, TextOnlyRenderer
from agentloop.types import JSON, Message, Thinking
from agentloop_servers.config.service import ChatSettings, located

AUTO = "auto"
_REMOVED_KIND = "vllm"
NO_PARSER = "none"

_log = structlog.stdlib.get_logger("chat_format")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A model's conversion of messages to token ids and back: a renderer, and a parser that passed its
    self-test."""

    renderer: Renderer  # rejects tools if no parser reads the model's calls
    parser: Parser
    name: str  # the parser's name
    reason: str  # why this parser was chosen
    test: RoundTripTest


def load_chat_format(folder: Path, settings: ChatSettings) -> ChatFormat:
    """Build, test and log the chat format of a model folder.

    Raises InvalidRequest for unknown names in the settings, TemplateError for an unusable template, and
    ParserMismatch for a parser that does not parse the renderer's output.
    """
    chosen = load_parser(folder, settings, load_renderer(folder, settings))
    if settings.lenient and isinstance(chosen.parser, FormatParser):
        chosen = replace(chosen, parser=chosen.parser.lenient())
    facts = chosen.renderer.facts
    _log.info(
        "chat_format",
        renderer=settings.renderer,
        parser=chosen.name,
        because=chosen.reason,
        tools=facts.supports_tools,
        reasoning=chosen.test.reasoning,
        stop_tokens=" ".join(facts.stop_tokens),
    )
    if isinstance(chosen.renderer, TextOnlyRenderer):
        _log.warning("chat_off", because=chosen.renderer.objection)
    elif isinstance(chosen.renderer, _WithoutTools):
        _log.warning("tools_off", because=facts.tools_objection)
    for turns, problem in (
        ("tool_turns", facts.tool_turns),
        ("user_turns", facts.user_turns),
        ("plain_turns", facts.plain_turns),
    ):
        if problem is not None:
            _log.warning("paths_fork", at=turns, because=problem)
    return chosen


def load_renderer(folder: Path, settings: ChatSettings) -> Renderer:
    """Build the configured renderer: the built-in one, a registered KIND:FAMILY, or one by import path.

    Raises InvalidRequest and TemplateError.
    """
    render_settings = _render_settings(settings)
    name = settings.renderer
    if name == "template":
        if render_settings.template_file is None and not has_template(folder):
            return TextOnlyRenderer.from_directory(folder, render_settings)
        return TemplateRenderer.from_directory(folder, render_settings)
    kind, _, family = name.partition(":")
    if parts.is_known(parts.RENDERERS, kind):
        return cast(Renderer, parts.load(parts.RENDERERS, kind, param="renderer")(folder, family, render_settings))
    make = resolve(name, param="renderer")
    if not callable(make):
        raise InvalidRequest(
            f"chat.renderer {name} is not callable: expected a function (folder, settings) that returns a renderer",
            param="renderer",
        )
    try:
        renderer: Any = make(folder, render_settings)
        is_renderer = callable(renderer.render) and callable(renderer.bridge) and renderer.facts is not None
    except Exception as error:  # user code can raise any exception
        raise InvalidRequest(
            f"chat.renderer {name} did not return a renderer: {type(error).__name__}: {error}", param="renderer"
        ) from error
    if not is_renderer:
        raise InvalidRequest(
            f"chat.renderer {name} did not return a renderer: see agentloop.rendering.Renderer", param="renderer"
        )
    return cast(Renderer, renderer)


def load_parser(folder: Path, settings: ChatSettings, renderer: Renderer) -> ChatFormat:
    """Choose the parser according to the settings, and test it. Raises InvalidRequest and ParserMismatch.

    With `auto`, a model whose calls no parser reads is served without tools. A model without a chat template has no
    turns to parse.
    """
    if isinstance(renderer, TextOnlyRenderer):
        nothing = NoCallsParser(ReasoningDelimiters())
        return ChatFormat(renderer, nothing, NO_PARSER, renderer.objection, RoundTripTest(False, False))
    if settings.parser == NO_PARSER:
        return _without_tools(renderer, "it is configured")
    if settings.parser != AUTO:
        return _tested(_parser(settings.parser, folder), settings.parser, "it is configured", renderer)
    facts = renderer.facts
    chosen, reason = choose_parser(facts.template_source, facts.literals)
    if chosen is not None:
        try:
            return _tested(get_parser(chosen), chosen, reason, renderer)
        except ParserMismatch as mismatch:
            _log.info("parser_passed_over", parser=chosen, because=mismatch.message)
            reason = mismatch.message
    if not facts.supports_tools or not facts.shows_calls:
        return _without_tools(renderer, reason)
    try:
        name, derived = derived_parser(renderer)
        parser = derived if name == DERIVED else get_parser(name)
        return _tested(parser, name, "it parses the calls that the renderer writes", renderer)
    except ParserMismatch as mismatch:
        reason = mismatch.message
    return _without_tools(renderer, reason)


def _tested(parser: Parser, name: str, reason: str, renderer: Renderer) -> ChatFormat:
    return ChatFormat(renderer, parser, name, reason, round_trip_test(renderer, parser, name))


def _without_tools(renderer: Renderer, reason: str) -> ChatFormat:
    facts = renderer.facts
    if facts.supports_tools:
        objection = f"no parser reads its calls ({reason}); set chat.parser to a parser that does"
        renderer = cast(Renderer, _WithoutTools(renderer, objection))
    parser, test = without_calls(renderer)
    return ChatFormat(renderer, parser, NO_PARSER, reason, test)


class _WithoutTools:
    """A renderer that rejects conversations with tools, because no parser reads the model's calls."""

    def __init__(self, renderer: Renderer, objection: str) -> None:
        self.facts = replace(renderer.facts, tools_objection=objection, tool_turns=None, user_turns=None)
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]], *rest: Any, **options: Any
    ) -> list[int]:
        """See `Renderer.render`."""
        self._refuse(messages, tools)
        return self._renderer.render(messages, tools, *rest, **options)

    def bridge(
        self, appended: Sequence[Message], tools: Sequence[Mapping[str, JSON]], *rest: Any, **options: Any
    ) -> list[int]:
        """See `Renderer.bridge`."""
        self._refuse(appended, tools)
        return self._renderer.bridge(appended, tools, *rest, **options)

    def _refuse(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> None:
        if tools or any(message.role == "tool" or message.tool_calls for message in messages):
            raise TemplateError(
                f"this service serves its model without tools: {self.facts.tools_objection}", param="tools"
            )


def _parser(name: str, folder: Path) -> Parser:
    kind, _, family = name.partition(":")
    if parts.is_known(parts.PARSERS, kind):
        return cast(Parser, parts.load(parts.PARSERS, kind, param="parser")(folder, family))
    if kind == _REMOVED_KIND:
        raise InvalidRequest(
            f"parser {name[:64]!r}: vLLM's parsers are not supported: use 'auto', which derives a parser from the"
            " template if no built-in parser reads it, or an import path such as 'my_package.module:Parser'",
            param="parser",
        )
    return get_parser(name)


def _render_settings(settings: ChatSettings) -> RenderSettings:
    template = settings.template
    file = None if template.file is None else located(template.file)
    render_settings = RenderSettings(
        on_unstable=OnUnstable(settings.on_unstable_template),
        template_file=file,
        kwargs=template.kwargs,
        thinking=Thinking(settings.thinking),
        stop_tokens=tuple(settings.stop_tokens),
    )
    return render_settings if template.date is None else replace(render_settings, date=template.date)
