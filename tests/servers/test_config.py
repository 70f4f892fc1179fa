"""The shipped Serve configs run under `serve deploy` and `agentloop serve`; invalid configs are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ray import serve

from agentloop.engine.interface import WeightUpdate
from agentloop.errors import InvalidRequest, ParserMismatch
from agentloop.scheduling.balancer import BalancerConfig
from agentloop.scheduling.replica_books import ShareBounds
from agentloop_servers.app import application, build
from agentloop_servers.config.service import Mode, ModelSizes, ServiceConfig, located, model_sizes
from agentloop_servers.coordinator.client import COMMAND_TIMEOUT_S
from agentloop_servers.http.auth import Keys
from agentloop_servers.local import start_ray
from agentloop_servers.processes.engine_parts import engine_actor_options, initial_weights
from agentloop_servers.processes.ingress import mode_rules
from agentloop_servers.processes.settings import balancer_config, weight_config
from agentloop_servers.users import keys_of
from tests.support.records.model_folder import write_folder

SERVERS = Path(__file__).parents[2] / "servers"
# kuberay.yaml contains a Serve config but is not one: test_kuberay.py.
CONFIGS = sorted(path for path in SERVERS.glob("*.yaml") if path.name != "kuberay.yaml")


def a_model(folder, **fields):
    """Return a model folder described by these fields."""
    write_folder(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "vocab_size": 64, **fields}))
    return str(folder)


def service(**changed):
    """Return a CUDA service with some fields replaced; the engine's fields as `engine={...}`."""
    return ServiceConfig.model_validate({"model": "examples/tiny_policy/v0", **changed})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_builds_an_application(path, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTLOOP_KEY", "user")
    monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", "admin")
    document = yaml.safe_load(path.read_text())
    assert document["applications"][0]["import_path"] == "agentloop_servers.app:build"
    assert (document["proxy_location"], document["applications"][0]["route_prefix"]) == ("Disabled", None)
    config = ServiceConfig.load(path)
    assert (config.host, config.port > 0) == ("127.0.0.1" if config.cluster is None else "0.0.0.0", True)
    assert "mode" in document["applications"][0]["args"]
    if path.stem == "moe":  # the repository does not contain this model
        config = config.model_copy(update={"model": a_model(tmp_path / "moe", num_experts=8)})
    if path.stem == "mixed":  # and no second environment
        entries = [entry.model_copy(update={"environment": None}) for entry in config.entries]
        config = config.model_copy(update={"engines": entries})
    assert isinstance(application(config, tmp_path), serve.Application)
    assert model_sizes(config).max_context_tokens == 1024


def test_sizes_of_a_model_that_also_sees_are_those_of_its_text(tmp_path):
    folder = tmp_path / "vision"
    folder.mkdir()
    text = {"max_position_embeddings": 2048, "vocab_size": 96, "num_experts": 4}
    (folder / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": text}))
    assert model_sizes(service(model=str(folder))) == ModelSizes(2048, 96, has_experts=True)


def test_a_gpu_replica_takes_its_tensor_parallel_group():
    config = ServiceConfig.load(SERVERS / "standalone.yaml")
    wide = config.model_copy(update={"engine": config.engine.model_copy(update={"tensor_parallel_size": 4})})
    assert engine_actor_options(wide)["num_gpus"] == 4
    assert engine_actor_options(ServiceConfig.load(SERVERS / "moe.yaml"))["num_gpus"] == 2
    assert engine_actor_options(ServiceConfig.load(SERVERS / "hybrid.yaml"))["num_gpus"] == 0.5
    assert "num_gpus" not in engine_actor_options(ServiceConfig.load(SERVERS / "cpu.yaml"))


@pytest.mark.parametrize(
    ("mode", "push", "weights", "can_sleep", "staging"),
    [
        ("standalone", True, True, False, "auto"),
        ("hybrid", True, True, True, "none"),
        ("colocated", False, False, True, "auto"),
        ("debug", False, True, False, "auto"),
    ],
)
def test_what_a_mode_allows(mode, push, weights, can_sleep, staging):
    config = service(mode=mode)
    assert (config.allows_push, config.allows_weights) == (push, weights)
    assert config.can_sleep == can_sleep
    assert config.weight_staging(config.entries[0]) == staging
    to_host = service(mode=mode, engine={"weight_staging": "host"})
    assert to_host.weight_staging(to_host.entries[0]) == "host"
    assert not config.allows_adapters
    assert service(mode=mode, engine={"lora_rank": 8}).allows_adapters == weights
    named = service(mode=mode, engine={"lora_rank": 8, "max_loras": 4})
    assert (named.max_loras, named.allows_weights, named.allows_adapters) == (4, False, False)
    rules = mode_rules(config)
    assert (rules.mode, rules.allows_push, rules.allows_weights) == (mode, push, weights)
    assert rules.can_sleep == config.can_sleep


def test_the_modes_of_the_shipped_configs():
    modes = {path.stem: ServiceConfig.load(path).mode for path in CONFIGS}
    assert modes == {
        "cpu": Mode.DEBUG,
        "cluster": Mode.STANDALONE,
        "cpu_push": Mode.STANDALONE,
        "simulated": Mode.DEBUG,
        "standalone": Mode.STANDALONE,
        "moe": Mode.STANDALONE,
        "hybrid": Mode.HYBRID,
        "judge": Mode.HYBRID,
        "three": Mode.DEBUG,
        "mixed": Mode.STANDALONE,
        "sglang": Mode.STANDALONE,
    }


def test_cpu_push_is_cpu_in_another_mode():
    cpu, push = (ServiceConfig.load(SERVERS / f"{name}.yaml") for name in ("cpu", "cpu_push"))
    assert not cpu.allows_push
    assert push.allows_push
    assert push == cpu.model_copy(update={"mode": Mode.STANDALONE})


CPU = {"device": "cpu", "kv_cache_mib": 64}
WIDE = {"tensor_parallel_size": 2, "hosts": 2}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "hybrid", "engine": CPU}, "mode hybrid requires device cuda"),
        ({"mode": "colocated", "engine": CPU}, "mode colocated requires device cuda"),
        ({"mode": "colocated", "engine": {"load_format": "dummy"}}, "colocated requires load_format auto"),
        ({"mode": "debug", "engine": {"load_format": "dummy"}}, "debug requires load_format auto"),
        ({"mode": "detached"}, "'standalone', 'hybrid', 'colocated' or 'debug'"),
        ({"engine": {"device": "cpu"}}, "kv_cache_mib is required on device cpu"),
        ({"engine": {**CPU, "block_size": 16}}, "a multiple of 32, not 16"),
        ({"engine": {"expert_parallel": True}}, "tensor_parallel_size or data_parallel_size above 1"),
        (
            {"engine": {**CPU, "batch_invariant": True}},
            "batch_invariant is supported by vLLM and SGLang on GPUs only",
        ),
        (
            {"engine": {"kind": "simulated", "batch_invariant": True}},
            "batch_invariant is supported by vLLM and SGLang",
        ),
        ({"engine": {"kind": "sglang", "quantization": "fp8"}}, "SGLang quantizes only at its first load"),
        ({"engine": {"kind": "simulated", "quantization": "fp8"}}, "quantization is supported by vLLM only"),
        ({"engine": {"quantization": "int4"}}, "'fp8', 'fp8_per_channel' or 'fp8_per_block'"),
        ({"engine": {"quantization": "fp8", "dtype": "float32"}}, "dtype bfloat16 or float16, not float32"),
        ({"engine": {**CPU, "quantization": "fp8"}}, "quantization fp8 has no kernel on device cpu"),
        ({"engine": {**CPU, "quantization": "fp8_per_block"}}, "fp8_per_block has no kernel on device cpu"),
        ({"engine": {"data_parallel_size": 0}}, "greater than or equal to 1"),
        (
            {"engine": {"gpu_share": 0.5, "data_parallel_size": 2}},
            "gpu_share 0.5 requires a replica with one GPU, not 2",
        ),
        ({"engine": {"lora_rank": 7}}, "1, 8, 16"),
        ({"engine": {"max_loras": 4}}, "max_loras requires lora_rank"),
        ({"engine": {"max_loras": 4, "kind": "sglang"}}, "max_loras is not supported by SGLang: adapters by name"),
        (
            {"engine": {"max_loras": 4, "lora_rank": 8, "load_format": "dummy"}},
            "max_loras requires load_format auto",
        ),
        ({"engine": {"hosts": 0}}, "greater than or equal to 1"),
        ({"engine": {"hosts": 2}}, "multiple of hosts: 1 ranks cannot be spread evenly over 2 hosts"),
        ({"engine": {"tensor_parallel_size": 8, "hosts": 3}}, "8 ranks cannot be spread evenly over 3 hosts"),
        ({"engine": {**WIDE, "kind": "sglang"}}, "hosts above 1 is supported by vLLM only: a sglang engine"),
        ({"engine": {**WIDE, "kind": "simulated"}}, "a simulated engine runs on one host"),
        (
            {"engine": {**WIDE, "data_parallel_size": 2}},
            "hosts above 1 does not support data_parallel_size above 1 or expert_parallel",
        ),
        ({"engine": {**WIDE, "expert_parallel": True}}, "neither is tested on several hosts"),
        ({"engine": {**WIDE, "lora_rank": 8}}, "hosts above 1 does not support lora_rank"),
        ({"engine": {**WIDE, **CPU, "num_cpus": 0}}, "hosts above 1 on device cpu requires num_cpus above 0"),
        ({"engine": {"weight_staging": "disk"}}, "'auto', 'device', 'host' or 'none'"),
        ({"engine": {"tells_cache": False}}, "engine.tells_cache was removed"),
        (
            {"engines": [{"kind": "vllm", "tells_cache": True}]},
            "tells_cache was removed: delete the key (engines publish no KV events)",
        ),
        ({"log": {"max_mib": 64}}, "log was removed: use `logrotate`"),
        (
            {"engines": [{"kind": "vllm", "speculative": {"method": "mtp"}}]},
            "engines.speculative.method was removed: delete the key (drafts are always n-grams",
        ),
    ],
)
def test_what_cannot_go_together_is_one_clear_line(tmp_path, changed, message):
    path = tmp_path / "config.yaml"
    arguments = {"model": "examples/tiny_policy/v0", **changed}
    path.write_text(yaml.safe_dump({"applications": [{"args": arguments}]}))
    with pytest.raises(InvalidRequest) as caught:
        ServiceConfig.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_simulated_engine_can_be_in_any_mode():
    for mode in Mode:
        assert service(mode=mode, engine={"kind": "simulated", "device": "cpu"}).mode is mode


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_only_a_mixture_of_experts_is_spread_by_experts(tmp_path, field):
    engine = {"expert_parallel": True, "data_parallel_size": 2}
    mixture = service(model=a_model(tmp_path / "mixture", **{field: 8}), engine=engine)
    assert isinstance(application(mixture, tmp_path), serve.Application)
    for dense in (a_model(tmp_path / "dense"), a_model(tmp_path / "one", **{field: 1})):
        with pytest.raises(InvalidRequest, match="requires a mixture of experts") as caught:
            application(service(model=dense, engine=engine), tmp_path)
        assert caught.value.param == "engine.expert_parallel"
        ranks = service(model=dense, engine={"data_parallel_size": 2})  # allowed, although replicas are better
        assert isinstance(application(ranks, tmp_path), serve.Application)
    quantised = service(model=mixture.model, engine={**CPU, "quantization": "fp8_per_channel"})
    with pytest.raises(InvalidRequest, match="quantized experts have no kernel on device cpu"):
        application(quantised, tmp_path)


