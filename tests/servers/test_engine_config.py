"""The engines of a config: engine pools, allowed combinations, and the environments in which they start."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentloop.errors import InvalidRequest
from agentloop.values.capabilities import Feature
from agentloop_servers.app import application
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.processes.engine_parts import build_engine, engine_actor_options, max_logprobs, vllm_config
from agentloop_servers.processes.settings import replica_config, sized, weight_config

MODEL = "examples/tiny_policy/v0"
TWO = [{"kind": "simulated"}, {"kind": "simulated", "name": "short", "max_context_tokens": 256, "replicas": 2}]


def service(*engines: dict[str, object], **changed: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": MODEL, "engines": list(engines), **changed})


def second_environment(folder: Path) -> Path:
    """Create another virtual environment with the packages of this one. Returns its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Include the paths that its own .pth files add: the packages of an editable installation.
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def test_a_fleet_of_one_kind_is_one_entry():
    config = ServiceConfig.model_validate({"model": MODEL, "replicas": 3, "engine": {"kind": "simulated"}})
    (entry,) = config.entries
    assert (entry.name, entry.kind, entry.replicas, config.num_replicas) == ("simulated", "simulated", 3, 3)


def test_entries_have_their_own_sizes():
    config = service(*TWO)
    first, second = config.entries
    assert [entry.name for entry in config.entries] == ["simulated", "short"]
    assert config.num_replicas == 3
    assert model_sizes(config).max_context_tokens == 1024  # the longest of the engines
    assert build_engine(config, second).info.max_context_tokens == 256
    assert build_engine(config, first).info.max_context_tokens == 1024
    assert replica_config(config, second).entry == "short"


def test_a_config_of_entries_survives_its_run_directory(tmp_path):
    config = sized(service(*TWO, {"kind": "simulated", "name": "more", "withheld": ["seed"]}), tmp_path)
    assert [entry.num_seats for entry in config.entries] == [256, 256, 256]
    assert ServiceConfig.model_validate_json(config.model_dump_json()) == config
    assert config.entries[2].withheld == [Feature.SEED]


KV = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
INNER = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [KV]}}
ON_CPU = {"device": "cpu", "kv_cache_mib": 64}


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (
            {"routed_experts": True, "kind": "sglang"},
            "routed_experts is supported by vLLM on GPUs only, not by sglang",
        ),
        (
            {"routed_experts": True, **ON_CPU},
            "routed_experts is supported by vLLM on GPUs only, not by vllm on cpu",
        ),
        ({"sampling_mask_top_k": 8, **ON_CPU}, "sampling_mask_top_k is supported by vLLM on GPUs only"),
        (
            {"routed_experts": True, "logprobs_mode": "raw"},
            "routed_experts requires logprobs_mode sampled, not raw",
        ),
        ({"sampling_mask_top_k": 8, "logprobs_mode": "both"}, "sampling_mask_top_k requires logprobs_mode sampled"),
        ({"routed_experts": True, "speculative": {}}, "routed_experts cannot be combined with speculative"),
        ({"sampling_mask_top_k": 0}, "greater than or equal to 1"),
        (
            {"routed_experts": True, "arguments": {"decode_context_parallel_size": 2}},
            "routed_experts cannot be combined with arguments.decode_context_parallel_size 2",
        ),
        (
            {"routed_experts": True, "arguments": {"kv_transfer_config": KV}},
            "routed_experts cannot be combined with arguments.kv_transfer_config NixlConnector",
        ),
        ({"routed_experts": True, "arguments": {"kv_transfer_config": INNER}}, "kv_transfer_config NixlConnector"),
    ],
)
def test_what_an_engine_refuses_with_auxiliary_rows_is_refused_in_the_config(engine, named):
    with pytest.raises(ValidationError, match=named):
        service(engine)


def test_auxiliary_rows_are_recorded_by_all_pools_or_none():
    for key, value in (("routed_experts", True), ("sampling_mask_top_k", 8)):
        with pytest.raises(ValidationError, match=f"engine short has {key} .* and simulated {value}"):
            service({**TWO[0], key: value}, TWO[1])
        engine = build_engine(service({**TWO[0], key: value}, {**TWO[1], key: value}))
        assert (Feature.GREEDY in engine.info.features) == (key == "routed_experts")


def test_the_number_of_alternatives_is_a_limit_of_all_pools():
    for limit, served in ((-1, 1024), (256, 256), (1, 1)):
        config = service(*({**one, "max_logprobs": limit} for one in TWO))
        assert max_logprobs(config) == served
        assert build_engine(config).info.max_logprobs == served
    for wrong in (0, -2, 257):
        with pytest.raises(ValidationError, match="max_logprobs"):
            service({"kind": "simulated", "max_logprobs": wrong})
    with pytest.raises(ValidationError, match="engine short has max_logprobs 20 and simulated 256"):
        service({**TWO[0], "max_logprobs": 256}, TWO[1])


def test_a_dense_model_has_no_routed_experts(tmp_path):
    config = service({"routed_experts": True})
    with pytest.raises(InvalidRequest, match="routed_experts requires a mixture of experts") as refused:
        application(config, tmp_path)
    assert refused.value.param == "engine.routed_experts"


def test_rows_that_cannot_be_packed_are_refused_in_the_config(monkeypatch):
    monkeypatch.setattr("agentloop_servers.config.engines.find_spec", lambda name: None)
    with pytest.raises(ValidationError, match="routed_experts needs the package zstandard"):
        service({"kind": "simulated", "routed_experts": True})


