"""Raw logprobs from the sampling pass, installed in vLLM's worker processes.

vLLM 0.32 has one `logprobs_mode` per engine, and its raw modes read the logits after the grammar mask, so they are
not the model's own in constrained decoding. vLLM therefore runs with "processed_logprobs", and its model runner is
patched:

- `compute_logits` keeps an unmodified copy of its result, one batch of logits, until the sampling that follows;
- the sampler's output gets the log-softmax of that copy at the sampled id.

With speculative decoding the rejection sampler has one row of logits per draft plus one, and each token (accepted,
recovered or bonus) uses the row of its position. Only the first generation of model runners is supported;
`config.py` selects it, and `install` rejects the second.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from agentloop.errors import InvariantBroken, UnsupportedParameter
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.vllm.convert import RAW_TOKEN_ID


def install(model_runner: Any, mode: str) -> None:
    """Make a worker's model runner return raw logprobs. Call once, after the worker's start.

    `mode` is a `LogprobsMode`. BOTH inserts each position's raw logprob as the second entry, with the id
    `RAW_TOKEN_ID`, and drops the last alternative. RAW replaces vLLM's logprobs and alternatives with raw ones.
    Raises UnsupportedParameter for an unsupported class of model runner.
    """
    has_drafts = model_runner.speculative_config is not None
    sampler = getattr(model_runner, "rejection_sampler" if has_drafts else "sampler", None)
    if not isinstance(sampler, torch.nn.Module):
        raise UnsupportedParameter(
            f"raw logprobs are not supported with vLLM's model runner {type(model_runner).__name__}: set"
            " engine.logprobs_mode to 'sampled'",
            param="logprobs_mode",
        )
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
        """Copy the logits, because masks, biases and penalties are applied to the originals in place."""
        self._logits = None if logits is None else logits.clone()

    def complete(self, output: Any, row_ends: torch.Tensor | None = None) -> Any:
        """Add raw logprobs to a sampler's output, if the output has logprobs.

        Each request has one row of logits; with drafts, `row_ends` has the end of each request's rows.
        """
        logits, self._logits = self._logits, None
        tensors, sampled = output.logprobs_tensors, output.sampled_token_ids
        if tensors is None:
            return output
        if logits is not None and row_ends is not None:
            logits, sampled = _of_places(logits, sampled, row_ends)
        if logits is None or len(logits) != len(sampled) or sampled.shape[1] != 1:
            raise InvariantBroken(
                "the copied logits do not match the sampled tokens: shape"
                f" {None if logits is None else tuple(logits.shape)} for sampled ids {tuple(sampled.shape)}"
            )
        complete = with_raw if self._mode is LogprobsMode.BOTH else only_raw
        return dataclasses.replace(output, logprobs_tensors=complete(tensors, logits, sampled.long()))


def _of_places(
    logits: torch.Tensor, sampled: torch.Tensor, row_ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and the id of each position in `sampled` `[n, positions]`, in the rejection sampler's
    order.

    A position without a token has the id -1 and an arbitrary row of logits; vLLM discards its result.
    """
    starts = torch.cat((torch.zeros_like(row_ends[:1]), row_ends[:-1]))
    rows = starts[:, None] + torch.arange(sampled.shape[1], device=starts.device)
    return logits[rows.flatten().clamp_(max=len(logits) - 1)], sampled.reshape(-1, 1).clamp(min=0)


def with_raw(tensors: Any, logits: torch.Tensor, sampled: torch.Tensor) -> Any:
    """Insert the raw logprob as the second entry of vLLM's LogprobsTensors `[n, 1 + k]`, and drop the last
    alternative.

    Shapes: `logits` `[n, vocabulary]`, `sampled` (token ids) `[n, 1]`.
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
    """Make vLLM's LogprobsTensors `[n, 1 + k]` from the log-softmax of the raw logits."""
    logits, ids = logits.float(), tensors.logprob_token_ids
    chosen = logits.gather(1, sampled)
    top_logits, top_ids = logits.topk(ids.shape[1] - 1, 1)
    return tensors._replace(
        logprob_token_ids=torch.cat((sampled, top_ids), 1).to(ids.dtype),
        logprobs=torch.cat((chosen, top_logits), 1) - logits.logsumexp(1, keepdim=True),
        selected_token_ranks=(logits >= chosen).sum(1).to(tensors.selected_token_ranks.dtype),
    )
