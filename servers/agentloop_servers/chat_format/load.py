"""One way from a model folder and a service's `chat` settings to what writes and reads its conversations.

Workers, the endpoint and `agentloop doctor` all come through here: what the doctor says of a folder is what a
service does with it. Nothing is given out that has not passed its self-test.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import structlog

from agentloop.errors import InvalidRequest, ParserMismatch
from agentloop.generation import SelfTest, parsers_that_fit, self_test
from agentloop.parsers import Parser, choose_parser, get_parser
from agentloop.plugins import install_hint, resolve
from agentloop.rendering import OnUnstable, Renderer, RenderSettings, TemplateRenderer
from agentloop.types import Thinking
from agentloop_servers.config import ChatSettings, located
from agentloop_servers.engines.vllm import VLLM_PARSERS, vllm_parser

AUTO = "auto"
_LIBRARY = "renderers"
_LIBRARY_RENDERER = "agentloop_servers.chat_format.library_renderer:LibraryRenderer"
_LIBRARY_PARSER = "agentloop_servers.chat_format.library_parser:LibraryParser"
_NO_TOOLS = "hermes"  # of a model that is shown no tools: its marks of thoughts are those of most models

_log = structlog.stdlib.get_logger("chat_format")


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """A parser that has passed its self-test, with its name and why it is this one."""

    parser: Parser
    name: str
    reason: str
    test: SelfTest


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's way from messages to ids, and from sampled ids to messages."""

    renderer: Renderer
    parser: Parser


def load_chat_format(folder: Path, settings: ChatSettings) -> ChatFormat:
    """Build and test the chat format of a model folder, and log what it is.

    Raises InvalidRequest for settings that name nothing, TemplateError for a template that cannot be used, and
    ParserMismatch for a parser that does not read what the renderer writes.
    """
    renderer = load_renderer(folder, settings)
    chosen = load_parser(folder, settings, renderer)
    facts = renderer.facts
    _log.info(
        "chat_format",
        renderer=settings.renderer,
        parser=chosen.name,
        because=chosen.reason,
        tools=facts.supports_tools,
        thoughts=chosen.test.thoughts,
        stop_tokens=" ".join(facts.stop_tokens),
    )
    for turns, problem in (
        ("tool_turns", facts.tool_turns),
        ("user_turns", facts.user_turns),
        ("plain_turns", facts.plain_turns),
    ):
        if problem is not None:
            _log.warning("paths_fork", at=turns, because=problem)
    return ChatFormat(renderer, chosen.parser)


def load_renderer(folder: Path, settings: ChatSettings) -> Renderer:
    """Build the renderer that the settings name. Raises InvalidRequest and TemplateError."""
    given = _render_settings(settings)
    name = settings.renderer
    if name == "template":
        return TemplateRenderer.from_directory(folder, given)
    kind, _, family = name.partition(":")
    if kind == _LIBRARY:
        return cast(Renderer, _of_library(_LIBRARY_RENDERER)(folder, family, given))
    make = resolve(name, param="renderer")
    if not callable(make):
        raise InvalidRequest(f"{name} is no function that makes a renderer", param="renderer")
    try:
        renderer: Any = make(folder, given)
        is_renderer = callable(renderer.render) and callable(renderer.bridge) and renderer.facts is not None
    except Exception as error:  # a user's code, which may raise anything
        raise InvalidRequest(
            f"{name} makes no renderer: {type(error).__name__}: {error}", param="renderer"
        ) from error
    if not is_renderer:
        raise InvalidRequest(f"{name} makes no renderer: see agentloop.rendering.Renderer", param="renderer")
    return cast(Renderer, renderer)


def load_parser(folder: Path, settings: ChatSettings, renderer: Renderer) -> ChosenFormat:
    """Choose the parser that the settings name, and test it. Raises InvalidRequest and ParserMismatch."""
    if settings.parser != AUTO:
        return _tested(_parser(settings.parser, folder), settings.parser, "it is configured", renderer)
    facts = renderer.facts
    chosen = choose_parser(facts.template_source, facts.literals)
    if chosen.name is not None or not facts.supports_tools:
        name = chosen.name or _NO_TOOLS
        try:
            return _tested(get_parser(name), name, chosen.reason, renderer)
        except ParserMismatch as mismatch:
            _log.info("parser_passed_over", parser=name, because=mismatch.message)
    name = next(iter(parsers_that_fit(renderer)), _NO_TOOLS)  # which the test refuses, if none fits
    return _tested(get_parser(name), name, "it reads what the renderer writes", renderer)


def _tested(parser: Parser, name: str, reason: str, renderer: Renderer) -> ChosenFormat:
    return ChosenFormat(parser, name, reason, self_test(renderer, parser, name))


def _parser(name: str, folder: Path) -> Parser:
    kind, _, family = name.partition(":")
    if kind == _LIBRARY:
        return cast(Parser, _of_library(_LIBRARY_PARSER)(folder, family))
    if not name.startswith(VLLM_PARSERS):
        return get_parser(name)
    try:
        return vllm_parser(name, folder)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{name} needs the engine's lane: no module {error.name!r}", param="parser") from error


def _of_library(path: str) -> Callable[..., object]:
    """Return a class of an adapter over the `renderers` package. Raises InvalidRequest naming the extra."""
    if importlib.util.find_spec(_LIBRARY) is None:
        raise InvalidRequest(
            f"the package renderers is not installed: {install_hint(_LIBRARY)}; beside a lane of requirements/: "
            "pip install --no-deps renderers prime-pydantic-config",
            param="renderer",
        )
    return cast(Callable[..., object], resolve(path, param="renderer"))


def _render_settings(settings: ChatSettings) -> RenderSettings:
    template = settings.template
    file = None if template.file is None else located(template.file)
    given = RenderSettings(
        on_unstable=OnUnstable(settings.on_unstable_template),
        template_file=file,
        kwargs=template.kwargs,
        thinking=Thinking(settings.thinking),
        stop_tokens=tuple(settings.stop_tokens),
    )
    return given if template.date is None else replace(given, date=template.date)
