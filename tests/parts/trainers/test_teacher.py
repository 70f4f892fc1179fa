"""A teacher's logprobs of rows, computed with the service's scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentloop.client.client import RolloutClient
from agentloop_trainers import teacher_logprobs, teacher_top_logprobs
from tests.parts.trainers.test_batches import group_rows, make_path, make_trajectory
from tests.support.endpoint.chat_service import chat_service


async def test_a_teachers_logprobs_lie_where_the_rows_do(tmp_path: Path) -> None:
    group = [
        make_trajectory(0, 1.0, make_path(3, "xx.xx", "00000")),
        make_trajectory(1, 0.0, make_path(2, "xxx", "000")),
    ]
    rows = group_rows(group)
    async with chat_service(tmp_path) as service, RolloutClient(service.url) as client:
        found = await teacher_logprobs(rows, client)
        scores = [await client.score([row.input_ids.tolist()], start=row.num_prompt) for row in rows]
    assert [one.dtype for one in found] == [np.float32] * 2
    for row, logprobs, [score] in zip(rows, found, scores, strict=True):
        assert logprobs.shape == row.logprobs.shape
        assert (logprobs[: row.num_prompt] == 0).all()
        assert logprobs[row.num_prompt :] == pytest.approx(score.logprobs)


async def test_a_teachers_alternatives_are_arrays(tmp_path: Path) -> None:
    rows = group_rows([make_trajectory(0, 1.0, make_path(3, "xx.xx", "00000"))])
    async with chat_service(tmp_path) as service, RolloutClient(service.url) as client:
        [(ids, logprobs)] = await teacher_top_logprobs(rows, client, top_k=3)
        [score] = await client.score([rows[0].input_ids.tolist()], start=3, top_k=3)
    assert (ids.dtype, logprobs.dtype, ids.shape, logprobs.shape) == (np.int32, np.float32, (5, 3), (5, 3))
    assert [[*zip(*both, strict=True)] for both in zip(ids.tolist(), logprobs.tolist(), strict=True)] == [
        [(token_id, pytest.approx(logprob)) for token_id, logprob in row] for row in score.top_logprobs
    ]
