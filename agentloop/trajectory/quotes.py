"""Finds the sampled replies that later prompts of a session quote whole.

White space is normalized. Replies of fewer than MIN_QUOTE_CHARS characters are not searched, because they occur by
chance. A polynomial hash of every window of that length, modulo 2**64, gives the candidate positions in time linear
in the texts. A candidate counts only if the characters are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentloop.trajectory.node import Node

MIN_QUOTE_CHARS = 32

_BASE = 1_000_003  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_BETWEEN = "\0"  # between two messages, so that no quote spans them

_Hashes = npt.NDArray[np.uint64]


class Quote(NamedTuple):
    """The prompt of node `prompt` contains the reply of node `reply`; both are indices in the session's nodes."""

    reply: int
    prompt: int
    num_chars: int


def find_quotes(nodes: Sequence[Node]) -> list[Quote]:
    """Return the quotes in the messages that each turn observed, in the order of the prompts and then the replies.

    Assistant messages are not searched: they echo the history, which the turn graph matches.
    """
    searched = _Replies()
    quotes: list[Quote] = []
    for index, node in enumerate(nodes):
        texts = [_normalized(message.content) for message in node.observed if message.role != "assistant"]
        quotes += [Quote(reply, index, num) for reply, num in searched.quoted_in(_BETWEEN.join(texts))]
        searched.add(index, _normalized(node.reply.content))
    return quotes


class _Replies:
    """The replies so far, by the hashes of their first and last windows."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._by_start: dict[int, list[tuple[int, int]]] = {}  # hash of the first window -> (index, last hash)
        self._starts = np.empty(0, np.uint64)

    def add(self, index: int, text: str) -> None:
        if len(text) < MIN_QUOTE_CHARS:
            return
        first, last = (int(_window_hashes(part)[0]) for part in (text[:MIN_QUOTE_CHARS], text[-MIN_QUOTE_CHARS:]))
        self._texts[index] = text
        self._by_start.setdefault(first, []).append((index, last))

    def quoted_in(self, text: str) -> list[tuple[int, int]]:
        """Return (index, number of characters) of each reply that the text contains, in ascending order."""
        if len(text) < MIN_QUOTE_CHARS or not self._texts:
            return []
        if len(self._starts) != len(self._by_start):
            self._starts = np.array(list(self._by_start), np.uint64)
        hashes = _window_hashes(text)
        positions = np.flatnonzero(np.isin(hashes, self._starts))
        found: list[tuple[int, int]] = []
        for start in set(hashes[positions].tolist()):
            at = positions[hashes[positions] == start]
            for index, last in self._by_start[start]:
                reply = self._texts[index]
                ends = at + (len(reply) - MIN_QUOTE_CHARS)
                # Many replies may begin alike: the hash of the last window leaves few candidates to compare.
                is_candidate = (ends < len(hashes)) & (hashes[np.minimum(ends, len(hashes) - 1)] == np.uint64(last))
                if any(text.startswith(reply, position) for position in at[is_candidate].tolist()):
                    found.append((index, len(reply)))
        return sorted(found)


def _normalized(text: str) -> str:
    return " ".join(text.split())


def _window_hashes(text: str) -> _Hashes:
    """Return the hash of each window of MIN_QUOTE_CHARS characters. Shape (len(text) - MIN_QUOTE_CHARS + 1,)."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    powers, inverses = (_powers(base, len(codes) + 1) for base in (_BASE, _INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers[:-1], dtype=np.uint64)])
    hashes: _Hashes = (sums[MIN_QUOTE_CHARS:] - sums[:-MIN_QUOTE_CHARS]) * inverses[:-MIN_QUOTE_CHARS]
    return hashes


def _powers(base: int, num: int) -> _Hashes:
    factors = np.full(num, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)
