"""Capabilities: the optional features of engines, and the features that a request requires.

An engine reports its features at its start (`EngineInfo`), and a lease passes them to its callers. A request's
needs are determined by the request alone. Both are compared at every turn, so a set of features is an integer with
one bit per feature. A service rejects requests that none of its engines supports, and places others on engines that
do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from agentloop.values.sampling import ConstraintKind, SamplingParams, VersionDemand


class Feature(StrEnum):
    """An optional feature of an engine. The first four are the kinds of a Constraint."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"
    REGEX = "regex"
    IMAGES = "images"
    SEED = "seed"  # an equal request samples equal ids
    LOGIT_BIAS = "logit_bias"
    PENALTIES = "penalties"  # frequency and presence
    REPETITION_PENALTY = "repetition_penalty"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    TOP_LOGPROBS = "top_logprobs"
    PRIORITY = "priority"  # waiting requests with lower numbers run first
    SCORES = "scores"  # logprobs of the prompt's tokens
    GREEDY = "greedy"  # temperature 0


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
        Feature.GREEDY,
    }
)
"""The features of `SamplingParams`, except constraints, that engines support in their default configuration."""

NOT_SPECULATIVE = frozenset({Feature.SEED, Feature.LOGIT_BIAS, Feature.MIN_P})
"""The features of `SAMPLING` that an engine with `speculative` does not support: its verification ignores biases
and `min_p`, and the number of drafts, which affects seeded sampling, depends on the load."""

PRIORITY_POLICY = "priority"
"""The `scheduling_policy` of an engine that orders waiting requests by priority; the other one is "fcfs"."""

_BITS = {feature: 1 << number for number, feature in enumerate(Feature)}
_PARAMS = {  # the request field of a feature, if it differs from the feature's name
    **dict.fromkeys(CONSTRAINTS, "constraint"),
    Feature.PENALTIES: "frequency_penalty",
    Feature.TOP_LOGPROBS: "num_top_logprobs",
    Feature.SCORES: "score_from",
    Feature.GREEDY: "temperature",
}
_CONSTRAINT_BITS = {kind: _BITS[Feature(kind.value)] for kind in ConstraintKind}
UNBOUNDED_TOKENS = 1 << 62


@lru_cache(maxsize=64)
def bits_of(features: frozenset[Feature]) -> int:
    """Return a set of features as an integer with one bit per feature."""
    return sum(_BITS[feature] for feature in features)


@lru_cache(maxsize=1024)
def features_of(bits: int) -> tuple[Feature, ...]:
    """Return the features of an integer from `bits_of`, in the order of their definition."""
    return tuple(feature for feature, bit in _BITS.items() if bits & bit)


def param_of(feature: Feature) -> str:
    """Return the name of the request field that requires a feature."""
    return _PARAMS.get(feature, feature.value)


def hint_of(feature: Feature) -> str:
    """Return the engine configuration that a feature requires, for an error message; "" for most features."""
    if feature is Feature.PRIORITY:
        return f"; it needs engines with scheduling_policy: {PRIORITY_POLICY}"
    if feature is Feature.GREEDY:
        return "; temperature 0 needs engines without sampling_mask_top_k"
    return "; it needs engines without speculative" if feature in NOT_SPECULATIVE else ""


def configured_features(*, can_constrain: bool, scheduling_policy: str) -> frozenset[Feature]:
    """Return the features of an engine with this configuration that do not depend on its model."""
    by_priority = {Feature.PRIORITY} if scheduling_policy == PRIORITY_POLICY else frozenset[Feature]()
    return SAMPLING | by_priority | (CONSTRAINTS if can_constrain else frozenset())


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of a request or a trajectory that only some engines meet."""

    features: int = 0  # as returned by `bits_of`
    context_tokens: int = 0  # prompt tokens plus the maximum number of sampled tokens
    version: VersionDemand | None = None  # weight versions that the next call accepts
    adapter: str = ""  # name of the adapter that `version` refers to; "": the base weights
    max_staleness: int = 0  # without a `version`: accepted age of a held replica's weights, in versions

    def joined(self, other: Needs) -> Needs:
        """Return the needs of an engine that serves both. `version` is the one of `other`, the next call."""
        if other == NO_NEEDS:
            return self
        joined = replace(
            self,
            features=self.features | other.features,
            context_tokens=max(self.context_tokens, other.context_tokens),
            version=other.version,
            adapter=other.adapter or self.adapter,
        )
        return self if joined == self else joined

    @property
    def of_moved(self) -> Needs:
        """The needs of a trajectory that leaves its replica: its versions must not go back."""
        return replace(self, max_staleness=0) if self.max_staleness else self


NO_NEEDS = Needs()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional features of an engine, as bits, and its maximum context length."""

    features: int = -1
    max_context_tokens: int = UNBOUNDED_TOKENS

    def suits(self, needs: Needs) -> bool:
        """Return True if an engine with these capabilities meets the needs."""
        return not needs.features & ~self.features and needs.context_tokens <= self.max_context_tokens


ANYTHING = Capabilities()
"""The assumed capabilities of an engine that does not report them."""


def needs_of(sampling: SamplingParams, num_prompt_tokens: int, *, has_images: bool, adapter: str = "") -> Needs:
    """Return the needs of a request with a prompt of `num_prompt_tokens`."""
    return Needs(
        features_asked(sampling) | (_BITS[Feature.IMAGES] if has_images else 0),
        num_prompt_tokens + sampling.max_tokens,
        sampling.weight_version,
        adapter,
    )


def features_asked(sampling: SamplingParams) -> int:
    """Return the features that a request's sampling requires, as bits."""
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
        return bits | _BITS[Feature.SCORES]  # nothing is sampled
    if sampling.temperature == 0:
        bits |= _BITS[Feature.GREEDY]
    return bits
