"""Logprobs of recorded tokens from transformers, independent of any engine.

Imports torch, so it is loaded by name with `plugins.resolve`.
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

_ROWS_AT_ONCE = 512  # rows of float32 logits: 300 MB with a vocabulary of 150,000


class ReferenceModel:
    """A causal language model that computes logprobs of token ids, one sequence at a time. Text only."""

    def __init__(self, folder: str | Path, *, device: str = "auto", dtype: str = "float32") -> None:
        """Load a checkpoint in transformers' format. The device `auto` is CUDA if it is available.

        Raises InvalidRequest for an unknown dtype or unavailable device, and CheckpointUnreadable.
        """
        if dtype not in DTYPES:
            raise InvalidRequest(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}", param="dtype")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("torch finds no CUDA device: use the device 'cpu'", param="device")
        path = Path(folder)
        if (path / "adapter_config.json").is_file():
            raise CheckpointUnreadable(f"{path} is an adapter: merge it into its base model first", param="model")
        if not (path / "config.json").is_file():
            raise CheckpointUnreadable(
                f"{path} is not a checkpoint: it has no config.json; give a Hugging Face folder", param="model"
            )
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
        """Return the logprobs in nats of the ids at `places`, each conditioned on all preceding ids.

        `places` are ascending positions of at least 1; the default is all positions except 0. `temperatures` has
        one divisor of the logits per position; the default is 1. The softmax is computed in float32.
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
        logprobs: npt.NDArray[np.float32] = torch.cat(parts).numpy()
        return logprobs

    def _logits(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits after the ids at `rows`; others are not computed if the model supports it."""
        inputs, rows = ids[None].to(self._device), rows.to(self._device)
        if self._makes_few_logits:
            return self.model(inputs, logits_to_keep=rows, use_cache=False).logits[0]
        return self.model(inputs, use_cache=False).logits[0, rows]