def test_a_parser_that_does_not_fit_is_refused_before_anything_starts(tmp_path):
    config = service(model=a_model(tmp_path / "model"), chat={"parser": "llama3_json"})
    with pytest.raises(ParserMismatch, match="parsers that read it: hermes"):
        application(config, tmp_path)


def test_where_the_first_weights_come_from():
    config = service(model_version=3)
    assert initial_weights(config) == WeightUpdate(3, str(config.model_path()))
    assert initial_weights(service(engine={"load_format": "dummy"})) is None
    assert initial_weights(service(engine={"lora_rank": 8})) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("capacity: 256", "capacity: none"), "workers.capacity"),
        (("kv_policy: recompute", "kv_policy: sometimes"), "kv_policy"),
        (("replicas: 2", "replicas: 0"), "replicas"),
        (("workers:", "chat: {parsers: hermes}\n      workers:"), "chat.parsers"),
        (("model: examples", "modell: examples"), "model"),
        (
            ("workers:", "updates: {consistency: fleet}\n      workers:"),
            "updates.consistency was removed",
        ),
        (("workers:", "workerz:"), "workerz: unknown key: did you mean 'workers'"),
        (("capacity: 256", "capazity: 256"), "workers.capazity: unknown key: did you mean 'capacity'"),
        (
            ("      kv_policy: recompute", "     kv_policy: recompute"),
            r"yaml, line \d+, column \d+: not a Serve",
        ),
        (("agentloop_servers.app:build", "my.app:build"), "import_path is 'my.app:build'"),
        (("applications:", "apps:"), "not a Serve config"),
        (("applications:", "applications: ["), "not a Serve config"),
    ],
)
def test_a_wrong_config_names_the_field(tmp_path, change, named):
    path = tmp_path / "config.yaml"
    path.write_text((SERVERS / "cpu.yaml").read_text().replace(*change))
    with pytest.raises(InvalidRequest, match=named):
        ServiceConfig.load(path)


