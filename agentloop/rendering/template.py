"""A Hugging Face chat template: message dicts to text, as transformers renders them.

Ownership: this module knows jinja and the files that describe a template; it knows no tokens. A template is
foreign code, so it runs sandboxed, and whatever it raises is a `TemplateError`. Rendering is a pure function
of its arguments: the date a template may ask for is frozen, or prompts would change at midnight.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentloop.errors import TemplateError
from agentloop.types import JSON

FROZEN_DATE = datetime.datetime(2025, 1, 1)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, JSON]:
    """A JSON object from a file; an absent file is an empty one. Raises TemplateError if it cannot be read."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{path}: not a JSON object")
    return value


def token_text(value: JSON) -> str | None:
    """A token as tokenizer_config.json writes one: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A compiled template and the special tokens it may name. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateError if `source` does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = FROZEN_DATE.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """The template of a model folder. Raises TemplateError if it has none, or one that does not compile."""
        config = read_json(directory / "tokenizer_config.json")
        named = read_json(directory / "special_tokens_map.json") | config
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := token_text(named.get(name))) is not None}
        return cls(_source(directory, config), tokens)

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON] | None, *, add_generation_prompt: bool) -> str:
        """The conversation as text. Raises TemplateError with what the template objected to."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # foreign code: it may raise anything, and all of it means the same
            raise TemplateError(f"the chat template failed: {error or type(error).__name__}") from error


def _source(directory: Path, config: Mapping[str, JSON]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{path}: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates, the form of transformers 4
        source = {str(entry.get("name")): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        raise TemplateError(f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json")
    return source


def _tojson(
    value: JSON,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which changes the text the policy reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for transformers' training masks; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
