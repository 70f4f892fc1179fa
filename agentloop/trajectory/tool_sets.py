"""ToolSets: what is remembered of tool definitions, to say what changed: for each tool its name and a digest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from sys import getsizeof

from agentloop.trajectory.diff import MAX_DETAIL_CHARS
from agentloop.trajectory.message_key import tools_key
from agentloop.types import JSON

_MAX_SETS = 8
_MAX_NAMES = 4  # of each kind that are named
_MAX_NAME_CHARS = 24
_ENTRY_BYTES = 180


class ToolSets:
    """The tool sets that requests named last, by their keys. After a restore: none, until they come again."""

    def __init__(self) -> None:
        self._sets: OrderedDict[bytes, dict[str, bytes]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What it takes up."""
        return self._num_bytes

    def note(self, key: bytes, tools: Sequence[Mapping[str, JSON]]) -> None:
        """Remember a set that a request names; the one that was named longest ago goes if there are too many."""
        if key in self._sets:
            self._sets.move_to_end(key)
            return
        self._sets[key] = {_name(tool): tools_key([tool]) for tool in tools}
        self._num_bytes += _bytes_of(self._sets[key])
        if len(self._sets) > _MAX_SETS:
            self._num_bytes -= _bytes_of(self._sets.popitem(last=False)[1])

    def difference(self, there: bytes, came: bytes) -> str:
        """What one set has that the other has not."""
        new = self._sets.get(came, {})
        if there not in self._sets and there:
            return f"tools: other definitions were there, {_listed(new)} came"[:MAX_DETAIL_CHARS]
        old = self._sets.get(there, {})
        changes = (
            ("added", [name for name in new if name not in old]),
            ("removed", [name for name in old if name not in new]),
            ("changed", [name for name in new if name in old and new[name] != old[name]]),
        )
        shown = [f"{_listed(names)} {change}" for change, names in changes if names]
        return f"tools: {', '.join(shown) or 'their order changed'}"[:MAX_DETAIL_CHARS]


def _name(tool: Mapping[str, JSON]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return str(name)[:_MAX_NAME_CHARS]


def _listed(names: Sequence[str] | Mapping[str, bytes]) -> str:
    shown = " ".join(list(names)[:_MAX_NAMES]) or "none"
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


def _bytes_of(tools: Mapping[str, bytes]) -> int:
    return getsizeof(tools) + len(tools) * _ENTRY_BYTES
