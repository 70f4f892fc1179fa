"""A teacher's logprobs of rows that another policy sampled: on-policy distillation, and references for a KL."""

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
    """Return for each row an array as its `logprobs`: the teacher's, of every response token, and 0 in the prompt.

    They are of the plain softmax at temperature 1. The teacher is the service's `model`, by default its policy, and
    must have the rows' vocabulary. Raises as `RolloutClient.score`.
    """
    ids, starts = [row.input_ids.tolist() for row in rows], [row.num_prompt for row in rows]
    scores = await client.score(ids, start=starts, model=model, weight_version=weight_version)
    return [
        np.concatenate([np.zeros(row.num_prompt, np.float32), np.array(found.logprobs, np.float32)])
        for row, found in zip(rows, scores, strict=True)
    ]
