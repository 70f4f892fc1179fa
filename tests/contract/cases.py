"""The properties of one engine that the contract suite needs. Each engine has a case; all share one suite.

An engine is started once per session and shared by all tests, so every test leaves it resumed and usable. Weight
versions only grow: the two checkpoints are committed repeatedly under new version numbers (`next_update`).

A case guarantees:
- the engine is started, usable and resumed, and its version is below `FIRST_UPDATE`;
- it stops at `stop_token_ids` only: a model's own end-of-text ids are ordinary ids to this suite;
- greedy decoding does not depend on other requests, nor on whether a token's KV came from prefill or decode (for a
  real model: float32, and prompts on which the best id leads by more than rounding);
- it returns logprobs of both kinds (`LogprobsMode.BOTH`), and reports every few of its steps;
- the engine's context holds `PROMPT_TOKENS + 2 * long_tokens` tokens, it runs at least 16 requests concurrently,
  and its prefix cache is on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from agentloop.engine.interface import Engine, WeightUpdate
from agentloop.types import BoolArray, Constraint, FloatArray, GenerateRequest, SamplingParams
from agentloop.values.capabilities import Feature

FIRST_UPDATE = 100
"""The first version that the suite commits; a case starts its engine at a lower version."""

PROMPT_TOKENS = 80
"""Length of the suite's prompts: several KV blocks of every tested engine, and part of one."""


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One started engine and the operations that the suite may run on it."""

    name: str
    engine: Engine
    checkpoints: tuple[str, str]  # two readable folders whose greedy continuations differ
    failing_checkpoint: Callable[[], str] | None = None
    """Returns a folder that passes `stage` and whose next `commit` fails, after `spoil`; None skips the test
    of a failed commit."""
    spoil: Callable[[str], None] | None = None
    """Makes the commit of this staged folder fail; None: it fails anyway."""
    poisoned: str | None = None
    """A well-formed folder with NaN in one tensor; None skips its test."""
    fresh: Callable[[WeightUpdate], Awaitable[Engine]] | None = None
    """Starts another engine with these weights (the test closes it); None skips that comparison."""
    long_tokens: int = 256  # a generation of this many tokens is long enough to be interrupted
    min_prompt_id: int = 0  # prompts use ids in [min_prompt_id, max_prompt_id]; None: the vocabulary's last
    max_prompt_id: int | None = None
    text_of: Callable[[Sequence[int]], str] | None = None  # set by cases whose engine supports constraints
    stop_id: int = 0  # a token that ends a turn
    logits_of: Callable[[str, Sequence[int]], FloatArray] | None = None
    """Returns the logits `[n, vocabulary]` that follow each of n ids, by an independent model of a
    checkpoint; None skips the recomputation of logprobs."""
    logit_error: float = 0.0
    """The largest difference between the engine's logits and those of `logits_of`, relative to the largest
    logit."""
    rounded_logits_of: Callable[[str, Sequence[int]], FloatArray] | None = None
    """The same model in the engine's precision, if that is low: after some contexts, the rounded logits of a
    sharply trained model are far from the exact ones. None if `logit_error` is sufficient."""
    allowed_by: Callable[[Constraint, Sequence[int], Sequence[int]], BoolArray] | None = None
    """Returns the ids `[n, vocabulary]` that a constraint allows at each of n sampled ids, including the stop
    ids that end it, from its grammar alone."""
    adapter: Callable[[int], str] = str
    """Returns the folder of an adapter that clearly changes the model, one for each seed, for an adapters' case."""
    unfit_adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders that are not adapters of the model, by a part of the error message."""
    adapted_logprobs: Callable[[str | None, Sequence[int], Sequence[int]], FloatArray] | None = None
    """Returns the logprobs of ids after a prompt, by an independent model with a folder's adapter."""
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_UPDATE))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def checkpoint(self) -> str:
        """The served checkpoint."""
        version = self.engine.weight_version
        assert version is not None
        return self.checkpoints[version % 2]

    def next_update(self) -> WeightUpdate:
        """Return an update to the other checkpoint under a new version number."""
        version = next(self.versions)
        return WeightUpdate(version, self.checkpoints[version % 2])

    def prompt(self, salt: int | None = None, num_tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
        """Return ids that no other test used (`salt` None), or the same ids for the same salt."""
        last = self.engine.info.vocab_size - 1 if self.max_prompt_id is None else self.max_prompt_id
        seed = f"salt {salt}" if salt is not None else f"prompt {next(self.numbers)}"
        choose = random.Random(seed)
        return tuple(choose.randint(self.min_prompt_id, last) for _ in range(num_tokens))

    def require(self, *features: Feature) -> None:
        """Skip a test if the engine does not have all of these features."""
        if missing := set(features) - self.engine.info.features:
            pytest.skip(f"this engine has no {', '.join(sorted(missing))}")

    def request(self, token_ids: tuple[int, ...], max_tokens: int, **sampling: object) -> GenerateRequest:
        """Return a greedy request under a new id; `sampling` overrides fields of SamplingParams.

        An engine that does not support seeds gets none: a test that compares two samples must require the feature.
        """
        if Feature.SEED not in self.engine.info.features:
            sampling.pop("seed", None)
        params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return GenerateRequest(f"{self.name}-{next(self.numbers)}", token_ids, params)
