"""Raw logprobs next to vLLM's own: added by the worker's half and read by the adapter. The contract runs both."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from agentloop.errors import InvariantBroken, MalformedEngineResponse, UnsupportedParameter
from agentloop.types import WeightVersionSpan
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode
from agentloop_servers.engines.vllm.convert import RAW_TOKEN_ID, add_completion
from agentloop_servers.engines.vllm.drafts import expand_batch_to_tokens
from agentloop_servers.engines.vllm.raw_logprobs import install

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.0], [0.5, 0.0, -1.0, 4.0]])
RAW = LOGITS.log_softmax(1)


class Tensors(NamedTuple):
    """The fields of vLLM's LogprobsTensors that our code reads."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


@dataclass
class Output:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: Tensors | None


class Model(torch.nn.Module):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.clone()


class ForcingSampler(torch.nn.Module):
    """Forces ids 0 and 1, in the logits themselves, as a grammar's mask does."""

    def forward(self, logits: torch.Tensor, num_tops: int | None = 2) -> Output:
        sampled = torch.tensor([[0], [1]], dtype=torch.int32)
        kept = logits.gather(1, sampled.long())
        logits.fill_(-torch.inf).scatter_(1, sampled.long(), kept)
        if num_tops is None:
            return Output(sampled, None)
        logprobs = logits.log_softmax(1)
        top, ids = logprobs.topk(num_tops, 1)
        chosen = logprobs.gather(1, sampled.long())
        all_ids, all_logprobs = torch.cat((sampled, ids.int()), 1), torch.cat((chosen, top), 1)
        return Output(sampled, Tensors(all_ids, all_logprobs, torch.ones(2, dtype=torch.int64)))


class Runner:
    def __init__(self, mode: LogprobsMode) -> None:
        self.model, self.sampler, self.speculative_config = Model(), ForcingSampler(), None
        install(self, mode.value)

    def get_model(self) -> Model:
        return self.model

    def step(self, **options: Any) -> Output:
        output: Output = self.sampler(self.model.compute_logits(LOGITS), **options)
        return output


def test_in_mode_both_the_raw_logprob_is_second_and_the_last_alternative_gone() -> None:
    runner = Runner(LogprobsMode.BOTH)
    for _ in range(2):
        tensors = runner.step().logprobs_tensors
        assert tensors is not None
        assert tensors.logprob_token_ids[:, :2].tolist() == [[0, RAW_TOKEN_ID], [1, RAW_TOKEN_ID]]
        assert tensors.logprobs.shape == (2, 3)
        assert tensors.logprobs[:, 0].tolist() == [0.0, 0.0]
        assert tensors.logprobs[:, 1].tolist() == pytest.approx([RAW[0, 0].item(), RAW[1, 1].item()])
        assert tensors.logprobs[:, 2].tolist() == [0.0, 0.0]
    assert runner.step(num_tops=None).logprobs_tensors is None


def test_in_mode_raw_all_logprobs_are_those_of_the_plain_softmax() -> None:
    tensors = Runner(LogprobsMode.RAW).step().logprobs_tensors
    assert tensors is not None
    assert tensors.logprob_token_ids.tolist() == [[0, 2, 1], [1, 3, 0]]
    assert tensors.logprob_token_ids.dtype == torch.int32
    for row, (ids, logprobs) in enumerate(zip(tensors.logprob_token_ids, tensors.logprobs, strict=True)):
        assert logprobs.tolist() == pytest.approx(RAW[row][ids.long()].tolist())
    assert tensors.selected_token_ranks.tolist() == [3, 3]


class RejectionSampler(torch.nn.Module):
    """Two requests: the first has two drafts and its second draft is rejected, the other has none."""

    def forward(self, metadata: SimpleNamespace, logits: torch.Tensor) -> Output:
        sampled = torch.tensor([[3, 0, -1], [2, -1, -1]], dtype=torch.int32)
        ids = sampled.reshape(-1, 1).clamp(min=0).repeat(1, 3)
        return Output(sampled, Tensors(ids, torch.zeros(6, 3), torch.ones(6, dtype=torch.int64)))


