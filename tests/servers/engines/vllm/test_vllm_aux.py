"""Routed experts and sampling masks in vLLM's outputs and in its state of a running request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.v1.outputs import SamplingMaskLists

from agentloop.engine.interface import Delta
from agentloop.errors import MalformedEngineResponse
from agentloop.simulation.policy import ROUTES_SHAPE, routed_experts
from agentloop.types import GenerateRequest, SamplingParams
from agentloop.values.aux_rows import AuxKind
from agentloop.values.checks import check_generation
from agentloop.values.sampled_tokens import SampledTokens
from agentloop_servers.engines.common.calls import Call
from agentloop_servers.engines.vllm import convert
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.engine

PROMPT, IDS = (3, 1, 4, 1, 5), (9, 2, 6, 5)
STEPS = (1, 2, 1)  # tokens of each step: the second one accepted a draft
CONTEXT = (*PROMPT, *IDS)


def table(start: int, end: int) -> np.ndarray:
    return routed_experts(CONTEXT, start, end).table


def kept(token_id: int) -> list[int]:
    return list(range(token_id, token_id + 1 + token_id % 3))


def state_after(num_steps: int, first: int) -> Any:
    """Return vLLM's state of a request after some steps, with a chunk of experts and of masks for each."""
    num_tokens, chunks, masks, start = 0, [], [], first
    for num_new in STEPS[:num_steps]:
        ids = IDS[num_tokens : num_tokens + num_new]
        num_tokens += num_new
        chunks.append(table(start, len(PROMPT) + num_tokens - 1))
        start = len(PROMPT) + num_tokens - 1
        rows = [kept(one) for one in ids]
        offsets = np.cumsum([0, *map(len, rows)]) if num_new > 1 else None
        masks.append(SamplingMaskLists(np.array([one for row in rows for one in row], np.int32), offsets))
    flat = _Flat(IDS[:num_tokens])
    return SimpleNamespace(
        detokenizer=SimpleNamespace(output_token_ids=list(IDS[:num_tokens]), num_output_tokens=lambda: num_tokens),
        logprobs_processor=SimpleNamespace(logprobs=flat),
        routed_experts_chunks=chunks,
        sampling_mask_chunks=masks,
        weight_version_starts=[("4", 0)],
    )


