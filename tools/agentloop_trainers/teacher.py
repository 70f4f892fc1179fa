"""A teacher's logprobs of rows sampled by another policy, for on-policy distillation or as a KL reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentloop.client.client import RolloutClient
from agentloop.types import FloatArray, IntArray, VersionDemand
from agentloop_trainers.batches import TrainingRow


async def teacher_logprobs(
    rows: Sequence[TrainingRow],
    client: RolloutClient,
    *,
    model: str | None = None,
    weight_version: VersionDemand | None = None,
) -> list[FloatArray]:
    """Return the teacher's logprobs of each row: an array like `TrainingRow.logprobs`, with 0 for prompt tokens.

    The logprobs are of the untruncated softmax at temperature 1. The teacher is the service's `model`, by default
    its policy, and must have the vocabulary of the rows. Raises the errors of `RolloutClient.score`.
    """
    ids, starts = [row.input_ids.tolist() for row in rows], [row.num_prompt for row in rows]
    scores = await client.score(ids, start=starts, model=model, weight_version=weight_version)
    return [
        np.concatenate([np.zeros(row.num_prompt, np.float32), np.array(score.logprobs, np.float32)])
        for row, score in zip(rows, scores, strict=True)
    ]


async def teacher_top_logprobs(
    rows: Sequence[TrainingRow],
    client: RolloutClient,
    *,
    top_k: int,
    model: str | None = None,
    weight_version: VersionDemand | None = None,
) -> list[tuple[IntArray, FloatArray]]:
    """Return the teacher's `top_k` most likely ids at each token after the prompt, and their logprobs.

    Both arrays of a row have shape (tokens after the prompt, `top_k`), best first. The distribution, the teacher
    and the errors are those of `teacher_logprobs`; `top_k` is at most the service's `engine.max_logprobs`.
    """
    ids, starts = [row.input_ids.tolist() for row in rows], [row.num_prompt for row in rows]
    scores = await client.score(ids, start=starts, top_k=top_k, model=model, weight_version=weight_version)
    pairs = [np.array(score.top_logprobs, np.float64) for score in scores]  # exact for ids, too
    return [(one[..., 0].astype(np.int32), one[..., 1].astype(np.float32)) for one in pairs]
