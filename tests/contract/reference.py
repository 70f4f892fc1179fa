"""The distribution that `SamplingParams` defines, implemented independently from its docstring, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentloop.types import BoolArray, FloatArray
from agentloop.values.sampling import TurnSampling


def log_softmax(logits: FloatArray) -> FloatArray:
    shifted = logits - logits.max()
    result: FloatArray = shifted - np.log(np.exp(shifted).sum())
    return result


def sampled_logprobs(
    logits: FloatArray,
    sampling: TurnSampling,
    prompt_ids: Sequence[int],
    reply_ids: Sequence[int],
    allowed: BoolArray,
    *,
    slack: float = 0.0,
) -> FloatArray:
    """Return the logprob of every id after `prompt_ids` and `reply_ids`; minus infinity for excluded ids.

    `logits` are the model's, one per id; `allowed` are the ids that the turn's constraint allows. `slack` lowers
    every cut by so many nats (negative values raise it); ids within `slack` of an id do not count before it. The
    likeliest id is always kept.
    """
    logits = np.where(allowed, logits.astype(np.float64), -np.inf)
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if len(reply_ids) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -np.inf
    counts = np.bincount(np.array(reply_ids, dtype=np.int64), minlength=len(logits))
    seen = list({*prompt_ids, *reply_ids})
    repeated = logits[seen]
    logits[seen] = np.where(
        repeated > 0, repeated / sampling.repetition_penalty, repeated * sampling.repetition_penalty
    )
    logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    if sampling.temperature == 0:
        return log_softmax(logits)
    logits = logits / sampling.temperature
    largest = logits.max()
    if sampling.min_p:
        logits = np.where(logits >= min(largest + np.log(sampling.min_p) - slack, largest), logits, -np.inf)
    if sampling.top_k:
        logits = np.where(logits >= min(np.sort(logits)[-sampling.top_k] - slack, largest), logits, -np.inf)
    if sampling.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        ordered, mass = -logits[order], np.exp(log_softmax(logits))[order].cumsum()
        num_before = np.arange(len(order))
        if slack > 0:  # ids that are at least `slack` likelier
            num_before = np.searchsorted(ordered, ordered - slack, side="left")
        elif slack < 0:
            num_before = np.searchsorted(ordered, ordered - slack, side="right") - 1
        before = np.concatenate(([0.0], mass))[num_before]
        logits[order[1:][before[1:] >= sampling.top_p * np.exp(slack)]] = -np.inf
    return log_softmax(logits)
