"""The sampler that runs in SGLang's schedulers, compared with the `SamplingParams` reference, without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.values.sampling import LogprobsMode, SamplingParams, turn_sampling
from agentloop_sglang.requests import RAW_TOKEN_ID
from agentloop_sglang.sampler import BatchSampler, Row, SampledBatch
from tests.contract.reference import log_softmax, sampled_logprobs

SIZE = 97
CPU = torch.device("cpu")
PROMPT = (3, 3, 5, 96)

SAMPLINGS = {
    "plain": SamplingParams(8),
    "temperature": SamplingParams(8, temperature=0.7),
    "greedy": SamplingParams(8, temperature=0.0, top_p=0.2),
    "top_p": SamplingParams(8, top_p=0.5),
    "top_k": SamplingParams(8, top_k=4),
    "min_p": SamplingParams(8, min_p=0.2, temperature=1.3),
    "all cuts": SamplingParams(8, min_p=0.01, top_k=20, top_p=0.8, temperature=0.6),
    "bias": SamplingParams(8, logit_bias=((7, 4.0), (9, -100.0))),
    "min_tokens": SamplingParams(8, min_tokens=4, stop_token_ids=(1, 2)),
    "penalties": SamplingParams(8, frequency_penalty=0.8, presence_penalty=0.5),
    "repetition": SamplingParams(8, repetition_penalty=1.7, temperature=0.9),
    "greedy penalties": SamplingParams(8, temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0),
    "everything": SamplingParams(
        8,
        temperature=0.8,
        top_p=0.9,
        top_k=30,
        min_p=0.001,
        min_tokens=2,
        stop_token_ids=(1,),
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        repetition_penalty=1.2,
        logit_bias=((4, 2.0),),
    ),
}


def sample(sampler: BatchSampler, logits: torch.Tensor, rows: Sequence[Row], constrain: Any = None) -> SampledBatch:
    """Run one sampling step."""
    sampler.begin(rows)
    return sampler.sample(logits.clone(), constrain)


def row(sampling: SamplingParams, seed: int = 11) -> Row:
    return Row(sampling, PROMPT, SIZE, CPU, seed)


def expected(sampling: SamplingParams, logits: torch.Tensor, reply: Sequence[int]) -> np.ndarray:
    allowed = np.ones(SIZE, np.bool_)
    of_turn = turn_sampling(sampling, LogprobsMode.SAMPLED)
    return sampled_logprobs(logits.double().numpy(), of_turn, PROMPT, reply, allowed)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_one_batch_of_all_kinds_is_what_each_row_says(name: str) -> None:
    """The row under test is batched with all the others: no row's parameters affect another."""
    sampler, rows = BatchSampler(LogprobsMode.BOTH), [row(sampling) for sampling in SAMPLINGS.values()]
    place, sampling = list(SAMPLINGS).index(name), replace(SAMPLINGS[name], num_top_logprobs=3)
    rows[place] = row(sampling)
    torch.manual_seed(len(name))
    reply: list[int] = []
    for _ in range(6):
        logits = torch.randn(len(rows), SIZE) * 2
        sampled = sample(sampler, logits, rows)
        token_id = int(sampled.token_ids[place])
        wanted = expected(sampling, logits[place], reply)
        assert np.isfinite(wanted[token_id])
        if sampling.temperature == 0:
            assert token_id == wanted.argmax()
        assert float(sampled.logprobs[place]) == pytest.approx(wanted[token_id], abs=1e-4)
        raw = log_softmax(logits[place].double().numpy())
        assert int(sampled.top_ids[place, 0]) == RAW_TOKEN_ID
        assert float(sampled.top_logprobs[place, 0]) == pytest.approx(raw[token_id], abs=1e-4)
        tops = np.sort(wanted)[::-1][:3]
        np.testing.assert_allclose(sampled.top_logprobs[place, 1:].numpy(), tops, atol=1e-4)
        reply.append(token_id)


@pytest.mark.parametrize("name", ["plain", "all cuts", "penalties"])
def test_tokens_come_as_often_as_their_logprobs_say(name: str) -> None:
    sampling, num_draws = SAMPLINGS[name], 20_000
    torch.manual_seed(1)
    logits = torch.randn(SIZE)
    rows = [row(sampling, seed) for seed in range(num_draws)]
    sampled = sample(BatchSampler(LogprobsMode.SAMPLED), logits.repeat(num_draws, 1), rows)
    counts = np.bincount(sampled.token_ids.numpy(), minlength=SIZE)
    shares = np.exp(expected(sampling, logits, ()))
    assert counts[shares == 0].sum() == 0
    assert np.abs(counts - num_draws * shares).max() < 5 * np.sqrt(num_draws * shares.max())


