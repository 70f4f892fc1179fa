"""Invalid requests, generations and checkpoints, with one wrong field at a time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentloop.engine.interface import EngineInfo
from agentloop.errors import (
    CheckpointUnreadable,
    ContextLengthExceeded,
    InvalidRequest,
    MalformedEngineResponse,
    UnsupportedParameter,
)
from agentloop.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerateRequest,
    Generation,
    SamplingParams,
    WeightVersionSpan,
)
from agentloop.values.capabilities import CONSTRAINTS
from agentloop.values.checks import check_checkpoint, check_generation, check_request, room_tokens
from agentloop.values.sampling import LogprobsMode

INFO = EngineInfo("fake", max_context_tokens=10, vocab_size=100, block_size=4, kv_capacity_tokens=40, max_running=2)
REQUEST = GenerateRequest("r", (1, 2, 99), SamplingParams(max_tokens=3, stop_token_ids=(7,)))
GOOD = Generation(
    "r",
    (5, 6, 7),
    (-0.5, 0.0, -3.0),
    (WeightVersionSpan(0, 0, 1), WeightVersionSpan(2, 1, 3)),
    FinishReason.STOP,
    cached_tokens=2,
)


def test_a_good_request_passes_and_knows_its_room() -> None:
    check_request(REQUEST, INFO)
    assert room_tokens(REQUEST, INFO) == 3
    assert room_tokens(replace(REQUEST, token_ids=(1,) * 8), INFO) == 2


@pytest.mark.parametrize(
    ("param", "token_ids"),
    [("token_ids", ()), ("token_ids", (1, -1)), ("token_ids", (100,)), ("token_ids", (1, 1 << 70))],
)
def test_bad_ids_are_refused(param: str, token_ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(REQUEST, token_ids=token_ids), INFO)
    assert caught.value.param == param


def test_a_prompt_needs_room_for_one_token() -> None:
    check_request(replace(REQUEST, token_ids=(1,) * 9), INFO)
    with pytest.raises(ContextLengthExceeded):
        check_request(replace(REQUEST, token_ids=(1,) * 10), INFO)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 0.0099),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_tokens", -1),
        ("min_tokens", 4),
        ("frequency_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 11.0),
        ("num_top_logprobs", -1),
        ("num_top_logprobs", 21),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", tuple((index, 0.0) for index in range(1025))),
        ("constraint", Constraint(ConstraintKind.JSON_OBJECT)),
    ],
)
def test_bad_sampling_is_refused(param: str, value: object) -> None:
    changes: dict[str, Any] = {param: value}
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(REQUEST, sampling=replace(REQUEST.sampling, **changes)), INFO)
    assert caught.value.param == param


def test_a_constraint_needs_an_engine_for_it_a_bound_and_an_end() -> None:
    info = replace(INFO, features=INFO.features | CONSTRAINTS)
    sampling = replace(REQUEST.sampling, constraint=Constraint(ConstraintKind.REGEX, "a"))
    check_request(replace(REQUEST, sampling=sampling), info)
    for change, param in (
        ({"constraint": Constraint(ConstraintKind.REGEX, "a" * 65_537)}, "constraint"),
        ({"stop_token_ids": ()}, "stop_token_ids"),
        ({"min_tokens": 1}, "min_tokens"),
    ):
        changes: dict[str, Any] = change
        with pytest.raises(InvalidRequest) as caught:
            check_request(replace(REQUEST, sampling=replace(sampling, **changes)), info)
        assert caught.value.param == param
    with pytest.raises(UnsupportedParameter):
        check_request(replace(REQUEST, sampling=sampling), INFO)


TOP_REQUEST = replace(REQUEST, sampling=replace(REQUEST.sampling, num_top_logprobs=2))
TOP = (((5, -0.5), (1, -2.0)), ((6, 0.0),), ((1, -0.1), (2, -0.1)))


def test_alternatives_belong_to_each_token_and_only_where_asked_for() -> None:
    check_generation(TOP_REQUEST, replace(GOOD, top_logprobs=TOP), 100)
    check_generation(TOP_REQUEST, Generation("r", (), (), (), FinishReason.ABORT), 100)
    with pytest.raises(MalformedEngineResponse):
        check_generation(REQUEST, replace(GOOD, top_logprobs=TOP), 100)


@pytest.mark.parametrize(
    "top",
    [
        (),
        ((1, -0.1), (2, -0.2), (3, -0.3)),
        ((1, -0.2), (2, -0.1)),
        ((1, math.nan),),
        ((1, -math.inf),),
        ((1, -9999.0),),
        ((1, 0.1),),
        ((100, -0.1),),
        ((-1, -0.1),),
    ],
)
def test_malformed_alternatives_are_refused(top: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(MalformedEngineResponse):
        check_generation(TOP_REQUEST, replace(GOOD, top_logprobs=(*TOP[:2], top)), 100)
    with pytest.raises(MalformedEngineResponse):
        check_generation(TOP_REQUEST, replace(GOOD, top_logprobs=TOP[:2]), 100)


@pytest.mark.parametrize(
    "generation",
    [
        GOOD,
        replace(GOOD, token_ids=(5, 6, 8), finish_reason=FinishReason.LENGTH),
        replace(GOOD, token_ids=(5, 6, 8), finish_reason=FinishReason.ABORT),
        replace(GOOD, logprobs=(-0.5, 9e-4, -3.0)),
        Generation("r", (), (), (), FinishReason.ABORT),
    ],
)
def test_a_good_generation_passes(generation: Generation) -> None:
    check_generation(REQUEST, generation, 100)


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"logprobs": (-0.5, 0.0)},
        {"logprobs": (-0.5, 0.0, -1.0, -1.0)},
        {"logprobs": (-0.5, 0.01, -3.0)},
        {"logprobs": (-0.5, math.nan, -3.0)},
        {"logprobs": (-0.5, math.inf, -3.0)},
        {"logprobs": (-0.5, -math.inf, -3.0)},
        {"logprobs": (-0.5, -9999.0, -3.0)},
        {"token_ids": (100, 6, 7)},
        {"token_ids": (-1, 6, 7)},
        {"token_ids": (5, 6, 8)},
        {"token_ids": (), "logprobs": (), "weight_versions": ()},
        {"token_ids": (), "logprobs": (), "finish_reason": FinishReason.ABORT},
        {"token_ids": (5, 6, 8, 7), "logprobs": (0.0,) * 4, "weight_versions": (WeightVersionSpan(0, 0, 4),)},
        {"cached_tokens": -1},
        {"cached_tokens": 4},
        {"raw_logprobs": (-0.5, 0.0, -3.0)},
        {"logprobs_mode": LogprobsMode.BOTH},
        {"logprobs_mode": LogprobsMode.BOTH, "raw_logprobs": (-0.5, 0.0)},
        {"logprobs_mode": LogprobsMode.BOTH, "raw_logprobs": (-0.5, 0.0, math.nan)},
        {"weight_versions": ()},
        {"weight_versions": (WeightVersionSpan(0, 0, 2),)},
        {"weight_versions": (WeightVersionSpan(0, 0, 4),)},
        {"weight_versions": (WeightVersionSpan(0, 1, 3),)},
        {"weight_versions": (WeightVersionSpan(2, 0, 1), WeightVersionSpan(0, 1, 3))},
        {"weight_versions": (WeightVersionSpan(0, 0, 2), WeightVersionSpan(1, 1, 3))},
        {"weight_versions": (WeightVersionSpan(0, 0, 0), WeightVersionSpan(0, 0, 3))},
    ],
)
def test_a_malformed_generation_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedEngineResponse):
        check_generation(REQUEST, replace(GOOD, **change), 100)


def _file(header: bytes, num_data_bytes: int, length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + bytes(num_data_bytes)


_HEADER = json.dumps(
    {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
).encode()


def test_checkpoint_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(_file(_HEADER, 8))
    assert [path.name for path in check_checkpoint(str(tmp_path))] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        _file(b"{", 0),
        _file(b"[]", 0),
        _file(b'{"w": 1}', 0),
        _file(b'{"w": {}}', 0),
        _file(b'{"w": {"data_offsets": []}}', 0),
        _file(b'{"w": {"data_offsets": [0, "8"]}}', 8),
        _file(_HEADER, 7),
        _file(_HEADER, 9),
        _file(_HEADER, 8, length=2**63),
        _file(_HEADER, 8, length=0),
    ],
)
def test_a_broken_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(_file(_HEADER, 8))
    (tmp_path / "b.safetensors").write_bytes(content)
    with pytest.raises(CheckpointUnreadable):
        check_checkpoint(str(tmp_path))
