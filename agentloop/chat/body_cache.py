"""What chat bodies repeat: messages and tool definitions that were read before are not read anew in every turn.

Clients send the whole conversation and all tools with every call. What comes for the first time is checked,
converted and given its canonical key; the next body that has the same JSON gets that again, for a look-up.

Ownership: one `Known` for all sessions of a process. Invariants: a thing is known by all of its JSON, so what is
found is what reading it again would make; it takes bounded memory. Methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof
from typing import Any, Generic, TypeVar

import orjson
from pydantic_core import to_json

from agentloop.chat.common import with_name
from agentloop.trajectory import json_bytes, message_bytes, message_key
from agentloop.types import JSON, Message

T = TypeVar("T")

MAX_MESSAGE_BYTES = 128 << 20
MAX_TOOLS_BYTES = 32 << 20

_MAX_NAME_BYTES = 512  # of JSON that is its own name; longer ones go by a digest
_DIGEST_BYTES = 16
_ENTRY_BYTES = 316  # of a known message beside the message itself: its object, its key, and its place in a dict

_TOOL_BYTES = 2000  # of a checked body beside the definition, whose values it shares


class KnownMessage:
    """A message as it was read, and its loose canonical key."""

    __slots__ = ("_named", "key", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.key = message_key(message)
        self._named = message

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + message_bytes(self.message)

    def with_name(self, name: str | None) -> Message:
        """The message, a tool's answer, with the tool's name: the last one it was asked with is kept."""
        named = self._named  # once: another thread may ask with another name
        if named.name != name:
            self._named = named = with_name(self.message, name)
        return named


@dataclass(frozen=True, slots=True)
class KnownTools:
    """Tools as they were read: the checked bodies, the definitions made of them, and the canonical key of those."""

    bodies: list[Any]
    definitions: tuple[dict[str, JSON], ...]
    key: bytes

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + json_bytes(self.definitions) + len(self.bodies) * _TOOL_BYTES


class ByJson(Generic[T]):
    """Things by their JSON. What was not asked for while half of the room was filled anew is forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._young: dict[bytes, tuple[T, int]] = {}  # with the size of each
        self._old: dict[bytes, tuple[T, int]] = {}
        self._num_young_bytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, values: Sequence[Any]) -> list[tuple[bytes | None, T | None]]:
        """What each of some JSON values goes by, and what is known by that."""
        found: list[tuple[bytes | None, T | None]] = []
        for value in values:
            name = name_of(value)
            entry = None if name is None else self._young.get(name)
            found.append((name, self.get(name) if entry is None else entry[0]))
        return found

    def get(self, name: bytes | None) -> T | None:
        """What goes by this name, if it is known."""
        if name is None:
            return None
        found = self._young.get(name)
        if found is None and (found := self._old.get(name)) is not None:
            self.add(name, *found)
        return None if found is None else found[0]

    def add(self, name: bytes | None, thing: T, num_bytes: int) -> None:
        """Remember what was read; what has no name is not remembered."""
        if name is None:
            return
        name = bytes(memoryview(name))  # what orjson returns has 4 KiB allocated, however short it is
        with self._changing:
            self._young[name] = thing, num_bytes
            self._num_young_bytes += num_bytes + getsizeof(name)
            if self._num_young_bytes > self._max_bytes // 2:
                self._young, self._old, self._num_young_bytes = {}, self._young, 0


def name_of(value: Any) -> bytes | None:
    """What a JSON value is known by; None for one that is refused anyway: an integer of more than 64 bits."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None
    if b"null" in text:  # which orjson also writes for NaN and infinities: they are another value, and refused
        text = to_json(value, inf_nan_mode="constants")
    return text if len(text) <= _MAX_NAME_BYTES else blake2b(text, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Known:
    """What a process knows of chat bodies."""

    messages: ByJson[KnownMessage] = field(default_factory=lambda: ByJson(MAX_MESSAGE_BYTES))
    tools: ByJson[KnownTools] = field(default_factory=lambda: ByJson(MAX_TOOLS_BYTES))
