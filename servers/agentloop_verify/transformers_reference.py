"""Logprobs of recorded tokens by an independent model: transformers on a checkpoint, apart from every engine.

Imports torch: who runs without it names this module to `plugins.resolve`.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from agentloop.errors import CheckpointUnreadable, InvalidRequest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_ROWS_AT_ONCE = 512  # of logits in float32: 300 MB for a vocabulary of 150,000


class ReferenceModel:
    """A causal language model that computes logprobs of given ids, one sequence at a time. Text only."""

    def __init__(self, folder: str | Path, *, device: str = "auto", dtype: str = "float32") -> None:
        """Load a checkpoint in transformers' format; `device` "auto" is CUDA where there is one.

        Raises InvalidRequest for a device or dtype that cannot be had, and CheckpointUnreadable.
        """
        if dtype not in DTYPES:
            raise InvalidRequest(f"a dtype is one of {', '.join(DTYPES)}, not {dtype!r}", param="dtype")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("torch finds no CUDA device here", param="device")
        path = Path(folder)
        if (path / "adapter_config.json").is_file():
            raise CheckpointUnreadable(
                f"{path} holds an adapter: merge it into its base model first", param="model"
            )
        if not (path / "config.json").is_file():
            raise CheckpointUnreadable(f"{path} holds no config.json: it is no checkpoint", param="model")
        disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        except (OSError, ValueError) as error:
            raise CheckpointUnreadable(f"{path}: {str(error).splitlines()[0]}", param="model") from error
        self.model = model.eval().to(device)
        self._device = torch.device(device)
        self._makes_few_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(
        self,
        token_ids: npt.ArrayLike,
        places: npt.ArrayLike | None = None,
        temperatures: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the logprob, in nats, of the ids at `places`, each given all ids before it.

        `places` ascend and begin at 1 at the earliest; left out, they are all but the first. `temperatures` are the
        places' own, by which the logits are divided; left out, 1. The softmax is made in float32.
        """
        ids = torch.as_tensor(np.asarray(token_ids, np.int64))
        at = torch.arange(1, len(ids)) if places is None else torch.as_tensor(np.asarray(places, np.int64))
        if len(at) == 0:
            return np.empty(0, np.float32)
        scale = np.ones(len(at)) if temperatures is None else temperatures
        divisor = torch.as_tensor(np.asarray(scale, np.float32), device=self._device)[:, None]
        chosen = ids[at].to(self._device)[:, None]
        with torch.inference_mode():
            logits = self._logits(ids[: int(at[-1])], at - 1)
            parts = [
                torch.log_softmax(logits[rows].float() / divisor[rows], dim=-1).gather(1, chosen[rows])[:, 0].cpu()
                for start in range(0, len(at), _ROWS_AT_ONCE)
                for rows in (slice(start, start + _ROWS_AT_ONCE),)
            ]
        found: npt.NDArray[np.float32] = torch.cat(parts).numpy()
        return found

    def _logits(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits behind the ids at `rows`; others are not made, where the model can leave them out."""
        inputs, rows = ids[None].to(self._device), rows.to(self._device)
        if self._makes_few_logits:
            return self.model(inputs, logits_to_keep=rows, use_cache=False).logits[0]
        return self.model(inputs, use_cache=False).logits[0, rows]
