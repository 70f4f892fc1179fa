"""Import paths, `package.module:attribute`: how a task or a configuration names a user's loop, reward or tool.

Resolving one runs the module's own code, which can raise anything. What may be named is the caller's decision, not
this module's.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import reduce
from typing import Generic, TypeVar

from agentloop.concurrency.aio import OwnedTasks, in_daemon_thread
from agentloop.errors import AgentLoopError, Forbidden, InvalidRequest, error_line

T = TypeVar("T")

MAX_LOADED = 1024
FAILURE_MEMORY_S = 60.0
LOAD_TIMEOUT_S = 60.0

DISTRIBUTION = "agentloop-rollouts"
"""What the package index calls us; it has another author's `agentloop`."""

_FAILURES = (Exception, SystemExit, BaseExceptionGroup)
"""What user code raises as it is loaded. A KeyboardInterrupt may be the user's own; in a thread it is an error."""

_NAME = r"[^\W\d]\w*"
# A module's name is a file's name: importlib takes 02_loop, which the import statement does not.
_PATH = re.compile(rf"\w+(?:\.\w+)*:{_NAME}(?:\.{_NAME})*", re.ASCII)


def install_hint(extra: str) -> str:
    """Return the command that installs one of our extras; the distribution is not on the package index yet."""
    return f"in a checkout of agentloop: pip install -e '.[{extra}]'"


def resolve_extra(path: str, extra: str) -> object:
    """Return what `resolve` does, of a module that needs one of our extras. Raises InvalidRequest that names it."""
    try:
        return resolve(path, param=extra)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}: {install_hint(extra)}", param=extra) from error


def resolve(path: str, *, param: str) -> object:
    """Return the object that `path` names; dots after the colon reach into it.

    Raises InvalidRequest, with `param` as the field at fault, for bad syntax, a module that is missing or fails to
    import, or a missing attribute.
    """
    if _PATH.fullmatch(path) is None:
        raise InvalidRequest(f"{path!r} is not an import path; write package.module:attribute", param=param)
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"cannot import {path!r}: no module named {error.name!r}", param=param) from error
    except _FAILURES as error:  # the module's own code failed; a script even exits
        raise InvalidRequest(f"cannot import {path!r}: {error_line(error)}", param=param) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InvalidRequest(f"module {module_name!r} has no attribute {attribute!r}", param=param) from error
    except _FAILURES as error:  # a module's __getattr__ is its own code too
        raise InvalidRequest(f"cannot import {path!r}: {error_line(error)}", param=param) from error


@dataclass(frozen=True, slots=True)
class AllowedImports:
    """The import paths that a task may name: those in `modules`, or within one of them.

    None allows any. With a list a path ends with one name: dots would reach through a module into those that it
    imports. A module's own names are allowed all, also those that it imported.
    """

    modules: tuple[str, ...] | None = None

    def check(self, name: str, *, param: str) -> None:
        """Raises Forbidden for an import path that is not allowed. A name without a colon is no import path."""
        if self.modules is None or ":" not in name:
            return
        module, _, attribute = name.partition(":")
        is_listed = any(module == one or module.startswith(f"{one}.") for one in self.modules)
        if not is_listed or "." in attribute:
            allowed = ", ".join(f"{one}:NAME" for one in self.modules) or "none"
            raise Forbidden(
                f"{name!r} may not be imported here. Allowed by workers.allowed_imports: {allowed}", param=param
            )


def made(maker: Callable[[], T], refusal: str, *, param: str) -> T:
    """Return the object that a user's class or function makes. Raises InvalidRequest: `refusal`, and why."""
    try:
        return maker()
    except AgentLoopError:
        raise
    except _FAILURES as error:
        raise InvalidRequest(f"{refusal}: {error_line(error)}", param=param) from error


@dataclass(frozen=True, slots=True)
class _Failure:
    """A name that could not be loaded."""

    message: str
    is_forgotten_at: float  # in the event loop's time


class LoadedOnce(Generic[T]):
    """Users' objects by name or import path, each loaded once, in a thread: a module's code may take long, or hang.

    Names are loaded at once where that runs no user code. A failure is kept for a minute, and raised at once to
    later callers. Bounded: the first loaded is dropped first.
    """

    def __init__(
        self,
        load: Callable[[str], T],
        *,
        param: str,
        timeout_s: float = LOAD_TIMEOUT_S,
        shipped: Collection[str] = (),
    ) -> None:
        """`load` takes a registered name or an import path. Those in `shipped` are the service's own."""
        self._load = load
        self._shipped = shipped
        self._param = param
        self._timeout_s = timeout_s
        self._tasks = OwnedTasks(f"load {param}")
        self._loading: dict[str, asyncio.Task[T | _Failure]] = {}

    async def get(self, name: str) -> T:
        """Return the object of a name. Raises InvalidRequest, whatever its code raised."""
        if name in self._shipped or _runs_no_code(name):
            return self._load(name)
        task = self._loading.get(name)
        if task is None or _is_forgotten(task):
            task = self._loading[name] = self._tasks.start(self._loaded(name))
            if len(self._loading) > MAX_LOADED:
                del self._loading[next(iter(self._loading))]
        found = await asyncio.shield(task)
        if isinstance(found, _Failure):
            raise InvalidRequest(found.message, param=self._param)
        return found

    async def _loaded(self, name: str) -> T | _Failure:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                loaded: T = await in_daemon_thread(self._load, name)
                return loaded
        except Exception as error:
            if deadline.expired():
                message = f"cannot import {name!r}: not done within {self._timeout_s:g} s"
            else:
                message = (
                    str(error)
                    if isinstance(error, InvalidRequest)
                    else f"cannot import {name!r}: {error_line(error)}"
                )
        return _Failure(message, asyncio.get_running_loop().time() + FAILURE_MEMORY_S)


def _is_forgotten(task: asyncio.Task[T | _Failure]) -> bool:
    found = task.result() if task.done() else None
    return isinstance(found, _Failure) and found.is_forgotten_at <= asyncio.get_running_loop().time()


def _runs_no_code(path: str) -> bool:
    """Tell if to load this is but to look: a plain object or class of a module that is imported already."""
    module_name, _, attribute = path.partition(":")
    found = vars(sys.modules[module_name]).get(attribute) if module_name in sys.modules else None
    if isinstance(found, type):
        makers = [getattr(found, name) is getattr(object, name) for name in ("__init__", "__new__")]
        return type(found) is type and all(makers)
    return found is not None
