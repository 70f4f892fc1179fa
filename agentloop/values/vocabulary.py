"""A model folder's tokenizer: its tokenizer.json, or a conversion by transformers of the published vocabulary.

`tekken.json` is Mistral's format, with a chat template from mistral-common. `tiktoken.model` is used by Kimi and
others; its pattern is read from the folder's Python code, which is parsed and never executed. A token whose id
differs from the declared id is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import orjson
from tokenizers import AddedToken, Tokenizer

from agentloop.errors import TemplateError
from agentloop.plugins import resolve
from agentloop.types import JSON

TEKKEN = "tekken.json"
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_TEMPLATE_OF = "mistral_common.integrations.chat_templates.chat_templates:convert_tokenizer_to_chat_template"
_TEKKEN_CONVERTER = "transformers.integrations.mistral.tokenizer:MistralConverter"
_TIKTOKEN_CONVERTER = "transformers.convert_slow_tokenizer:TikTokenConverter"


def read_json(path: Path) -> dict[str, JSON]:
    """Return the JSON object in a file; `{}` if the file is missing. Raises TemplateError if it cannot be read."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{path}: not a JSON object")
    return value


def tokenizer_json(folder: Path) -> bytes:
    """Return the tokenizer of a model folder in the format of tokenizer.json. Raises TemplateError."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    for name, convert in _CONVERTERS.items():
        if (folder / name).is_file():
            return cast(Tokenizer, _made(folder / name, convert)).to_str().encode()
    raise TemplateError(
        f"{path} does not exist, and the folder has no {' or '.join(_CONVERTERS)} from which it could be converted"
    )


def tekken_template(folder: Path) -> str | None:
    """Return mistral-common's chat template for a folder's tekken.json; None if the folder has no tekken.json."""
    path = folder / TEKKEN
    return cast(str, _made(path, lambda file: _function(_TEMPLATE_OF)(str(file)))) if path.is_file() else None


def _made(path: Path, make: Callable[[Path], Any]) -> Any:
    try:
        return make(path)
    except Exception as error:  # third-party code, which can raise anything or be missing
        raise TemplateError(f"{path}: {error or type(error).__name__}") from error


def _function(path: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], resolve(path, param="model"))


def _of_tekken(path: Path) -> Tokenizer:
    return cast(Tokenizer, _function(_TEKKEN_CONVERTER)(vocab_file=str(path)).converted())


def _of_tiktoken(path: Path) -> Tokenizer:
    declared = read_json(path.parent / "tokenizer_config.json").get("added_tokens_decoder") or {}
    added = {int(number): token for number, token in declared.items()}
    pattern = _pattern(path.parent)
    options = {} if pattern is None else {"pattern": pattern}
    tokenizer = cast(Tokenizer, _function(_TIKTOKEN_CONVERTER)(vocab_file=str(path), **options).converted())
    for number in range(tokenizer.get_vocab_size(), max(added, default=-1) + 1):
        token = added.get(number, {"content": f"<|reserved_token_{number}|>"})
        special = token.get("special", True)
        tokenizer.add_tokens([AddedToken(token["content"], special=special, normalized=False)])
    for number, token in added.items():
        if tokenizer.token_to_id(token["content"]) != number:
            raise TemplateError(
                f"{path}: the token {token['content']!r} is declared with id {number}, but its id is"
                f" {tokenizer.token_to_id(token['content'])}"
            )
    return tokenizer


def _pattern(folder: Path) -> str | None:
    """Return the pattern that the folder's tokenizer code assigns to `pat_str`; None if there is no assignment."""
    for file in sorted(folder.glob("tokenization*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and "pat_str" in ast.unparse(node.targets[0]).lower():
                joined = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
                try:
                    value = ast.literal_eval(joined)
                except ValueError:
                    continue  # `self.pat_str = pat_str`
                return value if isinstance(value, str) else "|".join(value)
    return None


_CONVERTERS: Mapping[str, Callable[[Path], Tokenizer]] = {TEKKEN: _of_tekken, "tiktoken.model": _of_tiktoken}