@pytest.mark.parametrize("mode", [LogprobsMode.BOTH, LogprobsMode.RAW])
def test_accepted_and_recovered_tokens_are_under_the_logits_of_their_places(mode: LogprobsMode) -> None:
    model, logits = Model(), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    sampler = RejectionSampler()
    runner = SimpleNamespace(rejection_sampler=sampler, speculative_config=object(), get_model=lambda: model)
    install(runner, mode.value)
    metadata = SimpleNamespace(cu_num_sampled_tokens=torch.tensor([3, 4], dtype=torch.int32))
    tensors = sampler(metadata, model.compute_logits(logits)).logprobs_tensors
    assert tensors is not None
    raw = logits.log_softmax(1)
    found = tensors.logprobs[:, 1 if mode is LogprobsMode.BOTH else 0]
    wanted = [raw[0, 3], raw[1, 0], raw[3, 2]]  # vLLM drops positions without a token
    assert found[[0, 1, 3]].tolist() == pytest.approx([value.item() for value in wanted])


def test_each_draft_has_its_requests_temperature() -> None:
    expanded = expand_batch_to_tokens(torch.tensor([0.0, 2.0, 0.5]), torch.tensor([2, 2, 3]), 3, 0, 1)
    assert expanded.tolist() == [1.0, 1.0, 0.5]


def test_what_was_not_sampled_from_the_kept_logits_is_refused() -> None:
    runner = Runner(LogprobsMode.BOTH)
    with pytest.raises(InvariantBroken):
        runner.sampler(LOGITS.clone())
    runner.model.compute_logits(LOGITS[:1])
    with pytest.raises(InvariantBroken):
        runner.sampler(LOGITS.clone())


@pytest.mark.parametrize("change", [{"speculative_config": object()}, {"sampler": object()}, {"sampler": None}])
def test_a_runner_that_samples_otherwise_is_refused(change: dict[str, Any]) -> None:
    runner = SimpleNamespace(**{"sampler": ForcingSampler(), "speculative_config": None, **change})
    with pytest.raises(UnsupportedParameter) as caught:
        install(runner, "both")
    assert caught.value.param == "logprobs_mode"


def flat(*positions: list[tuple[int, float, int]]) -> SimpleNamespace:
    """Return vLLM's FlatLogprobs of positions: ids, logprobs, ranks."""
    ends = [sum(map(len, positions[: index + 1])) for index in range(len(positions))]
    ids, logprobs, ranks = ([entry[field] for position in positions for entry in position] for field in range(3))
    starts = [0, *ends[:-1]]
    return SimpleNamespace(token_ids=ids, logprobs=logprobs, ranks=ranks, start_indices=starts, end_indices=ends)


def read(num_tops: int, *positions: list[tuple[int, float, int]]) -> SampledTokens:
    sampled = SampledTokens(LogprobsMode.BOTH)
    token_ids = [position[0][0] for position in positions]
    completion = SimpleNamespace(token_ids=token_ids, logprobs=flat(*positions))
    add_completion(sampled, completion, num_tops)
    sampled.set_spans([WeightVersionSpan(0, 0, len(token_ids))])
    return sampled


def test_raw_logprobs_are_read_beside_the_others() -> None:
    sampled = read(0, [(7, -0.5, 1), (-1, -2.0, 1)], [(8, -1.5, 4), (-1, -9.0, 1)])
    assert (sampled.token_ids, sampled.logprobs, sampled.raw_logprobs) == ([7, 8], [-0.5, -1.5], [-2.0, -9.0])
    assert sampled.top_logprobs == []


def test_alternatives_are_whole_in_pieces_that_vllm_merged() -> None:
    own = [(7, -0.5, 1), (-1, -2.0, 1)]
    whole = read(2, [*own, (7, -0.5, 2), (8, -1.0, 3)], [(9, -3.0, 5), (-1, -2.0, 1), (7, -0.5, 2), (8, -1.0, 3)])
    merged = read(2, [(7, -0.5, 2), own[1], (8, -1.0, 3)], [(9, -3.0, 5), own[1], (7, -0.5, 2), (8, -1.0, 3)])
    assert whole.top_logprobs == merged.top_logprobs == [((7, -0.5), (8, -1.0))] * 2
    assert merged.raw_logprobs == [-2.0, -2.0]


def test_a_completion_without_its_raw_logprobs_is_malformed() -> None:
    with pytest.raises(MalformedEngineResponse):
        read(1, [(7, -0.5, 1), (7, -0.5, 1)])
