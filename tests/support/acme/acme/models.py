"""A source of models: `shelf:NAME` is a folder of the checkout's examples."""

from __future__ import annotations

from pathlib import Path

from agentloop_servers.config.models import ModelSource, Say
from agentloop_servers.config.service import CHECKOUT


def _folder_of(given: str, say: Say) -> Path | None:
    kind, _, name = given.partition(":")
    if kind != "shelf":
        return None
    say(f"taking {name} from the shelf")
    return CHECKOUT / "examples" / name / "v0"


shelf = ModelSource("shelf:NAME", _folder_of, lambda given: given.partition(":")[2])
