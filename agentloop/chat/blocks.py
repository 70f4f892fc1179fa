"""A reply as blocks (reasoning, text, calls), and the base writer of the dialects whose answers consist of blocks.

Invariant: the streamed events of a reply concatenate to the blocks of the same reply without streaming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from agentloop.chat.call import Answer, ChatResult
from agentloop.generation.turn_reader import CallDelta, TurnFinish, TurnPiece, arguments_text, finish_of
from agentloop.types import Message


class BlockKind(StrEnum):
    """The content of a block of a reply."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A part of a reply that clients receive as one item."""

    index: int
    kind: BlockKind
    number: int = 0  # the index among the blocks of the same kind
    text: str = ""  # the arguments if the block is a CALL; empty while the block of a stream is open
    call_id: str = ""
    name: str = ""


def blocks_of(message: Message) -> list[Block]:
    """Return the blocks of a complete reply: reasoning, text, calls. An empty turn has one empty text block."""
    blocks: list[Block] = []
    if message.reasoning:
        blocks.append(Block(0, BlockKind.REASONING, text=message.reasoning))
    if message.content or not (blocks or message.tool_calls):
        blocks.append(Block(len(blocks), BlockKind.TEXT, text=message.content))
    for number, call in enumerate(message.tool_calls):
        blocks.append(Block(len(blocks), BlockKind.CALL, number, arguments_text(call), call.id, call.name))
    return blocks


class BlockWriter(ABC):
    """Writes one answer, as a whole or as stream events.

    One block is open at a time; text after a call begins a new block.
    """

    def __init__(self) -> None:
        self._blocks: list[Block] = []  # blocks of a stream; the last one is open
        self._parts: list[str] = []  # texts of the open block
        self._call_index: int | None = None  # the call index of the open block, if it is a call
        self._is_begun = False

    def whole(self, result: ChatResult) -> Answer:
        """Return the answer of a call without streaming."""
        return self._answer(result, blocks_of(result.choices[0].reply.message))

    def events(self, piece: TurnPiece | ChatResult) -> Iterator[Answer]:
        """Yield the events of a stream's next item; the `ChatResult` is the last item.

        No event precedes the first item, so that an earlier failure can still be answered with an HTTP status.
        """
        if not self._is_begun:
            self._is_begun = True
            yield from self._begun()
        if isinstance(piece, TurnPiece):
            yield from self._added(piece)
            return
        if not self._blocks:
            yield from self._open(BlockKind.TEXT)
        yield from self._close(finish_of(piece.choices[0].reply))
        yield from self._ended(piece, self._blocks)

    @abstractmethod
    def _answer(self, result: ChatResult, blocks: list[Block]) -> Answer:
        """Return the complete answer."""

    @abstractmethod
    def _begun(self) -> Iterator[Answer]:
        """Yield the events before the first block."""

    @abstractmethod
    def _opened(self, block: Block) -> Iterator[Answer]:
        """Yield the events of a new block."""

    @abstractmethod
    def _grown(self, block: Block, text: str) -> Iterator[Answer]:
        """Yield the events of additional text in the open block."""

    @abstractmethod
    def _closed(self, block: Block, finish: TurnFinish | None) -> Iterator[Answer]:
        """Yield the events of a completed block. `finish` is set for the turn's last block."""

    @abstractmethod
    def _ended(self, result: ChatResult, blocks: list[Block]) -> Iterator[Answer]:
        """Yield the events after the last block."""

    def _added(self, piece: TurnPiece) -> Iterator[Answer]:
        for kind, text in ((BlockKind.REASONING, piece.reasoning), (BlockKind.TEXT, piece.content)):
            if text:
                if not self._blocks or self._blocks[-1].kind is not kind:
                    yield from self._open(kind)
                yield from self._add(text)
        for delta in piece.calls:
            if self._call_index != delta.index:
                yield from self._open(BlockKind.CALL, delta)
            if delta.arguments:
                yield from self._add(delta.arguments)

    def _open(self, kind: BlockKind, call: CallDelta | None = None) -> Iterator[Answer]:
        if self._blocks:
            yield from self._close()
        block = Block(len(self._blocks), kind, sum(other.kind is kind for other in self._blocks))
        self._blocks.append(block)
        self._call_index = None
        if call is not None:
            block.call_id, block.name, self._call_index = call.id or "", call.name or "", call.index
        yield from self._opened(block)

    def _add(self, text: str) -> Iterator[Answer]:
        self._parts.append(text)
        yield from self._grown(self._blocks[-1], text)

    def _close(self, finish: TurnFinish | None = None) -> Iterator[Answer]:
        block = self._blocks[-1]
        block.text, self._parts = "".join(self._parts), []
        yield from self._closed(block, finish)
