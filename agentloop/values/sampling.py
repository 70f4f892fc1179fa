"""The sampling distribution: its form in requests, and its form in records.

Engines receive `SamplingParams`. The record of a turn stores `TurnSampling`, a value that the turns of a
conversation share.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from agentloop.errors import WeightVersionNotServed

MAX_RECORDED_CONSTRAINT_CHARS = 1024
"""A turn's record stores a longer constraint as a digest, and the trajectory stores each text once in
`constraints`: the grammar of many tools can be larger than all tokens sampled under it."""


class LogprobsMode(StrEnum):
    """The distribution of an engine's logprobs. Constant after the engine's start."""

    SAMPLED = "sampled"  # the distribution that was sampled from, with all of `SamplingParams` applied
    RAW = "raw"  # the softmax of the model's unmodified logits at temperature 1
    BOTH = "both"  # `logprobs` like SAMPLED and `raw_logprobs` like RAW, from the same forward pass


class ConstraintKind(StrEnum):
    """The language of a Constraint's `text`."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema; the generation is one matching JSON value
    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's structural tag in JSON: free text with constrained regions
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language for a generation's text. The engine masks every token that would violate it."""

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class VersionDemand:
    """The weight versions that a caller accepts for all tokens of its answer.

    While the fleet serves none of them, the call waits for at most `wait_s` in total and then ends with
    WeightVersionNotServed. The two version fields are those of the contract between trainers and external rollout
    services.
    """

    min_version: int | None = None  # this version and all later ones
    exact_version: int | None = None  # only this version
    wait_s: float = 0.0

    def accepts(self, version: int) -> bool:
        """Return True if tokens may be sampled under this version."""
        if self.exact_version is not None and version != self.exact_version:
            return False
        return self.min_version is None or version >= self.min_version

    def check(self, served: int | None) -> None:
        """Raise WeightVersionNotServed if the served version is known and not accepted."""
        if served is not None and not self.accepts(served):
            wanted = f"version {self.exact_version}" if self.exact_version is not None else ""
            wanted = wanted or f"version {self.min_version} or a later one"
            raise WeightVersionNotServed(
                f"the request requires weight {wanted}, but version {served} is served",
                param="weight_version",
                details={"served": [served]},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling distribution that a request or a task specifies.

    Every engine derives it from the model's logits in this order, which is vLLM's: the constraint's mask; biases;
    the ban on `stop_token_ids` for the first `min_tokens` tokens; the repetition penalty (logits above 0 are
    divided by it, others multiplied) over ids of prompt and reply; frequency and presence penalties over ids of the
    reply; temperature; min-p (removes ids with less than `min_p` times the highest probability); top-k; top-p.

    At temperature 0 the most likely id is taken, and `top_p`, `top_k` and `min_p` have no effect. The reported
    logprob is then that of the softmax at temperature 1 over the logits with everything applied except temperature
    and truncation; it is not 0. The contract tests verify these semantics for every engine.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # in a session or task: in addition to the model's, unless `ignore_eos`
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit), each id once
    constraint: Constraint | None = None  # in a task: applies to every turn; not supported together with tools
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    ignore_eos: bool = False
    """Do not add the model's own stop tokens to `stop_token_ids`. Only sessions and tasks add them; engines always
    stop only at `stop_token_ids`."""
    priority: int = 0  # waiting requests with lower numbers run first; does not affect the distribution
    weight_version: VersionDemand | None = None  # accepted weight versions; None: any


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingOptions):
    """The sampling distribution of one request, and its limits."""

    max_tokens: int
    num_top_logprobs: int = 0  # number of alternatives reported for each token of the answer
    score_from: int | None = None
    """If set, the answer is the prompt's tokens from this index on, with RAW logprobs under a single weight
    version. Nothing is sampled, and the other options have no effect."""

    @property
    def looks_back(self) -> bool:
        """True if the next token depends on the split between prompt and reply, so a new request cannot continue
        the reply. Constraints and two of the penalties depend on the reply only; the repetition penalty depends on
        prompt and reply alike."""
        return self.constraint is not None or self.frequency_penalty != 0 or self.presence_penalty != 0

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of one of n choices, with `seed` + `index` as its seed."""
        return replace(self, seed=self.seed + index) if self.seed is not None and index else self


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The recorded sampling distribution of one turn; see `SamplingParams`. The defaults are the model's
    distribution.

    A constraint longer than `MAX_RECORDED_CONSTRAINT_CHARS` is in `Trajectory.constraints`, and `constraint_text`
    is empty. The digest is the SHA-256 of the text in UTF-8, in hex.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    constraint_kind: ConstraintKind | None = None  # None: no constraint
    constraint_text: str = ""
    constraint_digest: str = ""
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED

    def num_constrained(self, num_tokens: int) -> int:
        """Return the number of constrained tokens of a turn with `num_tokens` tokens; they are the turn's first
        ones.

        See `TokenPath.constrained`.
        """
        if self.constraint_kind is not None or any(bias != 0 for _, bias in self.logit_bias):
            return num_tokens
        return min(self.min_tokens, num_tokens) if self.stop_token_ids else 0


def turn_sampling(sampling: SamplingParams, logprobs_mode: LogprobsMode) -> TurnSampling:
    """Return the recorded part of a turn's sampling parameters, which excludes the seed and the token limit."""
    constraint = sampling.constraint
    text = "" if constraint is None else constraint.text
    digest = "" if constraint is None else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return shared(
        TurnSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            constraint_kind=None if constraint is None else constraint.kind,
            constraint_text=text if len(text) <= MAX_RECORDED_CONSTRAINT_CHARS else "",
            constraint_digest=digest,
            logprobs_mode=logprobs_mode,
        )
    )


def long_constraint(sampling: SamplingParams) -> str:
    """Return the constraint's text if it is too long for `turn_sampling`, otherwise ""."""
    text = "" if sampling.constraint is None else sampling.constraint.text
    return text if len(text) > MAX_RECORDED_CONSTRAINT_CHARS else ""


@lru_cache(maxsize=256)
def shared(sampling: TurnSampling) -> TurnSampling:
    """Return a cached equal value, so that turns with equal sampling share one object in memory."""
    return sampling
