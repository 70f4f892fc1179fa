"""Imports of the packages that ship the tasks."""

from __future__ import annotations

import importlib
from types import ModuleType

from agentloop.errors import InvalidRequest
from agentloop.plugins import install_hint


def import_package(module: str, command: str = "") -> ModuleType:
    """Import a module. InvalidRequest for a missing one has the `command` that installs it (default: the extra)."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"no module named {error.name!r}: {command or install_hint('environments')}",
            param="environment",
        ) from error
