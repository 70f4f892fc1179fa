"""Text to token ids and back, with content separated from control tokens.

Content (text from users, tools and policies) may spell a control token. `mask` replaces such spellings by
placeholders before a template inserts the content among its own control tokens; `encode` tokenizes them as ordinary
text. Invariant: masked text never becomes a control token. After construction only a cache of immutable entries
changes, so one object may be used from several threads.
"""

from __future__ import annotations

import codecs
import re
import secrets
import string
from collections.abc import Collection, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from agentloop.errors import InvalidRequest, TemplateError
from agentloop.parsers.base import DecodedText

_LONG_CHARS = 8192  # longer texts are tokenized as a batch of one: the library releases the GIL only for batches
_MARKUP = re.compile(r"[<\[|].+[>\]|]")
# Roles and ends of turns: some tokenizers do not flag them as special.
_BARRED = re.compile("<[|\uff5c].+[|\uff5c]>")
_BREAK = 999_999  # index of the empty placeholder: the texts before and after it cannot join to a control token
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ANCHOR = "A"  # decoded before a token to get its text: many decoders treat a text's first token differently
_MAX_HELD_TOKENS = 64  # a character has at most four bytes: more held tokens are bytes that never form a character

# Limits of a TextDecoder
_CONTEXT = 4  # preceding tokens decoded again with new ones: some decoders' output depends on them
_MAX_OPEN_BYTES = 3  # bytes of an incomplete UTF-8 character
_MAX_OPEN_CHARS = 64  # uncertain characters that are held back; more are emitted as they are
_MAX_HELD = 12  # window length above `_CONTEXT` at which the window is shortened


