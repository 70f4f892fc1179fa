"""The versions of vLLM and SGLang that the adapters are tested with: those of the locks, and one newer of each.

The adapters build on workers and schedulers that promise no stability. Another version starts only if it is newer
than the older of the two and its engine's config has `allow_untested`.
"""

from __future__ import annotations

import importlib
import re

import structlog

from agentloop.errors import EngineError

DRIVEN = {"vllm": ("0.32", "0.33"), "sglang": ("0.5.17", "0.5.23")}  # and their patches and local builds

_log = structlog.stdlib.get_logger(__name__)


def objection(engine: str, version: str) -> str:
    """Return why an engine's version is not supported; empty if it is."""
    release = version.partition("+")[0]
    if any(f"{release}.".startswith(f"{driven}.") for driven in DRIVEN[engine]):
        return ""
    tested = f"the adapter is tested with {' and '.join(DRIVEN[engine])}"
    hint = "; `allow_untested: true` in the engine's config starts it" if _is_newer(engine, version) else ""
    return tested + hint


def require_driven(engine: str, *, allow_untested: bool) -> None:
    """Import the engine's package. Raises EngineError if its version is not supported; a newer one than the tested
    versions is logged instead with `allow_untested`."""
    version = str(importlib.import_module(engine).__version__)
    if not (reason := objection(engine, version)):
        return
    if not (allow_untested and _is_newer(engine, version)):
        raise EngineError(f"{engine} {version}: {reason}")
    _log.warning("engine_untested", engine=engine, version=version, tested=DRIVEN[engine])


def _is_newer(engine: str, version: str) -> bool:
    return _numbers(version) > _numbers(DRIVEN[engine][0])


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's numbers; none for a build that has no version."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number)