def test_deadlines_are_those_of_the_slowest():
    config = service({"kind": "simulated", "stage_timeout_s": 30}, {"kind": "simulated", "name": "b"})
    assert weight_config(config).stage_timeout_s > 600


def test_each_kind_gets_its_own_configuration():
    other = {"kv_cache_dtype": "fp8", "block_size": 64, "scheduling_policy": "priority", "name": "other"}
    config = service({"kind": "vllm", "weight_staging": "host"}, {"kind": "vllm", **other}, mode="hybrid")
    first, second = (vllm_config(config, entry) for entry in config.entries)
    assert (first.weight_staging, first.block_size) == ("host", 32)
    assert (second.weight_staging, second.block_size) == ("none", 64)
    assert (first.scheduling_policy, second.scheduling_policy) == ("fcfs", "priority")
    assert (first.kv_cache_dtype, second.kv_cache_dtype) == ("auto", "fp8")
    assert first.can_sleep
    assert second.can_sleep


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engines": TWO, "engine": {"kind": "simulated"}}, "`engines` replaces `engine` and `replicas`"),
        ({"engines": TWO, "replicas": 2}, "`engines` replaces `engine` and `replicas`"),
        ({"engines": []}, "at least 1 item"),
        ({"engines": [{"kind": "simulated"}, {"kind": "simulated"}]}, "two engines are named simulated"),
        (
            {"engines": [{"kind": "simulated"}, {"kind": "vllm"}]},
            "only one of the engines simulated and vllm is simulated",
        ),
        (
            {"engines": [{"kind": "vllm", "lora_rank": 8}, {"kind": "sglang"}]},
            "only one of the engines vllm and sglang has a lora_rank",
        ),
        (
            {"engines": [{"lora_rank": 8, "max_loras": 4}, {"lora_rank": 8, "name": "other"}]},
            "engine other has max_loras None and vllm 4",
        ),
        (
            {"engines": [{"kind": "vllm"}, {"kind": "sglang", "logprobs_mode": "both"}]},
            "engine sglang has logprobs_mode both and vllm sampled",
        ),
        (
            {"engines": [{"kind": "vllm"}, {"kind": "vllm", "name": "b", "quantization": "fp8"}]},
            "engine b has quantization fp8 and vllm None",
        ),
        ({"engines": [{"kind": "vllm", "step_times": "h200-qwen3-4b"}]}, "engines.step_times was removed"),
        ({"engines": [{"kind": "vllm", "model": "other"}]}, "all engines serve the service's `model`"),
        ({"engines": [{"kind": "vllm", "name": "No Spaces"}]}, "should match pattern"),
        (
            {"engines": [{"kind": "vllm", "settings": {"any": 1}}]},
            "settings: the kind vllm has no additional settings",
        ),
        ({"engines": [{"attention_backend": "fa3"}]}, "use `settings.attention_backend`"),
        (
            {"engines": [{"kind": "sglang", "data_parallel_size": 2}]},
            "data_parallel_size 2 is not supported by SGLang",
        ),
        (
            {"engines": [{"kind": "vllm"}, {"kind": "sglang", "load_format": "dummy"}], "mode": "debug"},
            "engine sglang: mode debug requires load_format auto",
        ),
        ({"engines": [{"kind": "vllm", "environment": {}}]}, "environment is empty: set py_executable"),
        (
            {"engines": [{"kind": "vllm", "environment": {"runtime_env": {"py_executable": "python"}}}]},
            "py_executable is a key of environment, next to runtime_env",
        ),
        (
            {"engines": [{"kind": "vllm", "environment": {"runtime_env": {"env_vars": {"A": 1}}}}]},
            "env_vars of runtime_env must map names to strings",
        ),
    ],
)
def test_entries_that_cannot_be_are_one_clear_line(tmp_path, changed, message):
    path = tmp_path / "config.yaml"
    path.write_text(str({"applications": [{"args": {"model": MODEL, **changed}}]}))
    with pytest.raises(InvalidRequest) as caught:
        ServiceConfig.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_ray_is_told_of_an_environment():
    environment = {"py_executable": "/opt/b/bin/python", "runtime_env": {"env_vars": {"PYTHONPATH": "/b"}}}
    config = service({"kind": "sglang", "environment": environment}, {"kind": "vllm", "device": "cuda"})
    options = engine_actor_options(config, config.entries[0])
    assert options["runtime_env"] == {"py_executable": "/opt/b/bin/python", "env_vars": {"PYTHONPATH": "/b"}}
    assert options["num_gpus"] == 1
    assert "runtime_env" not in engine_actor_options(config, config.entries[1])


def test_an_environment_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    config = service({"kind": "simulated", "name": "other", "environment": {"py_executable": "/no/such/python -u"}})
    with pytest.raises(InvalidRequest, match="engine other: the command /no/such/python"):
        application(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "sglang", "speculative": {}}, "SGLang verifies drafts outside of the sampler"),
        ({"data_parallel_size": 2, "speculative": {}}, "vLLM ignores speculative.max_running"),
        ({"speculative": {"method": "eagle3"}}, r"engine\.speculative\.method was removed: delete the key"),
        ({"speculative": {"model": "/draft"}}, r"engine\.speculative\.model was removed: delete the key"),
    ],
)
def test_drafts_where_they_would_not_be_exact_are_refused(engine, message):
    with pytest.raises(ValidationError, match=message):
        ServiceConfig.model_validate({"model": MODEL, "engine": engine})
