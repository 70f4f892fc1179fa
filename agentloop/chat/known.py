"""KnownMessages: messages of chat bodies that were read before, so that a history is not read anew in every turn.

Clients send the whole conversation with every call. A message is checked, converted and given its canonical key
when it first comes; the next body that has the same JSON gets that again, for a look-up.

Ownership: the memory of one process, for all its sessions. Invariants: a message is known by all of its JSON, so
what is found is what reading it again would make; it is bounded in bytes. Methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import blake2b
from sys import getsizeof
from typing import Any

import orjson

from agentloop.capture.canonical import message_key
from agentloop.capture.sizes import message_bytes
from agentloop.types import Message

MAX_KNOWN_BYTES = 128 << 20

_MAX_NAME_BYTES = 512  # of JSON that is its own name; longer ones go by a digest
_DIGEST_BYTES = 16
_ENTRY_BYTES = 260  # of a known message beside the message itself: this object, its key, and its place in a dict


class KnownMessage:
    """A message as it was read, and its loose canonical key."""

    __slots__ = ("_named", "key", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.key = message_key(message)
        self._named = message

    def with_name(self, name: str | None) -> Message:
        """The message, a tool's answer, with the tool's name: the last one it was asked with is kept."""
        if self._named.name != name:
            known = self.message
            self._named = Message(known.role, known.content, tool_call_id=known.tool_call_id, name=name)
        return self._named


class KnownMessages:
    """Messages by their JSON. What was not asked for since about half of the room was filled anew is forgotten."""

    def __init__(self, max_bytes: int = MAX_KNOWN_BYTES) -> None:
        self._max_bytes = max_bytes
        self._young: dict[bytes, KnownMessage] = {}
        self._old: dict[bytes, KnownMessage] = {}
        self._num_young_bytes = 0
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def name_of(self, value: Any) -> bytes | None:
        """What a JSON value goes by; None for what has no name."""
        try:
            text = orjson.dumps(value)
        except orjson.JSONEncodeError:  # an integer of more than 64 bits
            return None
        return text if len(text) <= _MAX_NAME_BYTES else blake2b(text, digest_size=_DIGEST_BYTES).digest()

    def get(self, name: bytes | None) -> KnownMessage | None:
        """The message of this name, if it is known."""
        if name is None:
            return None
        found = self._young.get(name)
        if found is None and (found := self._old.pop(name, None)) is not None:
            self._keep(name, found)
        return found

    def add(self, name: bytes | None, message: Message) -> KnownMessage:
        """Remember a message that was read; one without a name is merely returned."""
        known = KnownMessage(message)
        if name is not None:
            self._keep(name, known)
        return known

    def _keep(self, name: bytes, known: KnownMessage) -> None:
        name = bytes(memoryview(name))  # what orjson returns has 4 KiB allocated, however short it is
        num_bytes = _ENTRY_BYTES + getsizeof(name) + message_bytes(known.message)
        with self._changing:
            self._young[name] = known
            self._num_young_bytes += num_bytes
            if self._num_young_bytes > self._max_bytes // 2:
                self._young, self._old, self._num_young_bytes = {}, self._young, 0


def conversation(known: Sequence[KnownMessage]) -> tuple[Message, ...]:
    """The messages, each tool result with the name of the tool that it answers, where the history tells."""
    names: dict[str, str] = {}
    found = []
    for one in known:
        message = one.message
        for call in message.tool_calls:
            names[call.id] = call.name
        if message.role == "tool" and message.name is None and message.tool_call_id is not None:
            message = one.with_name(names.get(message.tool_call_id))
        found.append(message)
    return tuple(found)
