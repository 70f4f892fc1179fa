"""The accumulator of sampled tokens: ids, logprobs, raw logprobs, alternatives, weight versions and auxiliary rows
grow together.

Engines, engine clients and the turn sampler store sampled tokens only here. Invariants, checked when tokens are
added (InvariantBroken otherwise): one logprob per id, all in the same mode; in mode BOTH also one raw logprob per
id; alternatives for every id or for none; version spans tile the ids, and adjacent spans have different versions;
auxiliary rows of a kind have no gap.

There are two ways to fill it. The simulator appends single tokens with their version. An adapter whose engine
records versions itself calls `extend` with the tokens of an output, and `set_spans` with all spans so far before it
reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentloop.engine.interface import Delta
from agentloop.errors import InvariantBroken
from agentloop.types import (
    FinishReason,
    Generation,
    Load,
    TopLogprobs,
    WeightVersionSpan,
    clip_spans,
    tiling_problem,
)
from agentloop.values.aux_rows import Aux, AuxKind, AuxRows, joined
from agentloop.values.sampling import LogprobsMode


class SampledTokens:
    """The tokens of a request or a turn so far. Callers must not modify its lists."""

    __slots__ = (
        "_aux",
        "_firsts",
        "_has_versions",
        "_versions",
        "logprobs",
        "logprobs_mode",
        "num_prompt",
        "raw_logprobs",
        "token_ids",
        "top_logprobs",
    )

    def __init__(self, logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED, num_prompt: int = 0) -> None:
        """`logprobs_mode` is the engine's mode; `add` replaces it with the mode of the first piece.

        `num_prompt` is the length of the prompt, to which the positions of auxiliary rows refer.
        """
        self.logprobs_mode = logprobs_mode
        self.num_prompt = num_prompt
        self._aux: dict[AuxKind, list[AuxRows]] | None = None  # consecutive parts; None: no rows
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # nats, one per id
        self.raw_logprobs: list[float] = []  # empty, or one per id
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []  # empty, or one per id
        self._versions: list[int] = []  # versions of the spans
        self._firsts: list[int] = []  # index of each span's first token
        self._has_versions = True

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(
        self,
        token_id: int,
        logprob: float,
        version: int,
        alternatives: tuple[tuple[int, float], ...] | None = None,
        raw_logprob: float | None = None,
    ) -> None:
        """Append one token. Give `alternatives` for every token of a request or for none; the same for
        `raw_logprob`."""
        if not self._versions or self._versions[-1] != version:
            self._begin_span(version, len(self.token_ids))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if alternatives is not None:
            self.top_logprobs.append(alternatives)
        if raw_logprob is not None:
            self.raw_logprobs.append(raw_logprob)

    def add(self, piece: Delta | Generation) -> None:
        """Append the tokens of a piece or of a complete generation. The offsets of its spans are relative to it."""
        start, spans = len(self.token_ids), piece.weight_versions
        if (problem := tiling_problem(spans, len(piece.token_ids))) is not None:
            raise InvariantBroken(problem)
        if not self.token_ids:
            self.logprobs_mode = piece.logprobs_mode
        elif piece.token_ids and piece.logprobs_mode is not self.logprobs_mode:
            raise InvariantBroken(
                f"a piece has logprobs of mode {piece.logprobs_mode}, the tokens so far {self.logprobs_mode}"
            )
        self._append_all(piece.token_ids, piece.logprobs, piece.top_logprobs, piece.raw_logprobs)
        for span in spans:
            self._begin_span(span.version, start + span.start)
        if piece.aux is not None:
            self.add_aux(piece.aux)

    def add_aux(self, aux: Aux) -> None:
        """Append auxiliary rows; rows that it has already are skipped. Raises InvariantBroken for a gap."""
        self._aux = {} if self._aux is None else self._aux
        for kind, rows in aux.items():
            parts = self._aux.setdefault(kind, [])
            if parts and rows.start < parts[-1].end:
                rows = rows.cut(parts[-1].end, rows.end)
            if rows.num_rows:
                if parts:
                    rows.check_follows(parts[-1])
                parts.append(rows)

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: TopLogprobs = (),
        raw_logprobs: Sequence[float] = (),
    ) -> None:
        """Append tokens whose versions are not known yet. Call `set_spans` before reading tokens."""
        self._append_all(token_ids, logprobs, tops, raw_logprobs)
        self._has_versions = self._has_versions and not token_ids

    def set_spans(self, spans: Iterable[WeightVersionSpan]) -> None:
        """Replace the versions of all tokens so far with `spans`, which must tile the tokens."""
        spans = tuple(spans)
        if (problem := tiling_problem(spans, len(self.token_ids))) is not None:
            raise InvariantBroken(problem)
        self._versions, self._firsts, self._has_versions = [], [], True
        for span in spans:
            self._begin_span(span.version, span.start)

    def cut(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        if self._aux is not None and num_tokens < len(self.token_ids):
            kept = self._aux_of(0, num_tokens)
            self._aux = None if kept is None else {kind: [rows] for kind, rows in kept.items()}
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        del self.top_logprobs[num_tokens:], self.raw_logprobs[num_tokens:]
        while self._firsts and self._firsts[-1] >= num_tokens:
            del self._firsts[-1], self._versions[-1]

    @property
    def weight_versions(self) -> tuple[WeightVersionSpan, ...]:
        """The weight version spans of all tokens."""
        if not self._has_versions:
            raise InvariantBroken("the weight versions of the last tokens are unknown: `set_spans` was not called")
        lasts = (*self._firsts[1:], len(self.token_ids))
        return tuple(map(WeightVersionSpan, self._versions, self._firsts, lasts))

    @property
    def newest_version(self) -> int | None:
        """The weight version of the last token; None without tokens."""
        return self._versions[-1] if self._versions else None

    def since(self, start: int, end: int | None = None) -> Delta:
        """Return tokens `[start, end)` as a piece; `end` defaults to the number of tokens."""
        stop = len(self.token_ids) if end is None else end
        return Delta(
            tuple(self.token_ids[start:stop]),
            tuple(self.logprobs[start:stop]),
            clip_spans(self.weight_versions, start, stop),
            tuple(self.top_logprobs[start:stop]),
            tuple(self.raw_logprobs[start:stop]),
            self.logprobs_mode,
            self._aux_of(start, stop),
        )

    @property
    def aux(self) -> Aux | None:
        """The auxiliary rows of all tokens; None for none."""
        return self._aux_of(0, len(self.token_ids))

    def generation(
        self,
        request_id: str,
        finish_reason: FinishReason,
        *,
        cached_tokens: int = 0,
        replica_id: str = "",
        load: Load = Load(),  # noqa: B008 - frozen
    ) -> Generation:
        """Return all tokens as the answer to a request."""
        return Generation(
            request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.weight_versions,
            finish_reason,
            cached_tokens,
            replica_id,
            load,
            tuple(self.top_logprobs),
            tuple(self.raw_logprobs),
            self.logprobs_mode,
            aux=self.aux,
        )

    def _aux_of(self, start: int, stop: int) -> Aux | None:
        """Return the rows of tokens `[start, stop)`, those of the prompt with the first token."""
        if self._aux is None or start >= stop:
            return None
        found: dict[AuxKind, AuxRows] = {}
        for kind, parts in self._aux.items():
            first, end = kind.span(parts[0].start if parts else 0, self.num_prompt, stop)
            first = max(first, self.num_prompt + start - kind.num_missing) if start else first
            pieces: list[AuxRows] = []
            for part in reversed(parts):  # a streamed piece is at the end
                if part.end <= first:
                    break
                pieces.append(part.cut(first, end))
            pieces = [piece for piece in reversed(pieces) if piece.num_rows]
            if pieces:
                found[kind] = joined(pieces)
        return found or None

    def _append_all(
        self, token_ids: Sequence[int], logprobs: Sequence[float], tops: TopLogprobs, raw_logprobs: Sequence[float]
    ) -> None:
        num_tokens = len(token_ids)
        num_raw = num_tokens if self.logprobs_mode is LogprobsMode.BOTH else 0
        if len(raw_logprobs) != num_raw:
            raise InvariantBroken(f"{len(raw_logprobs)} raw logprobs for {num_tokens} sampled ids")
        if len(logprobs) != num_tokens:
            raise InvariantBroken(f"{len(logprobs)} logprobs for {num_tokens} sampled ids")
        if tops and len(tops) != num_tokens:
            raise InvariantBroken(f"alternatives for {len(tops)} tokens, but {num_tokens} sampled ids")
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.top_logprobs.extend(tops)
        self.raw_logprobs.extend(raw_logprobs)

    def _begin_span(self, version: int, first: int) -> None:
        """Start a span at token `first`, unless the last span has the same version."""
        if not self._versions or self._versions[-1] != version:
            self._versions.append(version)
            self._firsts.append(first)
