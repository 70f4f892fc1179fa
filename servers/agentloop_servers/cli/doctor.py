"""`agentloop doctor`: what this machine has of what the service needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pydantic_monty

MIN_FREE_MEMORY_GIB = 4.0  # two CPU replicas of the shipped policy with their engines' Python processes
MIN_FREE_DISK_GIB = 1.0
_PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `is_needed` findings that are not ok make the service fail."""

    name: str
    is_ok: bool
    detail: str
    is_needed: bool = True


def examine() -> list[Check]:
    """Every check, in the order a reader wants them. Takes a second or two; starts nothing."""
    engines = [_package(name, is_needed=False) for name in ("vllm", "sglang")]
    return [
        _python(),
        _package("ray"),
        _package("torch", is_needed=False),
        *engines,
        Check("an engine", any(engine.is_ok for engine in engines), "vllm or sglang; simulated runs need none"),
        Check("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}"),
        _probed("gpu", _gpu, is_needed=False),
        _probed("memory", _memory),
        _probed("disk", _disk),
        _probed("sandbox", _sandbox),
        _probed("a free port", _port),
    ]


def _python() -> Check:
    version = platform.python_version()
    return Check("python", (3, 11) <= sys.version_info[:2] < (3, 14), version)


def _package(name: str, *, is_needed: bool = True) -> Check:
    """Look for a package without importing it: an engine takes long, and may claim a GPU."""
    if importlib.util.find_spec(name) is None:
        return Check(name, False, "not installed", is_needed)
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    versions = [f"{found} {importlib.metadata.version(found)}" for found in sorted(set(distributions))]
    return Check(name, True, ", ".join(versions), is_needed)


def _probed(name: str, probe: Callable[[], tuple[bool, str]], *, is_needed: bool = True) -> Check:
    try:
        is_ok, detail = probe()
    except Exception as error:  # a probe that breaks is a finding, whatever broke
        is_ok, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, is_ok, detail, is_needed)


def _gpu() -> tuple[bool, str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False, "none found; the CPU lane needs none"
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    return answer.returncode == 0, "; ".join((answer.stdout or answer.stderr).strip().splitlines())


def _memory() -> tuple[bool, str]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free_gib = int(lines["MemAvailable"].split()[0]) / 2**20
    return free_gib >= MIN_FREE_MEMORY_GIB, f"{free_gib:.1f} GiB free, {MIN_FREE_MEMORY_GIB:.0f} wanted"


def _disk() -> tuple[bool, str]:
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return free_gib >= MIN_FREE_DISK_GIB, f"{free_gib:.1f} GiB free here"


def _sandbox() -> tuple[bool, str]:
    version = importlib.metadata.version("pydantic-monty")
    with (
        pydantic_monty.Monty(max_processes=1, request_timeout=_PROBE_TIMEOUT_S) as pool,
        pool.checkout() as session,
    ):
        answer = session.feed_run("6 * 7")
    return answer == 42, f"pydantic-monty {version} computes 6 * 7 = {answer}"


def _port() -> tuple[bool, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return True, f"127.0.0.1:{probe.getsockname()[1]}"
