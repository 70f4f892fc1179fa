"""Capabilities: what an engine can do that not every engine can, and what a request needs of one.

An engine says its features at its start (`EngineInfo`), a lease carries them to whoever calls under it, and a
request's needs follow from the request alone. Both are small, compared at every turn: a set of features is an
integer with a bit for each. A service refuses what none of its engines can do, and places the rest where it can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from agentloop.values.sampling import ConstraintKind, SamplingParams, VersionDemand


class Feature(StrEnum):
    """A thing that a request may ask of an engine; the first four are the kinds of a Constraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"
    REGEX = "regex"
    IMAGES = "images"
    SEED = "seed"  # the same request samples the same ids again
    LOGIT_BIAS = "logit_bias"
    PENALTIES = "penalties"  # frequency and presence
    REPETITION_PENALTY = "repetition_penalty"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    TOP_LOGPROBS = "top_logprobs"
    PRIORITY = "priority"  # of waiting requests those of lower numbers first
    SCORES = "scores"  # logprobs of a prompt's own tokens


CONSTRAINTS = frozenset(Feature(kind.value) for kind in ConstraintKind)
SAMPLING = frozenset(
    {
        Feature.SEED,
        Feature.LOGIT_BIAS,
        Feature.PENALTIES,
        Feature.REPETITION_PENALTY,
        Feature.MIN_P,
        Feature.MIN_TOKENS,
        Feature.TOP_LOGPROBS,
    }
)
"""The part of `SamplingParams` that engines can do as they come, but for constraints."""

NOT_SPECULATIVE = frozenset({Feature.SEED, Feature.LOGIT_BIAS, Feature.MIN_P})
"""The part of it that an engine with `speculative` lacks: its verification has no biases and no `min_p`, and a seed
meets as many drafts as the load allows."""

PRIORITY_POLICY = "priority"
"""The `scheduling_policy` of an engine whose waiting requests go by their priority; the other is "fcfs"."""

_BITS = {feature: 1 << number for number, feature in enumerate(Feature)}
_PARAMS = {  # the field of a request that asks for a feature, where it is not called so
    **dict.fromkeys(CONSTRAINTS, "constraint"),
    Feature.PENALTIES: "frequency_penalty",
    Feature.TOP_LOGPROBS: "num_top_logprobs",
    Feature.SCORES: "score_from",
}
_CONSTRAINT_BITS = {kind: _BITS[Feature(kind.value)] for kind in ConstraintKind}
UNBOUNDED_TOKENS = 1 << 62


@lru_cache(maxsize=64)
def bits_of(features: frozenset[Feature]) -> int:
    """Return a set of features as an integer."""
    return sum(_BITS[feature] for feature in features)


@lru_cache(maxsize=1024)
def features_of(bits: int) -> tuple[Feature, ...]:
    """Return the features of an integer, in the order of their definition."""
    return tuple(feature for feature, bit in _BITS.items() if bits & bit)


def param_of(feature: Feature) -> str:
    """Return the field of a request that asks for a feature."""
    return _PARAMS.get(feature, feature.value)


def hint_of(feature: Feature) -> str:
    """Return the engine's config that brings a feature; "" if no config does."""
    if feature is Feature.PRIORITY:
        return f"; it needs engines with scheduling_policy: {PRIORITY_POLICY}"
    return "; it needs engines without speculative" if feature in NOT_SPECULATIVE else ""


def configured_features(*, can_constrain: bool, scheduling_policy: str) -> frozenset[Feature]:
    """Return the features of an engine with this config, whatever its model."""
    by_priority = {Feature.PRIORITY} if scheduling_policy == PRIORITY_POLICY else frozenset[Feature]()
    return SAMPLING | by_priority | (CONSTRAINTS if can_constrain else frozenset())


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a request, or of a trajectory, that only some engines meet."""

    features: int = 0  # as `bits_of` makes them
    context_tokens: int = 0  # of the prompt and of all that may be sampled
    version: VersionDemand | None = None  # of the next call alone: the fleet has to serve such weights
    adapter: str = ""  # that samples it, whose versions `version` means; empty: the base weights

    def joined(self, other: Needs) -> Needs:
        """Return what engines must be able to do for both."""
        features, context_tokens = self.features | other.features, max(self.context_tokens, other.context_tokens)
        adapter = other.adapter or self.adapter
        if (features, context_tokens, adapter) == (self.features, self.context_tokens, self.adapter):
            return self
        return Needs(features, context_tokens, adapter=adapter)


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional features of an engine, as bits, and the longest context it takes."""

    features: int = -1
    max_context_tokens: int = UNBOUNDED_TOKENS

    def suits(self, needs: Needs) -> bool:
        """Tell if an engine with these can meet the needs."""
        return not needs.features & ~self.features and needs.context_tokens <= self.max_context_tokens


ANYTHING = Capabilities()
"""What is assumed of an engine that does not say."""


def needs_of(sampling: SamplingParams, num_prompt_tokens: int, *, has_images: bool, adapter: str = "") -> Needs:
    """Return the needs of a request with a prompt of `num_prompt_tokens`."""
    return Needs(
        features_asked(sampling) | (_BITS[Feature.IMAGES] if has_images else 0),
        num_prompt_tokens + sampling.max_tokens,
        sampling.weight_version,
        adapter,
    )


def features_asked(sampling: SamplingParams) -> int:
    """Return the features that a request's sampling needs, as `bits_of` makes them."""
    bits = 0 if sampling.constraint is None else _CONSTRAINT_BITS[sampling.constraint.kind]
    if sampling.seed is not None:
        bits |= _BITS[Feature.SEED]
    if sampling.logit_bias:
        bits |= _BITS[Feature.LOGIT_BIAS]
    if sampling.frequency_penalty or sampling.presence_penalty:
        bits |= _BITS[Feature.PENALTIES]
    if sampling.repetition_penalty != 1:
        bits |= _BITS[Feature.REPETITION_PENALTY]
    if sampling.min_p:
        bits |= _BITS[Feature.MIN_P]
    if sampling.min_tokens:
        bits |= _BITS[Feature.MIN_TOKENS]
    if sampling.num_top_logprobs:
        bits |= _BITS[Feature.TOP_LOGPROBS]
    if sampling.priority:
        bits |= _BITS[Feature.PRIORITY]
    if sampling.score_from is not None:
        bits |= _BITS[Feature.SCORES]
    return bits
