"""Raw logprobs from the pass that samples: the half that runs inside vLLM's worker processes.

vLLM 0.32 has one `logprobs_mode` for an engine, and its raw modes look at the logits after a grammar's mask: of a
forced call they say nothing of the model. So vLLM goes on in mode "processed_logprobs", and two things are put into
its model runner:

- the model's `compute_logits` keeps a copy of what it returns, which nothing has touched yet;
- the sampler's output is completed from that copy: the row's log-softmax at the id that was sampled.

The copy is one batch of logits, and lives from the forward pass to the sampling that follows it. This is the first
generation of model runners, which `config.py` asks for; what samples otherwise (its second generation, speculative
decoding) is refused at the start.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from agentloop.errors import InvariantBroken, UnsupportedParameter
from agentloop.sampling import LogprobsMode
from agentloop_servers.engines.vllm.convert import RAW_TOKEN_ID


def install(model_runner: Any, mode: str) -> None:
    """Make a worker's model runner give raw logprobs: a `LogprobsMode` other than SAMPLED. Once, after its start.

    In mode BOTH each position has the raw logprob second, under the id `RAW_TOKEN_ID`, in the place of the last
    alternative; in mode RAW the raw logprobs, and alternatives by them, take the place of vLLM's. Raises
    UnsupportedParameter for a runner that it does not fit.
    """
    sampler, has_drafts = getattr(model_runner, "sampler", None), model_runner.speculative_config is not None
    if has_drafts or not isinstance(sampler, torch.nn.Module):
        raise UnsupportedParameter(f"no raw logprobs with {type(model_runner).__name__}", param="logprobs_mode")
    model, kept = model_runner.get_model(), _Kept(LogprobsMode(mode))
    compute_logits = model.compute_logits

    def compute_and_keep(*arguments: Any, **options: Any) -> Any:
        logits = compute_logits(*arguments, **options)
        kept.keep(logits)
        return logits

    model.compute_logits = compute_and_keep
    sampler.register_forward_hook(lambda module, arguments, output: kept.complete(output))


class _Kept:
    """The logits of one forward pass, as the model gave them."""

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor | None) -> None:
        """Copy them: masks, biases and penalties are written into the originals."""
        self._logits = None if logits is None else logits.clone()

    def complete(self, output: Any) -> Any:
        """Return a sampler's output with raw logprobs; unchanged if nobody asked for logprobs."""
        logits, self._logits = self._logits, None
        tensors, sampled = output.logprobs_tensors, output.sampled_token_ids
        if tensors is None:
            return output
        if logits is None or len(logits) != len(sampled) or sampled.shape[1] != 1:
            raise InvariantBroken("tokens were sampled from other logits than those that were kept")
        complete = with_raw if self._mode is LogprobsMode.BOTH else only_raw
        return dataclasses.replace(output, logprobs_tensors=complete(tensors, logits, sampled.long()))


def with_raw(tensors: Any, logits: torch.Tensor, sampled: torch.Tensor) -> Any:
    """Return vLLM's LogprobsTensors `[n, 1 + k]` with the raw logprob second, and the last alternative gone.

    `logits` are `[n, vocabulary]`, `sampled` ids `[n, 1]`.
    """
    logits = logits.float()
    raw = logits.gather(1, sampled) - logits.logsumexp(1, keepdim=True)
    ids, logprobs = tensors.logprob_token_ids, tensors.logprobs
    mark = torch.full_like(ids[:, :1], RAW_TOKEN_ID)
    return tensors._replace(
        logprob_token_ids=torch.cat((ids[:, :1], mark, ids[:, 1:-1]), 1),
        logprobs=torch.cat((logprobs[:, :1], raw, logprobs[:, 1:-1]), 1),
    )


def only_raw(tensors: Any, logits: torch.Tensor, sampled: torch.Tensor) -> Any:
    """Return vLLM's LogprobsTensors `[n, 1 + k]` as they are under the plain softmax."""
    logits, ids = logits.float(), tensors.logprob_token_ids
    chosen = logits.gather(1, sampled)
    top_logits, top_ids = logits.topk(ids.shape[1] - 1, 1)
    return tensors._replace(
        logprob_token_ids=torch.cat((sampled, top_ids), 1).to(ids.dtype),
        logprobs=torch.cat((chosen, top_logits), 1) - logits.logsumexp(1, keepdim=True),
        selected_token_ranks=(logits >= chosen).sum(1).to(tensors.selected_token_ranks.dtype),
    )
