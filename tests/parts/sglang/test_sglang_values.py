"""Conversion of SGLang's outputs, events and counters; shapes as in SGLang 0.5.17."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentloop.errors import (
    EngineError,
    EngineLost,
    InvalidRequest,
    MalformedEngineResponse,
    Overloaded,
)
from agentloop.types import FinishReason, GenerateRequest, Load, WeightVersionSpan
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import LogprobsMode, SamplingParams
from agentloop_sglang import convert as values
from agentloop_sglang.config import SglangConfig, server_arguments
from agentloop_sglang.requests import (
    RAW_TOKEN_ID,
    FactsFile,
    SchedulerFacts,
    sampling_from_text,
    sampling_to_text,
)

REQUEST = GenerateRequest("r" * 32, (1, 2, 3), SamplingParams(8))
STOP = {"type": "stop", "matched": 2}


def output(ids: list[int], finish: dict[str, Any] | None = None, tops: list[Any] | None = None) -> dict[str, Any]:
    """One output of the tokenizer manager: its lists contain all tokens so far, streamed or not."""
    facts = {
        "id": REQUEST.request_id,
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [(-float(token_id), token_id, None) for token_id in ids],
        "output_token_logprobs_length": len(ids),
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": 32,
    }
    if tops is not None:
        facts["output_top_logprobs"] = tops
    return {"output_ids": ids, "meta_info": facts}


def test_pieces_of_a_stream_are_cut_from_the_growing_list() -> None:
    sampled = SampledTokens()
    ids = [5]
    for number in (6, 7):
        values.add_output(sampled, output(ids), 0)
        values.stamp(sampled, [(0, 0)])
        ids.append(number)  # SGLang appends to the list that it returned
    values.add_output(sampled, output(ids, STOP), 0)
    values.add_output(sampled, output(ids, STOP), 0)
    values.stamp(sampled, [(0, 0)])
    generation = values.to_generation(REQUEST, output(ids, STOP), sampled, Load())
    assert generation.token_ids == (5, 6, 7)
    assert generation.logprobs == (-5.0, -6.0, -7.0)
    assert generation.finish_reason is FinishReason.STOP
    assert generation.cached_tokens == 3


def test_alternatives_and_raw_logprobs() -> None:
    sampled = SampledTokens(LogprobsMode.BOTH)
    row = [(-0.5, RAW_TOKEN_ID, None), (-0.1, 5, None), (-float("inf"), 6, None), (-3.0, 7, None)]
    values.add_output(sampled, output([5], STOP, [row]), 2)
    values.stamp(sampled, [(0, 0)])
    delta = sampled.since(0)
    assert delta.raw_logprobs == (-0.5,)
    assert delta.top_logprobs == (((5, -0.1),),)


def test_what_does_not_belong_together_is_refused() -> None:
    wrong = output([5, 6])
    wrong["meta_info"]["output_token_logprobs"][1] = (-6.0, 9, None)
    with pytest.raises(MalformedEngineResponse, match="differ from the sampled tokens"):
        values.add_output(SampledTokens(), wrong, 0)
    with pytest.raises(MalformedEngineResponse, match="without its raw logprob"):
        values.add_output(SampledTokens(LogprobsMode.BOTH), output([5], None, [[(-1.0, 5, None)]]), 0)
    with pytest.raises(MalformedEngineResponse, match="alternatives for 1 tokens, but sampled 2"):
        values.add_output(SampledTokens(), output([5, 6], None, [[(-1.0, 5, None)]]), 1)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (
            {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"},
            InvalidRequest,
        ),
        ({"type": "abort", "message": "queue is full", "status_code": 503}, Overloaded),
        ({"type": "abort", "message": "gone", "status_code": 500}, EngineError),
        ({"type": "something"}, EngineError),
        (None, EngineError),
    ],
)
def test_ends_that_are_errors(reason: dict[str, Any] | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        values.finish_reason(REQUEST, output([5], reason))


def test_ends_that_are_answers() -> None:
    found = [
        values.finish_reason(REQUEST, output([5], reason))
        for reason in (
            STOP,
            {"type": "length", "length": 8},
            {"type": "abort", "message": "Abort in waiting queue"},
        )
    ]
    assert found == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]
    aborted = values.to_generation(REQUEST, None, SampledTokens(), Load())
    assert (aborted.finish_reason, aborted.token_ids) == (FinishReason.ABORT, ())


def test_errors_of_sglang_become_ours() -> None:
    class HTTPException(Exception):  # like FastAPI's class
        status_code, detail = 503, "The request queue is full."

    assert isinstance(values.translate(ValueError("Duplicate request ID")), InvalidRequest)
    assert isinstance(values.translate(HTTPException()), Overloaded)
    assert isinstance(values.translate(ConnectionResetError("gone")), EngineLost)
    assert isinstance(values.translate(RuntimeError("other")), EngineError)


def spans(starts: list[tuple[int, int]], num_tokens: int) -> tuple[WeightVersionSpan, ...]:
    sampled = SampledTokens()
    sampled.extend(list(range(num_tokens)), [0.0] * num_tokens)
    values.stamp(sampled, starts)
    return sampled.weight_versions


def test_spans_from_the_counts_of_commits() -> None:
    starts = [(3, 0)]
    values.start_version(starts, 4, 5)
    values.start_version(starts, 5, 5)  # nothing was sampled under version 4
    values.start_version(starts, 6, 9)
    assert spans(starts, 12) == (
        WeightVersionSpan(3, 0, 5),
        WeightVersionSpan(5, 5, 9),
        WeightVersionSpan(6, 9, 12),
    )
    # A report may be older than a commit: its counts are older.
    assert spans(starts, 4) == (WeightVersionSpan(3, 0, 4),)
    unbegun = [(3, 0)]
    values.start_version(unbegun, 4, 0)
    assert spans(unbegun, 2) == (WeightVersionSpan(4, 0, 2),)


def test_the_facts_file(tmp_path: Path) -> None:
    path = str(tmp_path / "facts")
    reader = FactsFile(path, is_new=True)
    assert reader.read() == SchedulerFacts()
    writer = FactsFile(path)
    writer.write(SchedulerFacts(1, 2, 3, 4, 5, 6))
    assert reader.read() == SchedulerFacts(1, 2, 3, 4, 5, 6)
    writer.close()
    reader.close()


def test_sampling_survives_the_way() -> None:
    sampling = SamplingParams(9, temperature=0.0, seed=2**63 - 1, stop_token_ids=(4, 5), logit_bias=((3, -1.5),))
    assert sampling_from_text(sampling_to_text(sampling)) == sampling


def config(tmp_path: Path, **changed: Any) -> SglangConfig:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model))
    return SglangConfig(**{"model": str(tmp_path), "initial_version": 0, **changed})


def test_the_arguments(tmp_path: Path) -> None:
    arguments = server_arguments(config(tmp_path, kv_cache_memory_bytes=128 * 1000, max_model_len=100))
    assert arguments["max_total_tokens"] == 1000  # 2 layers, keys and values of 2 heads of 8 in bfloat16
    assert arguments["context_length"] > 100
    assert arguments["skip_tokenizer_init"]
    assert "enable_memory_saver" not in arguments
    assert not arguments["enable_deterministic_inference"]
    assert "enable_priority_scheduling" not in arguments
    by_priority = server_arguments(config(tmp_path, scheduling_policy="priority"))
    assert by_priority["enable_priority_scheduling"]
    assert by_priority["schedule_low_priority_values_first"]  # like vLLM
    assert server_arguments(config(tmp_path, can_sleep=True))["enable_memory_saver"]
    assert server_arguments(config(tmp_path, batch_invariant=True))["enable_deterministic_inference"]
    spread = server_arguments(config(tmp_path, tensor_parallel_size=2, expert_parallel=True))
    assert (spread["ep_size"], arguments["ep_size"]) == (2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_version": None},
        {"load_format": "dummy"},
        {"device": "tpu"},
        {"device": "cpu", "can_sleep": True},
        {"device": "cpu", "batch_invariant": True},
        {"dtype": "int8"},
        {"dtype": "float32"},
        {"progress_tokens": 0},
        {"lora_rank": 8},
    ],
)
def test_a_bad_configuration_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"initial_version|device|CPU|dtype|progress_tokens|lora_rank"):
        config(tmp_path, **wrong)
