"""A cache of read chat bodies: messages and tool definitions of an earlier turn are not read anew.

Clients send the whole conversation and all tools with every call. What comes for the first time is checked,
converted and given its canonical key; the next body that has the same JSON gets that again, for a look-up.

Ownership: one `BodyCache` for all sessions of a process. Invariants: the key of an entry is all of its JSON, so the
entry is what reading it again would make; it takes bounded memory. Methods may be called from any thread.
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

_MAX_KEY_BYTES = 512  # of JSON that is its own key; of longer JSON it is a digest
_DIGEST_BYTES = 16
_CACHED_BYTES = 316  # of a cached message beside the message itself: its object, its key, and its place in a dict
_TOOL_BYTES = 2000  # of a checked body beside the definition, whose values it shares


class CachedMessage:
    """A message as it was read, with its loose canonical key and its images."""

    __slots__ = ("_named", "first_image", "images", "key", "message")

    def __init__(self, message: Message, images: tuple[Image, ...] = (), first_image: int = 0) -> None:
        """`first_image` is the place of the first image among the parts of the content."""
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
        """Return this tool's answer with the tool's name. The last result is kept."""
        named = self._named  # once: another thread may ask with another name
        if named.name != name:
            self._named = named = with_name(self.message, name)
        return named


@dataclass(frozen=True, slots=True)
class CachedTools:
    """Tools as they were read: the checked bodies, the definitions made of them, and the canonical key of those."""

    bodies: list[Any]
    definitions: tuple[dict[str, JSON], ...]
    key: bytes

    @property
    def num_bytes(self) -> int:
        return _CACHED_BYTES + json_chars(self.definitions) * BYTES_PER_CHAR + len(self.bodies) * _TOOL_BYTES


class TwoGenerationLru(Generic[T]):
    """A least-recently-used cache in two generations, bounded by the size of what it holds.

    A look-up moves its entry to the young generation. When that has half of the room, it becomes the old one, and
    what was not asked for since is dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._young: dict[bytes, tuple[T, int]] = {}  # with the size of each
        self._old: dict[bytes, tuple[T, int]] = {}
        self._num_young_bytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, values: Sequence[Any]) -> list[tuple[bytes | None, T | None]]:
        """Return the key of each of some JSON values, with its entry or None."""
        return [(key, self.get(key)) for key in map(cache_key, values)]

    def get(self, key: bytes | None) -> T | None:
        """Return the entry under this key, or None."""
        if key is None:
            return None
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.add(key, *found)
        return None if found is None else found[0]

    def add(self, key: bytes | None, entry: T, num_bytes: int) -> None:
        """Keep an entry, unless it has no key."""
        if key is None:
            return
        key = bytes(memoryview(key))  # what orjson returns has 4 KiB allocated, however short it is
        with self._changing:
            self._young[key] = entry, num_bytes
            self._num_young_bytes += num_bytes + getsizeof(key)
            if self._num_young_bytes > self._max_bytes // 2:
                self._young, self._old, self._num_young_bytes = {}, self._young, 0


def cache_key(value: Any) -> bytes | None:
    """Return the key of a JSON value; None for an integer of more than 64 bits, which is refused anyway."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return None
    if b"null" in text:  # which orjson also writes for NaN and infinities: they are another value, and refused
        text = to_json(value, inf_nan_mode="constants")
    return text if len(text) <= _MAX_KEY_BYTES else blake2b(text, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class BodyCache:
    """The messages and tool definitions of chat bodies that a process has read.

    `shown_names` are the roles of whose messages the policy is shown the name; other names are not read.
    """

    messages: TwoGenerationLru[CachedMessage] = field(
        default_factory=lambda: TwoGenerationLru(MAX_CACHED_MESSAGE_BYTES)
    )
    tools: TwoGenerationLru[CachedTools] = field(default_factory=lambda: TwoGenerationLru(MAX_CACHED_TOOLS_BYTES))
    shown_names: Collection[str] = NAMED_ROLES
