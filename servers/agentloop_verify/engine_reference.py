"""Logprobs of recorded tokens from a new vLLM engine with the checkpoint and the quantization of the run's engine.

A remaining mismatch is caused by weights or contexts, not by the quantization.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from agentloop.errors import InvalidRequest
from agentloop.types import GenerateRequest, SamplingParams
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.processes.engine_parts import build_engine

CPU_CACHE_MIB = 512


class EngineReference:
    """A context manager with an engine that computes logprobs by prefill, one sequence at a time."""

    def __init__(self, folder: str | Path, quantization: str, num_tokens: int, *, device: str, dtype: str) -> None:
        """`num_tokens` is the maximum sequence length. Raises InvalidRequest for an invalid configuration."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        cache = {"kv_cache_mib": CPU_CACHE_MIB} if device == "cpu" else {}
        engine = {
            "device": device,
            "dtype": dtype,
            "quantization": quantization or None,
            "max_context_tokens": num_tokens + 1,  # the model's context length may need more KV than fits in memory
            **cache,
        }
        try:
            config = ServiceConfig.model_validate({"model": str(folder), "mode": "debug", "engine": engine})
        except ValueError as error:
            raise InvalidRequest(f"the reference engine cannot be configured: {error}", param="engine") from error
        self._engine = build_engine(config)
        self._runner = asyncio.Runner()

    def __enter__(self) -> EngineReference:
        """Start the engine. Raises EngineError."""
        self._runner.run(self._engine.start())
        return self

    def __exit__(self, *exception: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def logprobs(
        self, token_ids: npt.ArrayLike, places: npt.ArrayLike, temperatures: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """Return the logprobs in nats of the ids at the ascending positions `places`. Temperatures must be 1."""
        if not np.all(np.asarray(temperatures) == 1):
            raise ValueError("an engine's prefill computes the softmax only at temperature 1")
        ids, at = np.asarray(token_ids), np.asarray(places)
        sampling = SamplingParams(max_tokens=1, score_from=int(at[0]))
        request = GenerateRequest("reference", tuple(ids.tolist()), sampling)
        scores = np.asarray(self._runner.run(self._engine.generate(request)).logprobs, np.float32)
        logprobs: npt.NDArray[np.float32] = scores[at - at[0]]
        return logprobs
