"""Resolution of `model` in a config to a folder: the only place where other names than folders are accepted.

The commands and `serve deploy` resolve a config before anything else reads it, so all later code sees folders.
Sources of models are registered in the group `models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from agentloop import parts
from agentloop.errors import CheckpointUnreadable, InvalidRequest
from agentloop_servers.config.engines import kv_bytes_per_token
from agentloop_servers.config.service import NamedModel, ServiceConfig, located

Say: TypeAlias = Callable[[str], object]
"""Shows a line of progress."""

DEFAULT_MAX_CONTEXT = 2048  # tokens; published models' own contexts need gigabytes of KV
DEFAULT_NUM_CONTEXTS = 8  # contexts of that length that the KV cache holds


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A source of models in the group `models`."""

    forms: str
    """The accepted forms of `model`, for error messages."""
    folder_of: Callable[[str, Say], Path | None]
    """Return the folder of a model, downloaded on first use; None for a form that this source does not accept."""
    served_name_of: Callable[[str], str]
    """Return the default name of such a model for clients."""


def with_model_folders(config: ServiceConfig, say: Say) -> ServiceConfig:
    """Return the config with the folder of each model. Downloads on first use.

    Raises InvalidRequest for a model that no source has, and for one that cannot be downloaded or converted.
    """
    folder, name = _resolved(config.model, say)
    others = [_with_folder(model, say) for model in config.models]
    endpoint = config.endpoint.model_copy(update={"model_name": config.endpoint.model_name or name})
    return config.model_copy(update={"model": folder, "models": others, "endpoint": endpoint})


def _with_folder(model: NamedModel, say: Say) -> NamedModel:
    return model.model_copy(update={"model": _resolved(model.model, say)[0]})


def _resolved(given: str, say: Say) -> tuple[str, str | None]:
    """Return the folder of a model; and its name for clients, None for the folder's name."""
    if located(given).is_dir():
        return given, None  # a folder without a model is refused when it is read
    sources = [
        cast(ModelSource, parts.load(parts.MODELS, name, param="model")) for name in parts.registered(parts.MODELS)
    ]
    for source in sources:
        if (folder := source.folder_of(given, say)) is not None:
            return str(folder), source.served_name_of(given)
    forms = ["a folder with config.json, safetensors and a tokenizer", *(source.forms for source in sources)]
    problem = f"no model at {given}: expected {'; or '.join(forms)}"
    if not sources:
        try:
            parts.path_of(parts.MODELS, "published", param="model")
        except InvalidRequest as error:  # has the command that installs the missing part
            problem = f"{problem}; for other names: {error.message}"
    raise InvalidRequest(problem, param="model")


def fitted(config: ServiceConfig) -> ServiceConfig:
    """Return the config with one replica whose context and KV cache fit its model.

    For a model that replaces the small model of a shipped config. Raises InvalidRequest for an unreadable
    config.json.
    """
    [entry] = config.entries
    context = min(config.max_context_tokens(entry), DEFAULT_MAX_CONTEXT)
    changed: dict[str, int] = {"max_context_tokens": context}
    # An unknown architecture keeps the config's KV cache: its engine checks the size.
    with suppress(CheckpointUnreadable):
        document = json.loads((config.model_path() / "config.json").read_text())
        token_bytes = kv_bytes_per_token(entry, document)
        kv_cache_mib = -(-DEFAULT_NUM_CONTEXTS * context * token_bytes // 2**20)
        changed["kv_cache_mib"] = max(config.engine.kv_cache_mib or 0, kv_cache_mib)
    return config.model_copy(update={"replicas": 1, "engine": config.engine.model_copy(update=changed)})
