"""Finding the tools that a configuration names: shipped ones, import paths, and places that have several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from agentloop.errors import InvalidRequest
from agentloop.plugins import made, resolve
from agentloop.rollout.tool import Tool, ToolSet, ToolSpec


def load_tools(names: Sequence[str], shipped: Mapping[str, str]) -> list[Tool]:
    """Return the tools that a configuration names: keys of `shipped` (name to import path) and import paths.

    Raises InvalidRequest with param "tools".
    """
    for name in names:
        if ":" not in name and name not in shipped:
            known = ", ".join(shipped) or "none"
            text = f"unknown tool {name!r}. Shipped: {known}; or an import path, package.module:attribute"
            raise InvalidRequest(text, param="tools")
    return [tool for name in names for tool in tools_at(shipped.get(name, name))]


def tools_at(path: str) -> list[Tool]:
    """Return the tools at an import path: a Tool, a ToolSet, or a maker of one without arguments.

    Raises InvalidRequest with param "tools".
    """
    found = resolve(path, param="tools")
    refusal = f"{path!r} is neither a tool (see @tool) nor makes one"
    if not _is_tool(found) and callable(found):
        found = made(found, refusal, param="tools")
    if _is_tool(found):
        return [cast(Tool, found)]
    if isinstance(found, type) or not isinstance(found, ToolSet):
        raise InvalidRequest(refusal, param="tools")
    tools = made(found.tools, f"{path!r} has no tools", param="tools")
    if not all(_is_tool(tool) for tool in tools):
        raise InvalidRequest(f"{path!r} has something among its tools that is none", param="tools")
    return list(tools)


def _is_tool(found: object) -> bool:
    has_spec = not isinstance(found, type) and isinstance(getattr(found, "spec", None), ToolSpec)
    return has_spec and all(callable(getattr(found, method, None)) for method in ("open_session", "close"))
