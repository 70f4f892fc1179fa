"""`engine.arguments`: read by vLLM's own parser, and refused by name where the service sets the argument itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentloop.errors import InvalidRequest
from agentloop.values import codec
from agentloop_servers.cli.doctor import app
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.engines.vllm.config import VllmConfig, engine_arguments
from agentloop_servers.engines.vllm.extra_arguments import OWNED
from agentloop_servers.processes.engine_parts import vllm_config
from tests.servers.engines.vllm.test_vllm_config import CASES

MODEL = Path(__file__).parents[4] / "examples" / "tiny_policy" / "v0"


def configured(arguments: dict, **engine: object) -> VllmConfig:
    service = {"model": str(MODEL), "engine": {**engine, "arguments": arguments}}
    return vllm_config(ServiceConfig.model_validate(service))


def test_values_are_those_of_vllms_own_command_line() -> None:
    config = configured(
        {
            "async_scheduling": False,
            "attention_backend": "FLASH_ATTN",
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            "compilation_config": {"mode": 0},
            "moe_backend": "triton",
            "long_prefill_token_threshold": 512,
        }
    )
    assert codec.decode(codec.encode(config), VllmConfig) == config
    arguments = engine_arguments(config)
    assert arguments["async_scheduling"] is False
    assert (arguments["attention_backend"], arguments["moe_backend"]) == ("FLASH_ATTN", "triton")
    assert arguments["kv_transfer_config"].kv_connector == "ExampleConnector"
    assert arguments["compilation_config"].mode.value == 0
    assert arguments["long_prefill_token_threshold"] == 512


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"atention_backend": "x"}, "vLLM has no argument 'atention_backend': did you mean 'attention_backend'"),
        ({"nothing_like_it": 1}, "vLLM has no argument 'nothing_like_it'$"),
        ({"long_prefill_token_threshold": "many"}, "vLLM refuses argument --long-prefill-token-threshold"),
        ({"moe_backend": "x"}, "vLLM refuses argument --moe-backend: invalid choice: 'x'"),
    ],
)
def test_what_vllm_does_not_accept_is_refused_by_name(arguments: dict, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        engine_arguments(configured(arguments))
    assert refused.value.param == "engine.arguments"


@pytest.mark.parametrize("name", OWNED)
def test_what_the_service_sets_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM's '{name}' cannot be set here: "):
        configured({name: 1})


@pytest.mark.parametrize("changed", [changed for changed, _ in CASES.values()], ids=CASES.keys())
def test_every_argument_that_the_service_sets_is_owned(changed: dict) -> None:
    service = ServiceConfig.model_validate({"model": str(MODEL), **changed})
    assert set(engine_arguments(vllm_config(service))) <= set(OWNED)


def test_a_simulated_engine_has_no_arguments() -> None:
    with pytest.raises(ValueError, match="a simulated engine has none: remove"):
        configured({"seed": 1}, kind="simulated")


def test_doctor_prints_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    text = "applications:\n- args:\n    model: {model}\n    engine: {{arguments: {{{arguments}}}}}\n"
    path.write_text(text.format(model=MODEL, arguments="async_scheduling: false, attention_backend: FLASH_ATTN"))
    shown = CliRunner().invoke(app, ["doctor", "--config", str(path), "--json"])
    assert "--no-async-scheduling --attention-backend FLASH_ATTN" in shown.output, shown.output
    assert f"vllm serve {MODEL} --load-format auto" in shown.output
    path.write_text(text.format(model=MODEL, arguments="moe_backendd: triton"))
    shown = CliRunner().invoke(app, ["doctor", "--config", str(path), "--json"])
    assert "did you mean 'moe_backend'" in shown.output
    assert shown.exit_code == 1