def test_a_missing_config_or_model_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot read the config"):
        ServiceConfig.load(tmp_path / "missing.yaml")
    config = ServiceConfig.load(SERVERS / "cpu.yaml").model_copy(update={"model": "no/such/model"})
    with pytest.raises(InvalidRequest, match="no/such/model"):
        application(config, tmp_path)


def test_beyond_loopback_both_keys_are_demanded():
    Keys.of().check_bind("127.0.0.1")
    for keys in (Keys.of(), Keys.of(["user"]), Keys.of(admin_key="admin")):
        with pytest.raises(InvalidRequest, match="key"):
            keys.check_bind("0.0.0.0")
    Keys.of(["user"], "admin").check_bind("0.0.0.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "models.example.com"])
def test_no_way_to_construct_a_service_goes_round_the_keys(tmp_path, monkeypatch, host):
    document = {
        "model": "examples/tiny_policy/v0",
        "host": host,
        "run_dir": str(tmp_path),
        "engine": {"kind": "simulated"},
    }
    for user_key, admin_key in (("", ""), ("user", ""), ("", "admin")):
        monkeypatch.setenv("AGENTLOOP_KEY", user_key)
        monkeypatch.setenv("AGENTLOOP_ADMIN_KEY", admin_key)
        config = ServiceConfig.model_validate(document)
        for construct in (
            lambda: build(document),
            lambda config=config: application(config, tmp_path),
            lambda config=config: keys_of(config),  # as each ingress process does
        ):
            with pytest.raises(InvalidRequest, match=f"a service on {host} needs a user key and an admin key"):
                construct()
    monkeypatch.setenv("AGENTLOOP_KEY", "user")
    build(document)


def test_a_ray_whose_ports_are_open_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(InvalidRequest, match="RAY_AUTH_MODE"):
        start_ray(tmp_path)


def test_a_service_that_is_deployed_has_a_port_of_its_own(tmp_path):
    with pytest.raises(InvalidRequest, match="needs a port"):
        build({"model": "examples/tiny_policy/v0", "port": 0})
    path = tmp_path / "config.yaml"
    path.write_text((SERVERS / "cpu.yaml").read_text() + "http_options:\n  host: 0.0.0.0\n")
    with pytest.raises(InvalidRequest, match="http_options configures Serve's own proxy"):
        ServiceConfig.load(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": {"stage_timeout_s": 2000.0}}, "updates.timeout_s is 2400 s, but the steps"),
        ({"updates": {"timeout_s": 900.0}}, r"in total \(engine.stage_timeout_s is 600"),
        ({"engine": {"commit_timeout_s": 9000.0}, "updates": {"timeout_s": 1e6}}, "below 7185 s"),
    ],
)
def test_deadlines_that_do_not_nest_are_refused_at_the_start(tmp_path, changed, message):
    config = service(**{**changed, "engine": {"kind": "simulated", **changed.get("engine", {})}})
    with pytest.raises(InvalidRequest, match=message):
        application(config, tmp_path)


