"""Text to token ids and back, with content kept apart from control.

Content is whatever a person, a tool or a policy wrote; it may spell a control token. `mask` hides such spellings
before a template puts content among its own control tokens, and `encode` gives them back as ordinary text: the
result is what the tokenizer would make of the whole text if those spellings were not tokens at all.

Invariant: no text that went through `mask` becomes a control token. Nothing here changes after construction but
a cache of immutable entries, so one object serves many threads.
"""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream

from agentloop.errors import InvalidRequest, TemplateError
from agentloop.parsers.base import DecodedText

_MARKUP = re.compile(r"[<\[|].+[>\]|]")
_MAX_HELD_TOKENS = 64  # a character takes at most four bytes; more held tokens are bytes that never make one


class Tokens:
    """One tokenizer, with its added tokens sorted into control tokens and mere vocabulary (runs of spaces)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._literals = [t.content for t in added.values() if t.special or _MARKUP.fullmatch(t.content)]
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._control_ids = frozenset(i for i, t in added.items() if t.content in set(self._literals))
        self._index_of = {literal: index for index, literal in enumerate(self._literals)}
        # Unguessable digits: no content can hold them, and no template's filter changes them.
        self._nonce = str(10**19 + secrets.randbelow(9 * 10**19))
        placeholder = rf"{self._nonce}(?P<index>\d{{6}})"
        longest_first = sorted(self._literals, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._masked_or_control = re.compile(f"{placeholder}|{self._control.pattern}")
        self._masked = re.compile(placeholder)
        self._text_tokenizer, self._id_of_alias = self._without_literals(added)
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}
        self._byte_of_char = _byte_alphabet() if self._is_byte_level else {}

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, literal: str) -> int | None:
        return self._tokenizer.token_to_id(literal)

    def literal_of(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def mask(self, text: str, *, is_sampled: bool = False) -> str:
        """Text whose spellings of control tokens `encode` will treat as text.

        `is_sampled`: a policy wrote it, so markup that is no special token (`<think>`) is the policy's own token.
        """
        if self._control.search(text) is None:
            return text
        return self._control.sub(
            lambda m: m[0] if is_sampled and m[0] not in self._special else self._placeholder(m[0]), text
        )

    def unmask(self, text: str) -> str:
        """The text as it was before `mask`."""
        return self._masked.sub(lambda match: self._literals[int(match["index"])], text)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, nothing added. Masked spellings become ordinary text.

        Raises InvalidRequest where the model itself, without its added tokens, would produce a control token.
        """
        if self._nonce not in text:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        aliased = self._masked_or_control.sub(
            lambda m: self._literals[int(m["index"])] if m["index"] else self._alias(self._index_of[m[0]]), text
        )
        ids = self._text_tokenizer.encode(aliased, add_special_tokens=False).ids
        if any(token_id in self._control_ids and token_id not in self._id_of_alias for token_id in ids):
            raise InvalidRequest("content spells a control token that has no other spelling", param="messages")
        return [self._id_of_alias.get(token_id, token_id) for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        """`decode(ids)`, and for every id how many characters are complete after it. Takes linear time."""
        return self._decode_bytes(ids) if self._is_byte_level else self._decode_stream(ids)

    def _placeholder(self, literal: str) -> str:
        return f"{self._nonce}{self._index_of[literal]:06d}"

    def _alias(self, index: int) -> str:
        return f"<alias{self._nonce}:{index}>"

    def _without_literals(self, added: dict[int, AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
        """The same tokenizer (the model is shared) whose control tokens are only known by their aliases."""
        tokenizer = Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(tokenizer, part, value)
        names = {}
        for token_id, token in added.items():
            index = self._index_of.get(token.content)
            name = token.content if index is None else self._alias(index)
            names[name] = token_id
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "special": token.special}
            tokenizer.add_tokens(
                [AddedToken(name, normalized=token.normalized and index is None, single_word=False, **flags)]
            )
        aliases = tokenizer.get_vocab(with_added_tokens=True)
        id_of_alias = {aliases[name]: token_id for name, token_id in names.items()}
        if any(self._tokenizer.model.id_to_token(i) is not None and i != real for i, real in id_of_alias.items()):
            raise TemplateError("the tokenizer's model numbers its vocabulary with gaps: content cannot be masked")
        return tokenizer, id_of_alias

    def _decode_bytes(self, ids: Sequence[int]) -> DecodedText:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, ends, length = [], [], 0
        for token_id in ids:
            piece = decoder.decode(self._token_bytes(token_id))
            length += len(piece)
            pieces.append(piece)
            ends.append(length)
        if ends:
            pieces.append(decoder.decode(b"", final=True))
            ends[-1] += len(pieces[-1])
        return DecodedText("".join(pieces), tuple(ends))

    def _token_bytes(self, token_id: int) -> bytes:
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id) or ""  # an id outside the vocabulary decodes to nothing
            values = [self._byte_of_char.get(char) for char in token]
            known = [value for value in values if value is not None]
            found = bytes(known) if len(known) == len(values) else token.encode()
            self._bytes_of[token_id] = found
        return found

    def _decode_stream(self, ids: Sequence[int]) -> DecodedText:
        text = self.decode(ids)
        stream = DecodeStream(skip_special_tokens=False)
        ends: list[int] = []
        length, num_held = 0, 0
        for token_id in ids:
            piece = stream.step(self._tokenizer, token_id)
            num_held = 0 if piece is not None else num_held + 1
            if num_held > _MAX_HELD_TOKENS:  # the stream decodes all it holds at every step
                stream, num_held = DecodeStream(skip_special_tokens=False), 0
            length = min(length + len(piece or ""), len(text))
            ends.append(length)
        if ends:
            ends[-1] = len(text)
        return DecodedText(text, tuple(ends))


def _byte_alphabet() -> dict[str, int]:
    """Which byte a character stands for in byte-level vocabularies: GPT-2's table, derived from its alphabet.

    Printable Latin-1 characters stand for themselves; the other bytes, ascending, for U+0100 upwards.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
