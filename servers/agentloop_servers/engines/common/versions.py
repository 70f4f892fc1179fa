"""The versions of vLLM and SGLang that the adapters drive: those of the locks, and the newest that was tried.

The adapters build on workers and schedulers that promise no stability, so any other version is refused by name.
"""

from __future__ import annotations

import importlib

from agentloop.errors import EngineError

DRIVEN = {"vllm": ("0.32", "0.33"), "sglang": ("0.5.17", "0.5.23")}  # and their patches and local builds


def objection(engine: str, version: str) -> str:
    """Say why an engine's version is not driven; empty if it is."""
    release = version.partition("+")[0]
    if any(f"{release}.".startswith(f"{driven}.") for driven in DRIVEN[engine]):
        return ""
    return f"the adapter drives {' and '.join(DRIVEN[engine])}"


def require_driven(engine: str) -> None:
    """Import the engine's package. Raises EngineError if the adapter does not drive its version."""
    version = str(importlib.import_module(engine).__version__)
    if said := objection(engine, version):
        raise EngineError(f"{engine} {version}; {said}")
