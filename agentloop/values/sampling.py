"""The distribution that tokens are sampled from: how it is asked for, and how a record tells it.

An engine is asked for `SamplingParams`; a turn's record keeps `TurnSampling` of it, a value that the turns of a
conversation share.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from agentloop.errors import WeightVersionNotServed

MAX_RECORDED_CONSTRAINT_CHARS = 1024
"""A turn's record has a longer constraint by its digest: the grammar of many tools may be larger than all that was
sampled under it, so a trajectory has each text once, in its `constraints`."""


class LogprobsMode(StrEnum):
    """The distribution that an engine's logprobs are under; fixed at its start."""

    SAMPLED = "sampled"  # what was sampled from: everything in `SamplingParams` applied
    RAW = "raw"  # the plain softmax of the model's logits, at temperature 1 and nothing else applied
    BOTH = "both"  # `logprobs` as SAMPLED, and `raw_logprobs` as RAW, from one pass


class ConstraintKind(StrEnum):
    """The language that the `text` of a Constraint is in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON: one JSON value that fits it
    JSON_OBJECT = "json_object"  # any JSON object; `text` is empty
    STRUCTURAL_TAG = "structural_tag"  # xgrammar's structural tag, as JSON: text with marked regions
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language of a generation's text; the engine masks every token that would leave it."""

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class VersionDemand:
    """The weight versions that a caller accepts: no token of its answer is sampled under another.

    While the fleet serves none of them the call waits, `wait_s` in all, and then ends with WeightVersionNotServed.
    The two fields are those of the contract between a trainer and an external rollout service.
    """

    min_version: int | None = None  # this one and all later ones
    exact_version: int | None = None  # this one alone
    wait_s: float = 0.0

    def accepts(self, version: int) -> bool:
        """Tell if a token may be sampled under this version."""
        if self.exact_version is not None and version != self.exact_version:
            return False
        return self.min_version is None or version >= self.min_version

    def check(self, served: int | None) -> None:
        """Raise WeightVersionNotServed if the served version is known, and not accepted."""
        if served is not None and not self.accepts(served):
            wanted = f"version {self.exact_version}" if self.exact_version is not None else ""
            wanted = wanted or f"version {self.min_version} or a later one"
            raise WeightVersionNotServed(
                f"{wanted} is demanded, and version {served} served",
                param="weight_version",
                details={"served": [served]},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling distribution, as a request or a task asks for it.

    From the model's logits every engine makes it in this order, which is vLLM's: the constraint's mask; biases; the
    ban on `stop_token_ids` of the first `min_tokens` tokens; the repetition penalty (a logit above 0 is divided by
    it, another one multiplied) over ids of prompt and reply; frequency and presence penalties over the reply's;
    temperature; min-p (ids of less than `min_p` times the likeliest one's probability go); top-k; top-p.

    At temperature 0 the likeliest id is taken, and there is no truncation: `top_p`, `top_k` and `min_p` change
    nothing. The logprob reported then is that of the softmax at temperature 1 over the logits with all but
    temperature and truncation applied, not 0. One meaning on every engine: the contract suite proves it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # of a session or task: beside the model's own, unless `ignore_eos`
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), each id once
    constraint: Constraint | None = None  # of a task: of every turn, and not beside tools
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    ignore_eos: bool = False
    """The model's own stop tokens are not added to `stop_token_ids`: it is for a session or a task, which has them
    filled in. Engines stop at `stop_token_ids` alone in any case."""
    priority: int = 0  # of requests that wait in an engine those of lower numbers go first; no distribution's
    weight_version: VersionDemand | None = None  # the weights that may sample it; None: any


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingOptions):
    """The sampling distribution of one request, and its limits."""

    max_tokens: int
    num_top_logprobs: int = 0  # alternatives reported beside each token of the answer
    score_from: int | None = None
    """The answer is the prompt's own tokens from this one on, with RAW logprobs, all under one version. Nothing is
    sampled, and the rest of the distribution changes nothing."""

    @property
    def looks_back(self) -> bool:
        """True if the next token depends on the split between prompt and reply: no new request can continue the
        reply. A constraint and two of the penalties look at the reply alone; the repetition penalty at the prompt
        too."""
        return self.constraint is not None or self.frequency_penalty != 0 or self.presence_penalty != 0

    def of_choice(self, index: int) -> SamplingParams:
        """Return the parameters of one of n choices: its seed is `seed` + its index."""
        return replace(self, seed=self.seed + index) if self.seed is not None and index else self


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The distribution of one turn, as `SamplingParams` says it. The defaults are the model's own.

    `constraint_text` is empty above `MAX_RECORDED_CONSTRAINT_CHARS`: `Trajectory.constraints` has it then.
    Its digest is SHA-256 of the UTF-8, in hex.
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
    constraint_kind: ConstraintKind | None = None  # None: nothing constrained the text
    constraint_text: str = ""
    constraint_digest: str = ""
    logprobs_mode: LogprobsMode = LogprobsMode.SAMPLED

    def num_constrained(self, num_tokens: int) -> int:
        """Count the constrained tokens of a turn of `num_tokens` (`TokenPath.constrained`): they are its first."""
        if self.constraint_kind is not None or any(bias != 0 for _, bias in self.logit_bias):
            return num_tokens
        return min(self.min_tokens, num_tokens) if self.stop_token_ids else 0


def turn_sampling(sampling: SamplingParams, logprobs_mode: LogprobsMode) -> TurnSampling:
    """Return the part of a turn's sampling that its record keeps, without seed and room."""
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
    """Return the constraint's text if `turn_sampling` leaves it out."""
    text = "" if sampling.constraint is None else sampling.constraint.text
    return text if len(text) > MAX_RECORDED_CONSTRAINT_CHARS else ""


@lru_cache(maxsize=256)
def shared(sampling: TurnSampling) -> TurnSampling:
    """Return an equal value, which turns of the same sampling share in memory."""
    return sampling
