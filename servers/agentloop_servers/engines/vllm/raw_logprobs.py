"""Raw logprobs from the pass that samples: the half that runs inside vLLM's worker processes.

vLLM 0.32 has one `logprobs_mode` for an engine, and its raw modes read the logits after a grammar's mask, which are
not the model's own in a forced call. So vLLM runs in mode "processed_logprobs", and two things are put into its
model runner:

- the model's `compute_logits` keeps a copy of what it returns, which nothing has touched yet;
- the sampler's output is completed from that copy: the row's log-softmax at the id that was sampled.

The copy is one batch of logits, and lives from the forward pass to the sampling that follows it. With speculative
decoding the rejection sampler samples: a request has a row of logits for each draft and one more, and each of its
tokens, whether accepted, recovered or bonus, is under the row of its place. This is the first generation of model
runners, which `config.py` asks for; the second is refused at the start.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from agentloop.errors import InvariantBroken, UnsupportedParameter
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.vllm.convert import RAW_TOKEN_ID


def install(model_runner: Any, mode: str) -> None:
    """Make a worker's model runner return raw logprobs. Call once, after its start.

    `mode` is a `LogprobsMode`: BOTH puts each position's raw logprob second, under the id `RAW_TOKEN_ID`, in place
    of the last alternative; RAW replaces vLLM's logprobs and alternatives by raw ones. Raises UnsupportedParameter
    for an unknown kind of runner.
    """
    has_drafts = model_runner.speculative_config is not None
    sampler = getattr(model_runner, "rejection_sampler" if has_drafts else "sampler", None)
    if not isinstance(sampler, torch.nn.Module):
        raise UnsupportedParameter(f"no raw logprobs with {type(model_runner).__name__}", param="logprobs_mode")
    model, kept = model_runner.get_model(), _Kept(LogprobsMode(mode))
    compute_logits = model.compute_logits

    def compute_and_keep(*arguments: Any, **options: Any) -> Any:
        logits = compute_logits(*arguments, **options)
        kept.keep(logits)
        return logits

    model.compute_logits = compute_and_keep

    def complete(module: Any, arguments: Any, output: Any) -> Any:
        return kept.complete(output, arguments[0].cu_num_sampled_tokens if has_drafts else None)

    sampler.register_forward_hook(complete)


class _Kept:
    """The model's own logits of one forward pass."""

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode
        self._logits: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor | None) -> None:
        """Copy the logits: masks, biases and penalties are written into the originals."""
        self._logits = None if logits is None else logits.clone()

    def complete(self, output: Any, row_ends: torch.Tensor | None = None) -> Any:
        """Add raw logprobs to a sampler's output, if that has logprobs.

        Each request has a row of logits, or with drafts those up to its one of `row_ends`.
        """
        logits, self._logits = self._logits, None
        tensors, sampled = output.logprobs_tensors, output.sampled_token_ids
        if tensors is None:
            return output
        if logits is not None and row_ends is not None:
            logits, sampled = _of_places(logits, sampled, row_ends)
        if logits is None or len(logits) != len(sampled) or sampled.shape[1] != 1:
            raise InvariantBroken("tokens were sampled from other logits than those that were kept")
        complete = with_raw if self._mode is LogprobsMode.BOTH else only_raw
        return dataclasses.replace(output, logprobs_tensors=complete(tensors, logits, sampled.long()))


def _of_places(
    logits: torch.Tensor, sampled: torch.Tensor, row_ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of each place in `sampled` `[n, places]`, and its id, as the rejection sampler orders them.

    Places without a token have the id -1, and some row: vLLM drops what is made of them.
    """
    starts = torch.cat((torch.zeros_like(row_ends[:1]), row_ends[:-1]))
    rows = starts[:, None] + torch.arange(sampled.shape[1], device=starts.device)
    return logits[rows.flatten().clamp_(max=len(logits) - 1)], sampled.reshape(-1, 1).clamp(min=0)


def with_raw(tensors: Any, logits: torch.Tensor, sampled: torch.Tensor) -> Any:
    """Put the raw logprob second in vLLM's LogprobsTensors `[n, 1 + k]`, and drop the last alternative.

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
    """Make vLLM's LogprobsTensors `[n, 1 + k]` of the plain softmax."""
    logits, ids = logits.float(), tensors.logprob_token_ids
    chosen = logits.gather(1, sampled)
    top_logits, top_ids = logits.topk(ids.shape[1] - 1, 1)
    return tensors._replace(
        logprob_token_ids=torch.cat((sampled, top_ids), 1).to(ids.dtype),
        logprobs=torch.cat((chosen, top_logits), 1) - logits.logsumexp(1, keepdim=True),
        selected_token_ranks=(logits >= chosen).sum(1).to(tensors.selected_token_ranks.dtype),
    )