def test_ids_of_every_block_come_as_often_as_their_logprobs_say() -> None:
    """A vocabulary of two full blocks and a partial one, with ids of zero probability at the blocks' edges."""
    size, num_draws = 2 * 512 + 276, 20_000
    edges = [0, 511, 512, 1023, 1024, size - 1]
    torch.manual_seed(6)
    logits = torch.randn(size)
    logits[edges[::2]] = -torch.inf
    logits[edges[1::2]] = 6.0
    rows = [Row(SAMPLINGS["plain"], PROMPT, size, CPU, seed) for seed in range(num_draws)]
    sampled = sample(BatchSampler(LogprobsMode.SAMPLED), logits.expand(num_draws, -1), rows)
    counts, shares = np.bincount(sampled.token_ids.numpy(), minlength=size), logits.double().softmax(0).numpy()
    assert counts[edges[::2]].sum() == 0
    assert np.abs(counts[edges[1::2]] - num_draws * shares[edges[1::2]]).max() < 5 * np.sqrt(num_draws * 0.2)
    by_block = [np.add.reduceat(each, [0, 512, 1024]) for each in (counts, num_draws * shares)]
    assert np.abs(by_block[0] - by_block[1]).max() < 5 * np.sqrt(num_draws / 4)


def test_a_seeded_row_draws_the_same_wherever_it_stands() -> None:
    torch.manual_seed(2)
    steps = [torch.randn(SIZE) for _ in range(5)]
    drawn = []
    for others in (0, 3):
        rows = [row(SAMPLINGS["plain"], seed) for seed in range(others)] + [row(SamplingParams(8, seed=7), 99)]
        sampler = BatchSampler(LogprobsMode.SAMPLED)
        batches = [torch.cat([torch.randn(others, SIZE), logits[None]]) for logits in steps]
        drawn.append([int(sample(sampler, batch, rows).token_ids[-1]) for batch in batches])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1


def test_a_row_that_is_prefilled_again_goes_on_from_its_reply() -> None:
    """Tokens that were sampled and then dropped are forgotten: the scheduler's output is the reply."""
    sampling = SAMPLINGS["everything"]
    torch.manual_seed(3)
    steps = [torch.randn(SIZE) for _ in range(4)]

    def run(is_interrupted: bool) -> list[int]:
        rows, sampler, reply = [row(sampling)], BatchSampler(LogprobsMode.SAMPLED), []
        for number, logits in enumerate(steps):
            if is_interrupted and number == 2:
                sample(sampler, torch.randn(1, SIZE), rows)  # its token is dropped
                rows[0].restart(reply)
            reply.append(int(sample(sampler, logits[None], rows).token_ids[0]))
        return reply

    assert run(is_interrupted=True) == run(is_interrupted=False)


def test_a_constraint_comes_before_all_else() -> None:
    torch.manual_seed(4)
    allowed = np.zeros(SIZE, np.bool_)
    allowed[[5, 8, 13]] = True

    def constrain(logits: torch.Tensor) -> None:
        logits[:, torch.from_numpy(~allowed)] = -torch.inf

    sampling = SamplingParams(8, top_k=2, logit_bias=((5, 3.0),))
    for _ in range(20):
        logits = torch.randn(1, SIZE)
        sampled = sample(BatchSampler(LogprobsMode.SAMPLED), logits, [row(sampling)], constrain)
        of_turn = turn_sampling(sampling, LogprobsMode.SAMPLED)
        wanted = sampled_logprobs(logits[0].double().numpy(), of_turn, PROMPT, (), allowed)
        token_id = int(sampled.token_ids[0])
        assert allowed[token_id]
        assert float(sampled.logprobs[0]) == pytest.approx(wanted[token_id], abs=1e-4)


def test_raw_mode_reports_the_models_own_softmax() -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, SIZE)
    sampling = SamplingParams(8, temperature=0.5, top_k=3, num_top_logprobs=2)
    sampled = sample(BatchSampler(LogprobsMode.RAW), logits, [row(sampling)])
    raw = log_softmax(logits[0].double().numpy())
    assert float(sampled.logprobs[0]) == pytest.approx(raw[int(sampled.token_ids[0])], abs=1e-5)
    np.testing.assert_allclose(sampled.top_logprobs[0].numpy(), np.sort(raw)[::-1][:2], atol=1e-5)