def test_the_deadlines_of_an_update_nest():
    config = service(engine={"kind": "simulated"})
    steps = weight_config(config)
    assert config.engine.stage_timeout_s < steps.stage_timeout_s < steps.update_timeout_s
    assert steps.update_timeout_s < config.updates.timeout_s <= COMMAND_TIMEOUT_S
    assert steps.straggler_grace_s == config.updates.straggler_grace_s


def test_nothing_of_the_balancer_has_to_be_set():
    config = balancer_config(service())
    assert config == replace(BalancerConfig(), usual_growth_tokens=256)  # a quarter of the model's context of 1024


def test_what_is_set_of_the_balancer_reaches_it():
    found = balancer_config(service(balancer={"max_kv_share": 0.2, "lease_ttl_s": 30}))
    assert (found.share, found.lease_ttl_s) == (ShareBounds(0.2, 0.2), 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_kv_share": 2, "max_kv_share": 1}, "at most max_kv_share"),
        ({"order": "longest"}, "balancer.order was removed: delete the key"),
        ({"step_times": "h200-qwen3-8b"}, "balancer.step_times was removed"),
        ({"retention": 8}, "balancer.retention was removed"),
        ({"rho": 1}, "not permitted"),
    ],
)
def test_a_balancer_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        service(balancer=settings)


