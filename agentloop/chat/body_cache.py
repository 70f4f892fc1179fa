"""A cache of parsed messages and tool definitions.

Clients send the complete conversation and all tools with every call. New messages are validated, converted and
given their canonical key; messages with JSON that was seen before are looked up. All sessions of a process share
one `BodyCache`. Invariants: an entry's key is derived from all of its JSON, so an entry equals the result of
parsing again; memory is bounded. Methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from sys import getsizeof
from typing import Any, Generic, TypeVar

import orjson
from pydantic_core import to_json

from agentloop.chat.call import with_name
from agentloop.images import Image
from agentloop.rendering.port import NAMED_ROLES
from agentloop.trajectory.node import json_chars, message_chars, message_key
from agentloop.trajectory.turn_graph import BYTES_PER_CHAR
from agentloop.types import JSON, Message

T = TypeVar("T")

MAX_CACHED_MESSAGE_BYTES = 128 << 20
MAX_CACHED_TOOLS_BYTES = 32 << 20

_MAX_KEY_BYTES = 512  # JSON up to this size is its own key; longer JSON has a digest as its key
_DIGEST_BYTES = 16
_CACHED_BYTES = 316  # overhead of a cached message: its object, its key and its dict entry
_TOOL_BYTES = 2000  # a validated body, without the values that it shares with the definition


class CachedMessage:
    """A parsed message with its loose canonical key and its images."""

    __slots__ = ("_named", "first_image", "images", "key", "message")

    def __init__(self, message: Message, images: tuple[Image, ...] = (), first_image: int = 0) -> None:
        """`first_image` is the index of the first image among the content parts."""
        self.message = message
        self.images = images
        self.first_image = first_image
        self.key = message_key(message)
        self._named = message

    @property
    def num_bytes(self) -> int:
        num_image_bytes = sum(len(image.data) for image in self.images)
        return _CACHED_BYTES + message_chars(self.message) * BYTES_PER_CHAR + num_image_bytes

    def with_name(self, name: str | None) -> Message:
        """Return this tool result with the tool's name. The last returned message is cached."""
        named = self._named  # read once: another thread may replace it by a message with a different name
        if named.name != name:
            self._named = named = with_name(self.message, name)
        return named


@dataclass(frozen=True, slots=True)
class CachedTools:
    """Parsed tools: the validated bodies, their definitions, and the canonical key of the definitions."""

    bodies: list[Any]
    definitions: tuple[dict[str, JSON], ...]
    key: bytes

    @property
    def num_bytes(self) -> int:
        return _CACHED_BYTES + json_chars(self.definitions) * BYTES_PER_CHAR + len(self.bodies) * _TOOL_BYTES


class TwoGenerationLru(Generic[T]):
    """An approximate LRU cache in two generations, bounded by the size of its entries.

    A lookup moves the entry to the young generation. When the young generation exceeds half of `max_bytes`, it
    becomes the old generation, and the entries of the previous old generation are dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._young: dict[bytes, tuple[T, int]] = {}  # entry and size in bytes
        self._old: dict[bytes, tuple[T, int]] = {}
        self._num_young_bytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, values: Sequence[Any]) -> list[tuple[bytes | None, T | None]]:
        """Return, for each JSON value, its key and its entry or None."""
        return [(key, self.get(key)) for key in map(cache_key, values)]

    def get(self, key: bytes | None) -> T | None:
        """Return the entry with this key, or None."""
        if key is None:
            return None
        entry = self._young.get(key)
        if entry is None and (entry := self._old.get(key)) is not None:
            self.add(key, *entry)
        return None if entry is None else entry[0]

    def add(self, key: bytes | None, entry: T, num_bytes: int) -> None:
        """Add an entry, unless its key is None."""
        if key is None:
            return
        key = bytes(memoryview(key))  # copy: orjson allocates at least 4 KiB for each returned value
        with self._changing:
            self._young[key] = entry, num_bytes
            self._num_young_bytes += num_bytes + getsizeof(key)
            if self._num_young_bytes > self._max_bytes // 2:
                self._young, self._old, self._num_young_bytes = {}, self._young, 0


def cache_key(value: Any) -> bytes | None:
    """Return the key of a JSON value; None if it has an integer of more than 64 bits, which is refused later."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None
    if b"null" in text:  # orjson writes NaN and infinities as null, but they are different (and refused) values
        text = to_json(value, inf_nan_mode="constants")
    return text if len(text) <= _MAX_KEY_BYTES else blake2b(text, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class BodyCache:
    """The caches of a process for messages and tool definitions.

    `shown_names` are the roles whose messages' `name` is shown to the policy; the names of other roles are dropped.
    """

    messages: TwoGenerationLru[CachedMessage] = field(
        default_factory=lambda: TwoGenerationLru(MAX_CACHED_MESSAGE_BYTES)
    )
    tools: TwoGenerationLru[CachedTools] = field(default_factory=lambda: TwoGenerationLru(MAX_CACHED_TOOLS_BYTES))
    shown_names: Collection[str] = NAMED_ROLES
