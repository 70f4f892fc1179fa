"""The exact arguments that vLLM receives in each mode and form of parallelism.

These tests cover configurations that this machine cannot run (several GPUs, sleep): every name exists in the
installed vLLM, and the values are the ones written here.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import pytest

from agentloop.errors import UnsupportedParameter
from agentloop.images import MAX_IMAGES
from agentloop.types import Constraint, ConstraintKind, SamplingParams
from agentloop.values import codec
from agentloop.values.capabilities import CONSTRAINTS, NOT_SPECULATIVE, Feature
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.engines.vllm.config import (
    HostShare,
    VllmConfig,
    engine_arguments,
    graph_sizes,
    prepare_environment,
)
from agentloop_servers.engines.vllm.convert import sampling_params
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.engines.vllm.scheduler import SCHEDULER
from agentloop_servers.processes.engine_parts import build_engine, takes_images, vllm_config
from tests.support.records.vision_folder import write_vision_folder

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # imports vLLM

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "examples" / "tiny_policy" / "v0"


def slots(num_requests: int) -> dict[str, object]:
    """Return one slot more than requests, for the canary check."""
    return {"max_num_seqs": num_requests + 1, "max_num_active_seqs": num_requests}


ALWAYS = {
    "model": str(MODEL),
    "load_format": "auto",
    "dtype": "bfloat16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "max_model_len": 1024,
    "scheduler_cls": SCHEDULER,
    **slots(512),
    "scheduling_policy": "fcfs",
    "block_size": 32,
    "tensor_parallel_size": 1,
    "seed": 0,
    "kv_cache_memory_bytes": None,
    "enforce_eager": False,
    "skip_tokenizer_init": False,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
    "enable_log_requests": False,
    "max_logprobs": 20,
}
CUDA = ALWAYS | {
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": 2048,
    "cudagraph_capture_sizes": graph_sizes(2048),
}
LORA = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1, "max_cpu_loras": 1}
CPU = {"device": "cpu", "kv_cache_mib": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LOAD = {"method": "ngram_gpu", "num_speculative_tokens_per_batch_size": [(1, 16, 3), (17, 513, 0)]}
ALWAYS_DRAFTS = {"num_tokens": 3, "max_running": 64}

CASES = {
    "standalone": ({"mode": "standalone"}, CUDA),
    "debug": ({"mode": "debug"}, CUDA),
    "experts and masks": (
        {"engine": {"routed_experts": True, "sampling_mask_top_k": 64}},
        CUDA | {"enable_return_routed_experts": True, "return_sampling_mask": True},
    ),
    "alternatives": ({"engine": {"max_logprobs": 256, "logprobs_mode": "both"}}, CUDA | {"max_logprobs": 257}),
    "hybrid": ({"mode": "hybrid"}, CUDA | {"enable_sleep_mode": True}),
    "colocated": ({"mode": "colocated"}, CUDA | {"enable_sleep_mode": True}),
    "tensor parallel": (
        {"engine": {"tensor_parallel_size": 4}},
        CUDA | {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"},
    ),
    "data parallel": (
        {"engine": {"data_parallel_size": 2}},
        CUDA | {"data_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    "expert parallel": (
        {"engine": {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel": True}},
        CUDA
        | {
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "distributed_executor_backend": "mp",
        },
    ),
    "hybrid, expert parallel": (
        {"mode": "hybrid", "engine": {"tensor_parallel_size": 2, "expert_parallel": True}},
        CUDA
        | {
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "distributed_executor_backend": "mp",
            "enable_sleep_mode": True,
        },
    ),
    "quantised": (
        {"engine": {"quantization": "fp8", "kv_cache_dtype": "fp8"}},
        CUDA | {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"},
    ),
    "quantised by channel, adapters": (
        {"engine": {"quantization": "fp8_per_channel", "lora_rank": 16}},
        CUDA | LORA | {"quantization": "fp8_per_channel"},
    ),
    "adapters": ({"engine": {"lora_rank": 16}}, CUDA | LORA),
    "adapters by name": (
        {"engine": {"lora_rank": 16, "max_loras": 4}},
        CUDA | LORA | {"max_loras": 8, "max_cpu_loras": 8},
    ),
    "adapters, tensor parallel": (
        {"engine": {"lora_rank": 16, "tensor_parallel_size": 2}},
        CUDA | LORA | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    "cpu": (
        {"mode": "debug", "engine": CPU},
        ALWAYS
        | {"kv_cache_memory_bytes": 64 * 2**20, "enforce_eager": True, "enable_chunked_prefill": False}
        | slots(256),
    ),
    "drafts of few requests": (
        {"engine": {"speculative": {"num_tokens": 3, "max_running": 16}}},
        CUDA | {"speculative_config": NGRAM | LOAD},
    ),
    "drafts at any load, cpu": (
        {
            "mode": "debug",
            "engine": {**CPU, "max_running": 64, "speculative": {"num_tokens": 3, "max_running": 64}},
        },
        ALWAYS
        | {"kv_cache_memory_bytes": 64 * 2**20, "enforce_eager": True, "enable_chunked_prefill": False}
        | slots(64)
        | {"speculative_config": NGRAM},
    ),
    "dummy": ({"engine": {"load_format": "dummy"}}, CUDA | {"load_format": "dummy"}),
    "few seats": (
        {"engine": {"max_running": 64}},
        CUDA | slots(64) | {"cudagraph_capture_sizes": [1, 2, 4, *range(8, 257, 8)]},
    ),
    "many seats": (
        {"engine": {"max_running": 2000, "max_graph_tokens": 1100}},
        CUDA
        | slots(2000)
        | {"max_num_batched_tokens": 4000}
        | {"cudagraph_capture_sizes": [*graph_sizes(1024), 1088, 1100]},
    ),
    "eager": (
        {"engine": {"enforce_eager": True, "max_step_tokens": 8192}},
        {name: value for name, value in CUDA.items() if name != "cudagraph_capture_sizes"}
        | {"enforce_eager": True, "max_num_batched_tokens": 8192},
    ),
}


def configured(changed: dict[str, object]) -> VllmConfig:
    return vllm_config(ServiceConfig.model_validate({"model": str(MODEL), **changed}))


@pytest.mark.parametrize(("changed", "expected"), CASES.values(), ids=CASES.keys())
def test_the_arguments_are_exactly_these(changed, expected):
    arguments = engine_arguments(configured(changed))
    assert arguments.pop("structured_outputs_config").backend == "xgrammar"
    module, _, name = arguments.pop("worker_extension_cls").rpartition(".")
    assert module.startswith("agentloop_servers.weight_transfer.")
    assert name
    assert arguments == expected


def test_a_host_of_several_says_where_all_ranks_meet(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_HOST_IP": "192.168.0.1"})
    config = configured({"engine": {"tensor_parallel_size": 4, "hosts": 2}})
    prepare_environment(config)
    assert os.environ["VLLM_HOST_IP"] == "192.168.0.1"
    config = dataclasses.replace(config, share=HostShare(2, 1, "10.0.0.2", "10.0.0.1", 4000))
    prepare_environment(config)
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.2"
    meeting = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 4000}
    assert meeting.items() <= engine_arguments(config).items()
    assert codec.decode(codec.encode(config), VllmConfig) == config


def test_a_full_batch_of_decodes_with_the_prefill_of_new_turns_runs_as_a_graph():
    """E1: 505 decodes and a prefill of 8 tokens did not fit the graphs, whose largest size was 512."""
    config = configured({})
    sizes = graph_sizes(config.max_graph_tokens)
    assert config.max_num_seqs == 512
    assert sizes[-1] == config.max_step_tokens == 2048
    assert max(second / first for first, second in itertools.pairwise(sizes) if first >= 64) <= 1.125  # padding
    assert len(sizes) == 99


@pytest.mark.parametrize("mode", ["sampled", "raw", "both"])
def test_the_logprobs_mode_reaches_either_engine(mode):
    """vLLM's own mode is always the same, because its raw modes use logits that a grammar has masked."""
    for kind in ("vllm", "simulated"):
        config = ServiceConfig.model_validate(
            {"model": str(MODEL), "engine": {"kind": kind, "logprobs_mode": mode}}
        )
        if kind == "simulated":
            assert build_engine(config).info.logprobs_mode == mode
        else:
            assert vllm_config(config).logprobs_mode == mode
            assert engine_arguments(vllm_config(config))["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(("changed", "expected"), CASES.values(), ids=CASES.keys())
def test_vllm_takes_them(changed, expected):
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - slow to import, and only wanted here

    arguments = engine_arguments(configured(changed))
    assert set(arguments) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    built = AsyncEngineArgs(**arguments)
    assert {name: getattr(built, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["hybrid", "judge", "moe", "standalone", "cpu"])
def test_a_shipped_config_gives_arguments(name):
    config = ServiceConfig.load(ROOT / "servers" / f"{name}.yaml").model_copy(update={"model": str(MODEL)})
    arguments = engine_arguments(vllm_config(config))
    assert arguments.get("enable_sleep_mode", False) == (name in ("hybrid", "judge"))
    assert arguments.get("enable_expert_parallel", False) == (name == "moe")
    assert vllm_config(config).num_workers == (2 if name == "moe" else 1)


def test_what_the_adapter_needs_beside_the_arguments():
    config = configured({"mode": "hybrid", "engine": {"stage_timeout_s": 5, "commit_timeout_s": 6, "lora_rank": 8}})
    assert (config.weight_staging, config.stage_timeout_s, config.commit_timeout_s) == ("none", 5, 6)
    assert (config.can_sleep, config.lora_rank) == (True, 8)
    with pytest.raises(ValueError, match="can_sleep is not supported on CPU"):
        dataclasses.replace(configured({"mode": "debug", "engine": CPU}), can_sleep=True)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_mode_in_which_batches_do_not_matter_is_vllm_s_own(wanted, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    prepare_environment(configured({"engine": {"batch_invariant": wanted}}))
    assert os.environ.get("VLLM_BATCH_INVARIANT") == ("1" if wanted else None)


@pytest.mark.parametrize("key", [{"routed_experts": True}, {"sampling_mask_top_k": 64}, {}])
def test_experts_and_masks_need_the_second_model_runner_and_masks_an_engine_without_greedy_sampling(
    key, monkeypatch
):
    monkeypatch.setattr(os, "environ", {})
    config = configured({"engine": key})
    prepare_environment(config)
    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if key else None)
    assert (Feature.GREEDY in config.features) == ("sampling_mask_top_k" not in key)


def test_a_model_with_vision_has_bounds_and_no_cache_of_processed_images(tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - slow to import, and only wanted here

    wanted = {"limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0}, "mm_processor_cache_gb": 0}
    seeing = ServiceConfig(model=str(write_vision_folder(tmp_path)))
    arguments = engine_arguments(vllm_config(seeing))
    assert wanted.items() <= arguments.items()
    AsyncEngineArgs(**arguments)
    blind = configured({"mode": "debug"})
    assert not wanted.keys() & engine_arguments(blind).keys()
    assert takes_images(seeing)
    assert not takes_images(ServiceConfig(model=str(MODEL)))
    simulated = seeing.engine.model_copy(update={"kind": "simulated"})
    assert not takes_images(seeing.model_copy(update={"engine": simulated}))


def test_with_drafts_an_engine_lacks_features_and_on_a_gpu_constraints():
    plain, drafting = configured({}), configured({"engine": {"speculative": {}}})
    assert plain.features - drafting.features == NOT_SPECULATIVE | CONSTRAINTS
    assert dataclasses.replace(drafting, device="cpu", kv_cache_memory_bytes=1).features >= CONSTRAINTS


def test_with_drafts_a_constraint_stops_at_the_tokenizers_end():
    constrained = SamplingParams(8, constraint=Constraint(ConstraintKind.REGEX, "a"), stop_token_ids=(5,))
    assert sampling_params(constrained, 8, is_streamed=False, eos_token_id=5, can_bias=False).logit_bias is None
    with pytest.raises(UnsupportedParameter, match="tokenizer's end") as caught:
        sampling_params(constrained, 8, is_streamed=False, eos_token_id=6, can_bias=False)
    assert caught.value.param == "stop_token_ids"


def test_without_a_tokenizer_an_engine_does_not_constrain(tmp_path):
    with_one = configured({"mode": "standalone"})
    without = dataclasses.replace(with_one, model=str(tmp_path))
    assert (with_one.can_constrain, without.can_constrain) == (True, False)
    assert engine_arguments(without)["skip_tokenizer_init"]


async def test_a_device_without_fp8_is_told_at_the_start():
    """This machine's vLLM is built for CPUs, which have no FP8 support."""
    engine = VllmEngine(configured({"engine": {"quantization": "fp8"}}))
    with pytest.raises(UnsupportedParameter, match="does not support FP8") as caught:
        await engine.start()
    assert caught.value.param == "quantization"
