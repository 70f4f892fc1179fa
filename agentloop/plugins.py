"""Import paths, `package.module:attribute`: how a task or a configuration names a user's loop, reward or tool.

Resolving one runs the module's own code. What may be named is the caller's decision, not this module's.
"""

from __future__ import annotations

import importlib
import re
from functools import reduce

from agentloop.errors import InvalidRequest

_NAME = r"[^\W\d]\w*"
# A module's name is a file's name: importlib takes 02_loop, which the import statement does not.
_PATH = re.compile(rf"\w+(?:\.\w+)*:{_NAME}(?:\.{_NAME})*", re.ASCII)


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
    except (Exception, SystemExit) as error:
        # The module's own code failed, and a module can raise anything; a script even exits.
        raise InvalidRequest(f"cannot import {path!r}: {type(error).__name__}: {error}", param=param) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InvalidRequest(f"module {module_name!r} has no attribute {attribute!r}", param=param) from error
