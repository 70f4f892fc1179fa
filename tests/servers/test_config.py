"""The shipped Serve configs run under `serve deploy` and `agentloop serve`, and wrong ones say what is wrong."""

from pathlib import Path

import pytest
import yaml
from ray import serve

from agentloop.errors import InvalidRequest
from agentloop_servers.app import application, engine_actor_options, model_facts
from agentloop_servers.config import ServiceConfig
from agentloop_servers.http_guard import Keys

SERVERS = Path(__file__).parents[2] / "servers"
CONFIGS = sorted(SERVERS.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_builds_an_application(path, tmp_path):
    document = yaml.safe_load(path.read_text())
    assert document["applications"][0]["import_path"] == "agentloop_servers.app:build"
    assert document["http_options"]["host"] == "127.0.0.1"
    config = ServiceConfig.load(path)
    assert config.port == document["http_options"]["port"]
    assert isinstance(application(config, tmp_path), serve.Application)
    assert model_facts(config).max_context_tokens == 1024


def test_a_gpu_replica_takes_its_tensor_parallel_group():
    config = ServiceConfig.load(SERVERS / "standalone.yaml")
    wide = config.model_copy(update={"engine": config.engine.model_copy(update={"tensor_parallel_size": 4})})
    assert engine_actor_options(wide)["num_gpus"] == 4
    assert "num_gpus" not in engine_actor_options(ServiceConfig.load(SERVERS / "cpu.yaml"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("capacity: 256", "capacity: none"), "workers.capacity"),
        (("kv_policy: recompute", "kv_policy: sometimes"), "kv_policy"),
        (("replicas: 2", "replicas: 0"), "replicas"),
        (("parser: hermes", "parsers: hermes"), "workers.parsers"),
        (("model: examples", "modell: examples"), "model"),
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
