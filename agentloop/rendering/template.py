"""A Hugging Face chat template: message dicts to text, as transformers renders them.

Ownership: this module knows jinja and the files that describe a template; it knows no tokens. A template is
foreign code, so it runs sandboxed, and whatever it raises is a `TemplateError`. Rendering is a pure function
of its arguments: the date a template may ask for is frozen, or prompts would change at midnight.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentloop.errors import InvalidRequest, TemplateError
from agentloop.rendering.port import NO_KWARGS
from agentloop.types import JSON
from agentloop.values.vocabulary import TEKKEN, TEKKEN_NAMES, read_json, tekken_template

FROZEN_DATE = datetime.date(2025, 1, 1)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
).union(_SPECIAL_TOKENS)


def token_text(value: JSON) -> str | None:
    """Return a token of tokenizer_config.json, written as a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A compiled template, and a folder's template for tools if there is one. Safe to use from several threads.

    It may name `special_tokens`, is given `kwargs` with every rendering, and is told that today is `date`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_source: str | None = None,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
        date: datetime.date = FROZEN_DATE,
    ) -> None:
        """Raises TemplateError if a source does not compile, and InvalidRequest for arguments that are not free."""
        environment = _environment(date)
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self._template = _compiled(environment, source)
        self._tool_template = self._template if tool_source is None else _compiled(environment, tool_source)
        self._environment = environment
        self._special_tokens = dict(special_tokens)
        check_kwargs(kwargs)
        self._kwargs = dict(kwargs)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        file: Path | None = None,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
        date: datetime.date = FROZEN_DATE,
    ) -> ChatTemplate:
        """Read the template of a model folder, or of `file` with the folder's special tokens.

        Raises TemplateError if there is none, or one that does not compile.
        """
        config = read_json(directory / "tokenizer_config.json")
        own = TEKKEN_NAMES if (directory / TEKKEN).is_file() else {}
        named = {**own, **read_json(directory / "special_tokens_map.json"), **config}
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := token_text(named.get(name))) is not None}
        source, tool_source = (_text_of(file), None) if file is not None else _sources(directory, config)
        return cls(source, tokens, tool_source=tool_source, kwargs=kwargs, date=date)

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the further arguments that it reads."""
        names = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(names) - _OWN_KWARGS - {"documents", *self._environment.globals}

    def render(
        self,
        messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, JSON] = NO_KWARGS,
    ) -> str:
        """Return the conversation as text; `kwargs` go before its own. Raises TemplateError with the objection."""
        values: dict[str, JSON] = {"documents": None, **self._special_tokens, **self._kwargs, **kwargs}
        values["messages"], values["add_generation_prompt"] = list(messages), add_generation_prompt
        template = self._tool_template if tools else self._template
        try:
            return _rendered(template, {**values, "tools": list(tools) if tools else None})
        except TemplateError:
            if tools:
                raise
        return _rendered(template, {**values, "tools": []})  # some go through the tools without asking for them


def _rendered(template: jinja2.Template, values: Mapping[str, JSON]) -> str:
    try:
        return template.render(values)
    except Exception as error:  # foreign code: it may raise anything, and all of it means the same
        raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def check_kwargs(kwargs: Mapping[str, JSON]) -> None:
    """Raises InvalidRequest for a template argument that the renderer itself sets."""
    for name in kwargs:
        if name in _OWN_KWARGS:
            raise InvalidRequest(f"the template argument {name} is not free", param="chat_template_kwargs")


def _environment(date: datetime.date) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = datetime.datetime.combine(date, datetime.time()).strftime
    return environment


def _compiled(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template does not compile: {error}") from error


def _sources(directory: Path, config: Mapping[str, JSON]) -> tuple[str, str | None]:
    """Return a folder's template, and the one for conversations with tools if it has two.

    Looks in files, as transformers writes them since 4.50, and in tokenizer_config.json, its earlier form.
    """
    path, tool_path = directory / "chat_template.jinja", directory / "additional_chat_templates" / "tool_use.jinja"
    source = config.get("chat_template")
    if source is None:  # a processor's
        source = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
    named = source if isinstance(source, dict) else {"default": source}
    if path.is_file():
        named = {"default": _text_of(path), **({"tool_use": _text_of(tool_path)} if tool_path.is_file() else {})}
    default, tool_use = named.get("default") or tekken_template(directory), named.get("tool_use")
    if not isinstance(default, str):
        raise TemplateError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return default, tool_use if isinstance(tool_use, str) else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from error


def _tojson(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which changes the text the policy reads.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,  # what `map` gives
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for transformers' training masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