class Tokens:
    """A tokenizer that distinguishes control tokens from other added tokens (runs of spaces). Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._literals = [t.content for t in added.values() if t.special or _MARKUP.fullmatch(t.content)]
        self._special = frozenset(t.content for t in added.values() if t.special or _BARRED.fullmatch(t.content))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._index_of = {literal: index for index, literal in enumerate(self._literals)}
        self._control_ids = frozenset(i for i, t in added.items() if t.content in self._index_of)
        # Random digits: content cannot contain them by chance or on purpose, and no template filter changes them.
        self._nonce = str(10**19 + secrets.randbelow(9 * 10**19))
        placeholder = rf"{self._nonce}(?P<index>\d{{6}})"
        self._break = f"{self._nonce}{_BREAK:06d}"
        self._seams = _Seams(self._literals)
        self._control = re.compile(_any_of(self._literals) if self._literals else r"(?!)")
        self._masked_or_control = re.compile(f"{placeholder}|{self._control.pattern}")
        self._masked = re.compile(placeholder)
        self._text_tokenizer, self._id_of_alias = self._without_literals(added)
        self._is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        anchor_id = tokenizer.token_to_id(f"<0x{ord(_ANCHOR):02X}>")
        has_fallback = anchor_id is not None and tokenizer.decode([anchor_id]) == _ANCHOR
        self._anchor_id = anchor_id if has_fallback else None  # set for tokenizers with byte fallback
        self._bytes_of: dict[int, bytes] = {}
        self._byte_of_char = _byte_alphabet() if self._is_byte_level else {}

    @property
    def num_ids(self) -> int:
        """The largest id plus one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def literals(self) -> frozenset[str]:
        """The added tokens that are control tokens or markup."""
        return frozenset(self._literals)

    def specials(self, text: str) -> list[str]:
        """Return the special tokens in a rendered text, in order."""
        return [literal for literal in self._control.findall(text) if literal in self._special]

    def id_of(self, literal: str) -> int | None:
        return self._tokenizer.token_to_id(literal)

    def literal_of(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def mask(self, text: str, *, keeps_markup: bool = False) -> str:
        """Return the text with placeholders for control tokens, which `encode` tokenizes as ordinary text.

        Also prevents a control token that is partly in `text` and partly in the template's text around it. With
        `keeps_markup` (trusted text, or a policy's own), markup that is not a special token, such as `<think>`,
        stays a token.
        """
        if self._control.search(text) is not None:
            text = self._control.sub(
                lambda m: m[0] if keeps_markup and m[0] not in self._special else self._placeholder(m[0]), text
            )
        opens, closes = self._seams.of(text)
        return f"{self._break if opens else ''}{text}{self._break if closes else ''}"

    def mask_within(self, text: str) -> str:
        """Mask a call that a policy wrote, except for the control tokens at its beginning and end."""
        marks = list(self._control.finditer(text))
        start = marks[0].end() if marks and marks[0].start() == 0 else 0
        end = marks[-1].start() if marks and marks[-1].end() == len(text) else len(text)
        return f"{text[:start]}{self.mask(text[start:end])}{text[end:]}" if start <= end else text

    def unmask(self, text: str) -> str:
        """Return the text with its placeholders replaced by the original spellings."""
        return self._masked.sub(lambda match: self._literal(match["index"]), text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text without BOS or EOS. Masked spellings become ordinary text.

        Raises InvalidRequest if the base vocabulary, without its added tokens, has a control token with that
        spelling.
        """
        if self._nonce not in text:
            return _ids(self._tokenizer, text)
        aliased = self._masked_or_control.sub(
            lambda m: self._literal(m["index"]) if m["index"] else self._alias(self._index_of[m[0]]), text
        )
        ids = _ids(self._text_tokenizer, aliased)
        if any(token_id in self._control_ids and token_id not in self._id_of_alias for token_id in ids):
            raise InvalidRequest(
                "the content contains a control token that the tokenizer cannot encode as ordinary text: remove it",
                param="messages",
            )
        return [self._id_of_alias.get(token_id, token_id) for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens. Bytes that are not UTF-8 become U+FFFD."""
        # With byte fallback the library also replaces valid bytes next to invalid ones.
        if self._anchor_id is not None:
            return self._decode_bytes(ids).text
        return self._decode(ids)

    def decode_with_offsets(self, ids: Sequence[int]) -> DecodedText:
        """Return `decode(ids)`, with the number of characters complete after each id, in linear time."""
        is_of_bytes = self._is_byte_level or self._anchor_id is not None
        return self._decode_bytes(ids) if is_of_bytes else self._decode_stream(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text. They may be part of a character."""
        octets = self._bytes_of.get(token_id)
        if octets is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""  # outside the vocabulary; not cached, because the number of such ids is unbounded
            octets = self._bytes_of[token_id] = self._new_bytes(token_id, token)
        return octets

    def _placeholder(self, literal: str) -> str:
        return f"{self._nonce}{self._index_of[literal]:06d}"

    def _literal(self, index: str) -> str:
        """Return the text that a placeholder replaces."""
        return "" if int(index) == _BREAK else self._literals[int(index)]

    def _alias(self, index: int) -> str:
        return f"<alias{self._nonce}:{index}>"

    def _without_literals(self, added: dict[int, AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
        """Return a tokenizer in which each control token has an alias as its only spelling, and ids by alias id.

        The underlying model is shared with the original tokenizer.
        """
        tokenizer = Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(tokenizer, part, value)
        names, tokens = {}, []
        for token_id, token in added.items():
            index = self._index_of.get(token.content)
            name = token.content if index is None else self._alias(index)
            names[name] = token_id
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "special": token.special}
            is_normalized = token.normalized and index is None
            tokens.append(AddedToken(name, normalized=is_normalized, single_word=False, **flags))
        tokenizer.add_tokens(tokens)
        aliases = tokenizer.get_vocab(with_added_tokens=True)
        id_of_alias = {aliases[name]: token_id for name, token_id in names.items()}
        if any(self._tokenizer.model.id_to_token(i) is not None and i != real for i, real in id_of_alias.items()):
            raise TemplateError(
                "the tokenizer's vocabulary has gaps in its ids, so control tokens that message content spells out "
                "cannot be masked: use a tokenizer whose ids have no gaps"
            )
        return tokenizer, id_of_alias

    def _decode_bytes(self, ids: Sequence[int]) -> DecodedText:
        pieces, ends, length = [], [], 0
        lead, first = self._first_of(ids)
        # The algorithm of codecs' incremental UTF-8 decoder, inlined: the decoder object takes twice as long.
        cache, decode, rest = self._bytes_of, codecs.utf_8_decode, b""
        for index, token_id in enumerate(ids):
            octets = cache.get(token_id) if index != lead else first
            if octets is None:
                octets = self.token_bytes(token_id)
            if rest:
                octets = rest + octets
            piece, num_read = decode(octets, "replace", False)
            rest = octets[num_read:]
            length += len(piece)
            pieces.append(piece)
            ends.append(length)
        if rest:
            pieces.append(decode(rest, "replace", True)[0])
            ends[-1] += len(pieces[-1])
        return DecodedText("".join(pieces), tuple(ends))

    def _first_of(self, ids: Sequence[int]) -> tuple[int, bytes]:
        """Return the index and bytes of the first token in the vocabulary; -1 if no special case applies.

        Decoders treat a text's first token differently: for example, they omit its leading space.
        """
        if self._anchor_id is None:
            return -1, b""
        for index, token_id in enumerate(ids):
            if (token := self._tokenizer.id_to_token(token_id)) is not None:
                if _BYTE_TOKEN.fullmatch(token) is not None:
                    break
                return index, self._decode((token_id,)).encode()
        return -1, b""

    def _new_bytes(self, token_id: int, token: str) -> bytes:
        if self._is_byte_level:
            values = [self._byte_of_char.get(char) for char in token]
            octets = [value for value in values if value is not None]
            return bytes(octets) if len(octets) == len(values) else token.encode()
        if self._anchor_id is None:
            return self._decode((token_id,)).encode()
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return self._decode((self._anchor_id, token_id)).removeprefix(_ANCHOR).encode()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _decode_stream(self, ids: Sequence[int]) -> DecodedText:
        """Decode with any kind of decoder: a token's text is the difference to the text of its predecessors."""
        text = self._decode(ids)
        ends: list[int] = []
        length, before, num_before, pending = 0, list[int](), 0, list[int]()
        for token_id in ids:
            pending.append(token_id)
            piece = self._decode((*before, *pending))
            is_certain = len(piece) > num_before and not piece.endswith(_REPLACEMENT)
            if is_certain or len(pending) > _MAX_HELD_TOKENS:
                length = min(length + max(len(piece) - num_before, 0), len(text))
                before, pending = pending, []
                num_before = len(self._decode(before))
            ends.append(length)
        if ends:
            ends[-1] = len(text)
        return DecodedText(text, tuple(ends))


class _Seams:
    """Detects texts that may join with adjacent text to a control token, as a template's `'<' ~ key ~ '>'` could.

    The beginning of a text is compared with control tokens cut inside their leading punctuation. Its end is
    compared with any prefix of a control token, because another content text may follow directly.
    """

    def __init__(self, literals: Sequence[str]) -> None:
        self._inner: set[str] = set()
        self._starts: set[str] = set()
        self._prefixes: set[str] = set()
        for literal in literals:
            leads = range(len(literal) - len(literal.lstrip(string.punctuation)) + 1)
            trails = range(len(literal) - len(literal.rstrip(string.punctuation)) + 1)
            self._inner |= {literal[lead : len(literal) - trail] for lead in leads for trail in trails} - {literal}
            self._starts |= {literal[lead:] for lead in leads if 0 < lead < len(literal)}
            self._prefixes |= {literal[:end] for end in range(1, len(literal))}
        self._inner.discard("")
        self._openers = {literal[0] for literal in literals}
        self._start_lengths = sorted({len(start) for start in self._starts})
        self._start_openers = {start[:1] for start in self._starts}
        self._max_chars = max(map(len, literals), default=0)

    def of(self, text: str) -> tuple[bool, bool]:
        """Return, as two booleans, if the text may complete a preceding token and begin a following one."""
        if text in self._inner:
            return True, True
        return self._goes_on(text), self._begins(text[-self._max_chars :])

    def _goes_on(self, text: str) -> bool:
        if text[:1] not in self._start_openers:
            return False  # the fast path of nearly all texts
        return any(text[:length] in self._starts for length in self._start_lengths if length <= len(text))

    def _begins(self, tail: str) -> bool:
        if self._openers.isdisjoint(tail):
            return False
        return any(tail[at:] in self._prefixes for at, char in enumerate(tail) if char in self._openers)


class TextDecoder:
    """Decodes ids incrementally, in linear time.

    `add` returns only characters that no later id can change. With byte-level and byte-fallback tokenizers, the
    concatenated text and offsets equal those of `Tokens.decode_with_offsets` on all ids, however the ids are split.
    """

    def __init__(self, tokens: Tokens, stop_token_id: int) -> None:
        self._tokens = tokens
        self._stop_token_id = stop_token_id
        self._window: list[int] = []  # the ids whose text may still change, and up to `_CONTEXT` ids before them
        self._num_final = 0  # ids of the window whose text was returned
        self._num_seen = 0  # characters of the window that were returned

    def add(self, ids: Sequence[int]) -> DecodedText:
        """Return the characters that have become certain. `ends` counts within them and omits uncertain ids."""
        if not ids:
            return DecodedText("", ())
        self._window.extend(ids)
        num_ids = len(self._window)
        for num_final in range(num_ids, max(num_ids - _MAX_OPEN_BYTES, self._num_final) - 1, -1):
            decoded = self._tokens.decode_with_offsets(self._window[:num_final])
            if not decoded.text.endswith(_REPLACEMENT):
                return self._give_whole(decoded)
        return self._give_broken(self._tokens.decode_with_offsets(self._window))

    def finish(self) -> DecodedText:
        """Return the remaining characters, with the `ends` of all remaining ids."""
        return self._give(self._tokens.decode_with_offsets(self._window), None, len(self._window))

    def _give_whole(self, decoded: DecodedText) -> DecodedText:
        """Return all characters of `decoded`, which ends with a complete character."""
        num_final = len(decoded.ends)
        emitted = self._give(decoded, None, num_final)
        if num_final <= _MAX_HELD:  # shortening the window costs one more decoding
            return emitted
        for start in range(num_final - _CONTEXT, num_final - _CONTEXT - _MAX_OPEN_BYTES - 1, -1):
            if start <= 0:
                break
            context = self._tokens.decode_with_offsets(self._window[start:num_final])
            if not context.text.startswith(_REPLACEMENT):  # the context does not begin inside a character
                self._window, self._num_final = self._window[start:], num_final - start
                self._num_seen = len(context.text)
                break
        return emitted

    def _give_broken(self, decoded: DecodedText) -> DecodedText:
        """Return the certain characters of a text with invalid UTF-8: the last id may begin a character."""
        num_certain = max(decoded.ends[-2], self._num_seen) if len(decoded.ends) > 1 else 0
        num_open = len(decoded.text) - num_certain
        if num_open > _MAX_OPEN_CHARS:
            return self._give_whole(decoded)
        emitted = self._give(decoded, num_certain, len(decoded.ends) - 1)
        if len(self._window) > _CONTEXT + num_open + _MAX_HELD:
            *before, last = self._window
            before = [token_id for token_id in before if self._has_text(token_id)][-_CONTEXT - num_open :]
            self._window, self._num_final = [*before, last], len(before)
            self._num_seen = max(len(self._tokens.decode_with_offsets(self._window).text) - num_open, 0)
        return emitted

    def _give(self, decoded: DecodedText, num_certain: int | None, num_final: int) -> DecodedText:
        seen = self._num_seen
        emitted = DecodedText(
            decoded.text[seen:num_certain],
            tuple(max(end - seen, 0) for end in decoded.ends[self._num_final : num_final]),
        )
        self._num_seen, self._num_final = seen + len(emitted.text), num_final
        return emitted

    def _has_text(self, token_id: int) -> bool:
        stop = self._stop_token_id
        return self._tokens.decode((stop, token_id)) != self._tokens.decode((stop,))


def _any_of(literals: Collection[str]) -> str:
    """Return a pattern that matches the longest literal, as a prefix tree: some models have over 1,000 literals."""
    branches: dict[str, list[str]] = {}
    for literal in literals:
        if literal:
            branches.setdefault(literal[0], []).append(literal[1:])
    pattern = "|".join(re.escape(char) + _any_of(rests) for char, rests in branches.items())
    if "" in literals:
        return f"(?:{pattern})?" if pattern else ""
    return f"(?:{pattern})" if len(branches) > 1 else pattern


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    if len(text) > _LONG_CHARS:
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return tokenizer.encode(text, add_special_tokens=False).ids


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table from the characters of byte-level vocabularies to bytes.

    Printable Latin-1 characters represent themselves; U+0100 and up represent the other bytes in ascending order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = [byte for byte in range(256) if chr(byte) in alphabet]
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