def test_a_models_description_is_read_once(tmp_path, monkeypatch):
    sizes = {"num_attention_heads": 1, "hidden_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "max_position_embeddings": 64, **sizes}))
    read_text, read = Path.read_text, []
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args, **kw: read.append(path) or read_text(path, *args, **kw)
    )
    model_sizes(ServiceConfig(model=str(tmp_path), engine={"kind": "vllm", "dtype": "float32", "kv_cache_mib": 1}))
    assert read == [tmp_path / "config.json"]


def test_a_kv_cache_below_one_context_is_refused_with_the_longest_context_that_fits(tmp_path):
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
    model = {"vocab_size": 49152, "max_position_embeddings": 8192, **sizes}  # SmolLM2-135M

    def checked(kv_cache_mib, changed=(), **engine):
        (tmp_path / "config.json").write_text(json.dumps({**model, **dict(changed)}))
        engine = {"kind": "vllm", "device": "cpu", "dtype": "float32", "block_size": 32, **engine}
        return model_sizes(ServiceConfig(model=str(tmp_path), engine={**engine, "kv_cache_mib": kv_cache_mib}))

    with pytest.raises(InvalidRequest) as refused:
        checked(256)
    assert refused.value.message == (
        "a context of 8,192 tokens needs 363 MiB of KV cache, and engine.kv_cache_mib is 256: raise it, or set "
        "engine.max_context_tokens to at most 5,760"
    )
    assert checked(363).max_context_tokens == 8192
    assert checked(256, max_context_tokens=5760).max_context_tokens == 5760
    with pytest.raises(InvalidRequest, match="at most 5,760"):
        checked(256, max_context_tokens=5761)
    assert checked(182, dtype="bfloat16").max_context_tokens == 8192
    assert checked(1, changed={"sliding_window": 512}).max_context_tokens == 8192  # the engine decides


def test_a_relative_path_outside_the_working_directory_is_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("servers/simulated.yaml") == Path(__file__).parents[2] / "servers" / "simulated.yaml"
