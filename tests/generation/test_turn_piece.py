"""Joined pieces have the contents of the single pieces, in the same order where a dialect shows an order."""

from __future__ import annotations

import random

from agentloop.generation.turn_reader import CallDelta, TurnFinish, TurnPiece, joined
from agentloop.types import WeightVersionSpan


def random_pieces(rng: random.Random) -> list[TurnPiece]:
    """Return pieces of up to two choices in a splitter's order: reasoning, then content and calls in any order."""
    pieces, num_calls, version = [], [0, 0], 3
    phases = [0, 0]
    for _ in range(rng.randint(1, 12)):
        choice, num_tokens = rng.randint(0, 1), rng.randint(0, 3)
        phases[choice] = max(phases[choice], rng.randint(0, 1))
        text = "".join(rng.choices("ab ", k=rng.randint(0, 3)))
        calls: tuple[CallDelta, ...] = ()
        if phases[choice] and rng.random() < 0.3:
            index, num_calls[choice] = num_calls[choice], num_calls[choice] + 1
            calls = (CallDelta(index, f"call_{index}", "f"), CallDelta(index, arguments="{}"))
        cut = rng.randint(0, num_tokens)
        version += rng.random() < 0.2
        spans = [WeightVersionSpan(version, 0, cut)] if cut else []
        version += rng.random() < 0.2
        spans += [WeightVersionSpan(version, cut, num_tokens)] if cut < num_tokens else []
        if len(spans) == 2 and spans[0].version == spans[1].version:
            spans = [WeightVersionSpan(version, 0, num_tokens)]
        pieces.append(
            TurnPiece(
                choice,
                text if phases[choice] else "",
                "" if phases[choice] else text,
                calls,
                tuple(rng.choices(range(100), k=num_tokens)),
                tuple(rng.random() for _ in range(num_tokens)),
                tuple(((rng.randint(0, 9), 0.5),) for _ in range(num_tokens)),
                tuple(spans),
                TurnFinish.STOP if rng.random() < 0.1 else None,
            )
        )
    return pieces


def said(pieces: list[TurnPiece], choice: int) -> tuple[object, ...]:
    """Return all contents of a choice's pieces, with the order of its reasoning, text and calls."""
    own = [piece for piece in pieces if piece.choice_index == choice]
    shown: list[str] = []
    for piece in own:  # as a dialect with content blocks shows a piece
        shown += [f"t{c}" for c in piece.reasoning] + [f"c{c}" for c in piece.content]
        shown += [f"call {call}" for call in piece.calls]
    versions = [
        span.version for piece in own for span in piece.weight_versions for _ in range(span.start, span.end)
    ]
    tokens = [token_id for piece in own for token_id in piece.token_ids]
    logprobs = [logprob for piece in own for logprob in piece.logprobs]
    tops = [row for piece in own for row in piece.top_logprobs]
    return shown, tokens, logprobs, tops, versions, [piece.finish for piece in own if piece.finish is not None]


def test_joined_pieces_say_the_same() -> None:
    num_before = num_after = 0
    for seed in range(500):
        pieces = random_pieces(random.Random(seed))
        found = list(joined(pieces))
        for choice in (0, 1):
            assert said(found, choice) == said(pieces, choice)
        for piece in found:
            assert sum(span.end - span.start for span in piece.weight_versions) == len(piece.token_ids)
            neighbours = zip(piece.weight_versions, piece.weight_versions[1:], strict=False)
            assert all(one.version != other.version and one.end == other.start for one, other in neighbours)
        num_before, num_after = num_before + len(pieces), num_after + len(found)
    assert num_after < 0.8 * num_before


def test_text_of_one_choice_becomes_one_piece() -> None:
    pieces = [TurnPiece(0, content=text, token_ids=(1,), logprobs=(-0.5,)) for text in ("He", "ll", "o")]
    assert [(piece.content, piece.token_ids) for piece in joined(pieces)] == [("Hello", (1, 1, 1))]
    assert list(joined(pieces[:1])) == pieces[:1]
    assert list(joined([])) == []