class _Flat:
    """Logprobs of sampled tokens only, in the form of vLLM's FlatLogprobs."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.token_ids, self.logprobs = list(ids), [-0.5] * len(ids)
        self.start_indices = list(range(len(ids)))

    def __getitem__(self, part: slice) -> _Flat:
        return _Flat(tuple(self.token_ids[part]))


def an_llm(state: Any) -> Any:
    states = {} if state is None else {"r-0": state}
    processor = SimpleNamespace(external_req_ids={"r": ["r-0"]}, request_states=states)
    processor.get_num_queued_tokens = lambda: 0
    return SimpleNamespace(output_processor=processor)


def check_rows(tokens: Delta, first: int) -> None:
    assert tokens.aux is not None
    assert np.array_equal(tokens.aux[AuxKind.ROUTED_EXPERTS].table, table(first, len(CONTEXT) - 1))
    assert tokens.aux[AuxKind.ROUTED_EXPERTS].shape == ROUTES_SHAPE
    assert [row.tolist() for row in tokens.aux[AuxKind.SAMPLING_MASK].rows()] == [kept(one) for one in IDS]


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("read_after", [(3,), (1, 3), (2, 3), (1, 2, 3)])
def test_progress_reports_have_the_rows_of_their_tokens(first: int, read_after: tuple[int, ...]) -> None:
    request = GenerateRequest("r", PROMPT, SamplingParams(9), routes_from=first)
    sampled, joined = SampledTokens(num_prompt=len(PROMPT)), SampledTokens(num_prompt=len(PROMPT))
    for num_steps in read_after:
        num_had = len(sampled)
        convert.add_so_far(sampled, an_llm(state_after(num_steps, first)), request)
        joined.add(sampled.since(num_had))
    check_rows(joined.since(0), first)


def test_a_streamed_output_has_the_experts_of_its_tokens_though_the_state_is_ahead() -> None:
    request, sampled = GenerateRequest("r", PROMPT, SamplingParams(9)), SampledTokens(num_prompt=len(PROMPT))
    state, num_had = state_after(3, 0), 0
    for num_new in STEPS:
        sampled.extend(IDS[num_had : num_had + num_new], [-0.5] * num_new)
        convert.add_routes_so_far(sampled, request, state, num_had)
        num_had += num_new
        sampled.set_spans(convert.spans_from_starts([("4", 0)], num_had))
        assert sampled.aux is not None
        rows = sampled.aux[AuxKind.ROUTED_EXPERTS]
        assert np.array_equal(rows.table, table(0, len(PROMPT) + num_had - 1))


def test_fewer_rows_than_tokens_are_an_error() -> None:
    request, state = GenerateRequest("r", PROMPT, SamplingParams(9)), state_after(3, 0)
    for name in ("routed_experts_chunks", "sampling_mask_chunks"):
        short = SimpleNamespace(**{**vars(state), name: getattr(state, name)[1:]})
        with pytest.raises(MalformedEngineResponse, match="auxiliary rows of"):
            convert.add_so_far(SampledTokens(num_prompt=len(PROMPT)), an_llm(short), request)


def finished(ids: tuple[int, ...], experts: np.ndarray | None, masks: list[list[int]] | None) -> Any:
    mask = None if masks is None else SamplingMask(masks)
    spans = [SimpleNamespace(version="4", start=0, end=len(IDS))]
    completion = CompletionOutput(0, "", list(ids), None, _Flat(ids), experts, finish_reason="length")
    completion.sampling_mask, completion.weight_versions = mask, spans
    return SimpleNamespace(outputs=[completion], finished=True, num_cached_tokens=0, metrics=None)


class EngineOfStates(VllmEngine):
    """An engine whose vLLM has only the state of one request."""

    def set_state(self, state: Any) -> None:
        self._process.llm = an_llm(state)


@pytest.fixture
def engine() -> EngineOfStates:
    made = EngineOfStates(
        VllmConfig(model=".", initial_version=4, device="cuda", routed_experts=True, sampling_mask_top_k=8)
    )
    made.set_state(None)
    return made


@pytest.mark.parametrize("num_streamed", [0, 1, 3])
def test_the_last_output_completes_the_rows_of_a_stream(engine: EngineOfStates, num_streamed: int) -> None:
    request = GenerateRequest("r", PROMPT, SamplingParams(4), routes_from=4)
    call, sampled = Call(request), SampledTokens(num_prompt=len(PROMPT))
    engine.set_state(state_after(3, 4))
    if num_streamed:
        part = finished(IDS[:num_streamed], None, [kept(one) for one in IDS[:num_streamed]])
        part.finished = False
        assert engine.add_piece(sampled, call, part)
    engine.set_state(None)  # vLLM has forgotten the request
    rest = IDS[num_streamed:] if num_streamed else IDS
    last = finished(rest, table(4, len(CONTEXT) - 1), [kept(one) for one in rest])
    if num_streamed:
        assert engine.add_piece(sampled, call, last)
    made = engine.finished(call, last, sampled)
    check_generation(request, made, 100)
    whole = SampledTokens(num_prompt=len(PROMPT))
    whole.add(made)
    check_rows(whole.since(0), 4)


@pytest.mark.parametrize(
    ("experts", "masks", "message"),
    [
        (None, [kept(one) for one in IDS], "without routed experts"),
        (table(0, 8), None, "without a sampling mask"),
        (table(0, 8)[0], [kept(one) for one in IDS], "not of 3 dimensions"),
    ],
)
def test_an_output_without_its_rows_is_an_error(
    engine: EngineOfStates, experts: Any, masks: Any, message: str
) -> None:
    call = Call(GenerateRequest("r", PROMPT, SamplingParams(4)))
    with pytest.raises(MalformedEngineResponse, match=message):
        engine.finished(call, finished(IDS, experts, masks), SampledTokens(num_prompt=len(PROMPT)))
