"""Logprobs of recorded tokens by an independent model: transformers on the checkpoint of a span's version."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

POLICY = Path(__file__).parents[2] / "examples" / "tiny_policy"

torch.set_num_threads(1)  # waiting threads on busy cores slow this down up to 25 times


@cache
def reference(folder: Path) -> Any:
    """Return the checkpoint in float32 on the CPU. The import of transformers' models takes two seconds."""
    return importlib.import_module("agentloop_verify.transformers_reference").ReferenceModel(folder, device="cpu")


@dataclass(frozen=True, slots=True)
class Difference:
    """|recorded - recomputed| of every sampled token, under its recorded version and under the other one."""

    named: np.ndarray
    other: np.ndarray


def logprobs(token_ids: list[int], folder: Path) -> np.ndarray:
    """Return the logprob of each id given the ids before it, by the model in `folder`; 0 for the first."""
    return np.concatenate([[0.0], reference(folder).logprobs(token_ids)])


def difference(row: Mapping[str, Any]) -> Difference:
    """Recompute a record of the Parquet file, conditioned on exactly its ids.

    Raises AssertionError if the record is not aligned: lengths that differ, or spans that do not cover exactly the
    sampled tokens.
    """
    prompt, response = list(row["prompt_ids"]), list(row["response_ids"])
    mask, recorded = np.array(row["response_mask"], dtype=bool), np.array(row["logprobs"], dtype=np.float64)
    assert len(response) == len(mask) == len(recorded), "the response's arrays differ in length"
    covered = np.zeros(len(response), dtype=bool)
    named, other = np.zeros(len(response)), np.zeros(len(response))
    by_version = {version: logprobs(prompt + response, POLICY / f"v{version}")[len(prompt) :] for version in (0, 1)}
    for span in row["weight_versions"]:
        part = slice(span["start"], span["end"])
        assert not covered[part].any(), "spans overlap"
        covered[part] = True
        named[part] = np.abs(recorded[part] - by_version[span["version"]][part])
        other[part] = np.abs(recorded[part] - by_version[1 - span["version"]][part])
    assert (covered == mask).all(), "spans cover other tokens than the sampled ones"
    return Difference(named[mask], other[mask])
