"""The source of models for names that are not folders: published models, hub ids and `.gguf` files."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from agentloop.errors import InvalidRequest, error_line
from agentloop_models.fetch import converted_folder, fetched_folder
from agentloop_models.table import PUBLISHED
from agentloop_servers.config.models import ModelSource, Say
from agentloop_servers.config.service import located

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)
_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "tokenization*.py"]
# Further copies of the weights, in the formats of their authors.
_OTHER_FILES = ["*/*.safetensors", "consolidated*"]


def _folder_of(given: str, say: Say) -> Path | None:
    if given in PUBLISHED:
        return fetched_folder(PUBLISHED[given], say)
    if given.endswith(".gguf"):
        return converted_folder(located(given), say)
    if _HUB_ID.fullmatch(given):
        return hub_folder(given, say)
    return None


def _served_name_of(given: str) -> str:
    return Path(given).stem if given.endswith(".gguf") else given.partition("@")[0]


published_models = ModelSource(
    f"a published model ({', '.join(PUBLISHED)}), a Hugging Face id such as org/name or org/name@revision, or a"
    " .gguf file",
    _folder_of,
    _served_name_of,
)


def hub_folder(given: str, say: Say) -> Path:
    """Return the folder of a hub id, `org/name` or `org/name@revision`, in the cache of huggingface_hub.

    Raises InvalidRequest if the hub cannot be reached, refuses, or has no safetensors of the model.
    """
    name, _, revision = given.partition("@")
    say(f"{given} is not a folder here: looking for it on the Hugging Face hub")
    try:
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES)
        )
    except Exception as error:  # also errors of the HTTP library that huggingface_hub uses
        raise InvalidRequest(
            f"no model {given}: it is not a folder here, and {_reason(error)}", param="model"
        ) from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InvalidRequest(
            f"the hub's repository {name} has no config.json or no safetensors: if it has a .gguf file, download"
            " that and give its path",
            param="model",
        )
    if revision != folder.name:
        say(f"using commit {folder.name}; --model {name}@{folder.name} pins it")
    return folder


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "the hub requires its license to be accepted: accept it on the model's page, and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "the hub has no such revision"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private (set HF_TOKEN)"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached and its cache has no copy: check the network, HF_ENDPOINT, HF_HUB_OFFLINE"
    return f"it cannot be downloaded from the hub: {error_line(error)}"
