"""The environments of a service's engines, looked at before anything is started.

Ray starts a replica with the Python of its entry, and lets one of another version in: another release of Ray then
fails in its wire formats, and another Python in what was pickled by value. So all Pythons of one service have one
minor version, and the same releases of Ray and agentloop; each has the package of its engine. What Ray makes itself
(pip, conda, an image) is not there before the start, and is not looked at.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass

from agentloop import __version__
from agentloop.errors import InvalidRequest
from agentloop_servers.engine_config import EngineEntry

ENVIRONMENT_TIMEOUT_S = 60.0
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
"""The package that an engine of a kind needs."""

_PROBE = """
import importlib.metadata, importlib.util, json, platform
try:
    from agentloop import __version__ as ours
except ImportError:
    ours = None
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
names = ("ray", "agentloop_servers", "vllm", "sglang")
print(json.dumps({"python": platform.python_version(), "ray": version("ray"), "agentloop": ours,
                  "packages": [name for name in names if importlib.util.find_spec(name) is not None]}))
"""


@dataclass(frozen=True, slots=True)
class PythonVersions:
    """The Python of an environment, and what it has of what a replica needs. None: not installed as a package."""

    python: str
    ray: str | None
    agentloop: str | None
    packages: frozenset[str] = frozenset()  # of ray, agentloop_servers and the engines: those that can be imported

    @property
    def minor(self) -> str:
        """The version as far as it has to be the same."""
        return ".".join(self.python.split(".")[:2])


def own_versions() -> PythonVersions:
    """Return those of this process."""
    return PythonVersions(platform.python_version(), _version("ray"), __version__)


def versions_of(entry: EngineEntry) -> PythonVersions | None:
    """Return those that an entry's replicas would have; None if Ray makes the environment, at the start.

    Runs its Python for a moment, with its variables. Raises InvalidRequest, naming the entry, if that fails.
    """
    environment = entry.environment
    if environment is not None and environment.is_made_by_ray:
        return None
    command, variables = [sys.executable], {**os.environ}
    if environment is not None:
        variables |= environment.env_vars
        if environment.py_executable is not None:
            command = shlex.split(environment.py_executable)  # as Ray's shell does
    try:
        answer = subprocess.run(
            [*command, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=ENVIRONMENT_TIMEOUT_S,
            check=True,
            env=variables,
        )
        found = json.loads(answer.stdout.strip().splitlines()[-1])
        return PythonVersions(found["python"], found["ray"], found["agentloop"], frozenset(found["packages"]))
    except subprocess.CalledProcessError as error:
        reason = ((error.stderr or "").strip().splitlines() or [str(error)])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, IndexError) as error:
        reason = str(error) or type(error).__name__
    raise _refusal(entry, f"its python ({' '.join(command)}) does not run: {reason}")


def check_environment(entry: EngineEntry) -> PythonVersions | None:
    """Return `versions_of` an entry. Raises InvalidRequest, naming it, if its replicas could not work here."""
    found, own = versions_of(entry), own_versions()
    if found is None:
        return None
    if found.minor != own.minor:
        raise _refusal(entry, f"its Python is {found.python}, and the service's {own.python}: they differ")
    for name in ("ray", "agentloop_servers", *filter(None, [PACKAGES.get(entry.kind)])):
        if name not in found.packages:
            raise _refusal(entry, f"its Python cannot import {name}")
    if found.ray != own.ray:
        raise _refusal(entry, f"it has Ray {found.ray}, and the service {own.ray}: one cluster has one release")
    if None not in (found.agentloop, own.agentloop) and found.agentloop != own.agentloop:
        raise _refusal(entry, f"it has agentloop {found.agentloop}, and the service {own.agentloop}")
    return found


def _refusal(entry: EngineEntry, reason: str) -> InvalidRequest:
    return InvalidRequest(f"engine {entry.name}: {reason}", param="engines.environment")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
