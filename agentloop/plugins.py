"""Import paths, `package.module:attribute`, by which tasks and configurations name a user's loop, reward or tool.

Resolving an import path runs the module's code, which can raise anything. The caller decides which import paths are
allowed.
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
"""Our name on the package index, where `agentloop` belongs to another author."""

_FAILURES = (Exception, SystemExit, BaseExceptionGroup)
"""Exceptions of user code while it is loaded.

KeyboardInterrupt is not one, because the user may have pressed Ctrl-C.
"""

_NAME = r"[^\W\d]\w*"
# importlib accepts module names such as 02_loop, which the import statement does not.
_PATH = re.compile(rf"\w+(?:\.\w+)*:{_NAME}(?:\.{_NAME})*", re.ASCII)


def install_hint(extra: str) -> str:
    """Return the command that installs one of our extras."""
    # The distribution is not on the package index yet.
    return f"in a checkout of agentloop: pip install -e '.[{extra}]'"


def resolve_extra(path: str, extra: str) -> object:
    """Resolve an import path of a module that needs one of our extras.

    InvalidRequest names the command to install it.
    """
    try:
        return resolve(path, param=extra)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}: {install_hint(extra)}", param=extra) from error


def resolve(path: str, *, param: str) -> object:
    """Return the object at an import path. Dots after the colon select nested attributes.

    Raises InvalidRequest with `param` for invalid syntax, a module that is missing or fails to import, and a
    missing attribute.
    """
    if _PATH.fullmatch(path) is None:
        raise InvalidRequest(
            f"{path!r} is not an import path: expected the form package.module:attribute", param=param
        )
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"cannot import {path!r}: no module named {error.name!r}", param=param) from error
    except _FAILURES as error:  # the module's own code failed or, in a script, called exit
        raise InvalidRequest(f"cannot import {path!r}: {error_line(error)}", param=param) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InvalidRequest(f"module {module_name!r} has no attribute {attribute!r}", param=param) from error
    except _FAILURES as error:  # a module may have a __getattr__ function
        raise InvalidRequest(f"cannot import {path!r}: {error_line(error)}", param=param) from error


@dataclass(frozen=True, slots=True)
class AllowedImports:
    """The import paths that tasks may use: those of `modules` and their submodules. None allows all.

    With a list, the attribute must be a single name, because dots could reach other modules through imported ones.
    All names of an allowed module are allowed, including imported ones.
    """

    modules: tuple[str, ...] | None = None

    def check(self, name: str, *, param: str) -> None:
        """Raise Forbidden for an import path that is not allowed. Names without a colon are not import paths."""
        if self.modules is None or ":" not in name:
            return
        module, _, attribute = name.partition(":")
        is_listed = any(module == listed or module.startswith(f"{listed}.") for listed in self.modules)
        if not is_listed or "." in attribute:
            allowed = ", ".join(f"{listed}:NAME" for listed in self.modules) or "none"
            raise Forbidden(
                f"{name!r} may not be imported here. Allowed by workers.allowed_imports: {allowed}", param=param
            )


def made(maker: Callable[[], T], refusal: str, *, param: str) -> T:
    """Call a user's class or function. If it fails, raises InvalidRequest with `refusal` and the error."""
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
    """A cache of users' objects by name or import path, each loaded once.

    Objects are loaded in a thread, because a module's code may be slow or hang, unless loading runs no user code. A
    failure is cached for FAILURE_MEMORY_S. At most MAX_LOADED objects are kept; the oldest is dropped first.
    """

    def __init__(
        self,
        load: Callable[[str], T],
        *,
        param: str,
        timeout_s: float = LOAD_TIMEOUT_S,
        shipped: Collection[str] = (),
    ) -> None:
        """`load` loads a registered name or an import path. `shipped` are the built-in names."""
        self._load = load
        self._shipped = shipped
        self._param = param
        self._timeout_s = timeout_s
        self._tasks = OwnedTasks(f"load {param}")
        self._loading: dict[str, asyncio.Task[T | _Failure]] = {}

    async def get(self, name: str) -> T:
        """Return the object with this name. Raises InvalidRequest for any failure of its code."""
        if name in self._shipped or _runs_no_code(name):
            return self._load(name)
        task = self._loading.get(name)
        if task is None or _is_forgotten(task):
            task = self._loading[name] = self._tasks.start(self._loaded(name))
            if len(self._loading) > MAX_LOADED:
                del self._loading[next(iter(self._loading))]
        loaded = await asyncio.shield(task)
        if isinstance(loaded, _Failure):
            raise InvalidRequest(loaded.message, param=self._param)
        return loaded

    async def _loaded(self, name: str) -> T | _Failure:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                loaded: T = await in_daemon_thread(self._load, name)
                return loaded
        except Exception as error:
            if deadline.expired():
                message = f"cannot import {name!r}: the import did not finish within {self._timeout_s:g} s"
            else:
                message = (
                    str(error)
                    if isinstance(error, InvalidRequest)
                    else f"cannot import {name!r}: {error_line(error)}"
                )
        return _Failure(message, asyncio.get_running_loop().time() + FAILURE_MEMORY_S)


def _is_forgotten(task: asyncio.Task[T | _Failure]) -> bool:
    result = task.result() if task.done() else None
    return isinstance(result, _Failure) and result.is_forgotten_at <= asyncio.get_running_loop().time()


def _runs_no_code(path: str) -> bool:
    """Return True if loading runs no user code: the module is imported, and a class has no constructor."""
    module_name, _, attribute = path.partition(":")
    target = vars(sys.modules[module_name]).get(attribute) if module_name in sys.modules else None
    if isinstance(target, type):
        makers = [getattr(target, name) is getattr(object, name) for name in ("__init__", "__new__")]
        return type(target) is type and all(makers)
    return target is not None
