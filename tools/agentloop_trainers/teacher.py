"""A teacher's logprobs of rows sampled by another policy, for on-policy distillation or as a KL reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentloop.client.client import RolloutClient
from agentloop.types import FloatArray, VersionDemand
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
