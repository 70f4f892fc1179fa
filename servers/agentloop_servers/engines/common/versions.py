"""The versions of vLLM and SGLang that the adapters are tested with: the locked version and a newer one of each.

The adapters depend on worker and scheduler internals, which have no stability guarantee. Another version starts
only if it is newer than the locked version and the engine's configuration has `allow_untested`.
"""

from __future__ import annotations

import importlib
import re

import structlog

from agentloop.errors import EngineError

# Including their patch releases and local builds.
DRIVEN = {"vllm": ("0.32", "0.33"), "sglang": ("0.5.17", "0.5.23")}

_log = structlog.stdlib.get_logger(__name__)


def objection(engine: str, version: str) -> str:
    """Return the reason why an engine's version is not supported; "" if it is supported."""
    release = version.partition("+")[0]
    if any(f"{release}.".startswith(f"{driven}.") for driven in DRIVEN[engine]):
        return ""
    tested = f"the adapter is tested with {' and '.join(DRIVEN[engine])}"
    hint = "; to start it anyway, set `allow_untested: true` in `engine`" if _is_newer(engine, version) else ""
    return tested + hint


def require_driven(engine: str, *, allow_untested: bool) -> None:
    """Import the engine's package. Raises EngineError if its version is not supported.

    With `allow_untested`, a version newer than the tested ones only logs a warning.
    """
    version = str(importlib.import_module(engine).__version__)
    if not (reason := objection(engine, version)):
        return
    if not (allow_untested and _is_newer(engine, version)):
        raise EngineError(f"{engine} {version}: {reason}")
    _log.warning("engine_untested", engine=engine, version=version, tested=DRIVEN[engine])


def _is_newer(engine: str, version: str) -> bool:
    return _numbers(version) > _numbers(DRIVEN[engine][0])


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of the release; () for a build without a version."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number)
