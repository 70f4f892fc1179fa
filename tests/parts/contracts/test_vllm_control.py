"""The control verbs of vLLM's server over the real app: the effect of each on the fleet, and the refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import Conflict
from agentloop.types import PauseMode
from agentloop_contracts.vllm_control import REFUSED
from agentloop_servers.http.auth import Keys
from agentloop_servers.ingress.admin import ModeRules
from tests.support.endpoint.chat_service import MODEL, ChatService, chat_service

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
POSTS = ["/pause", "/resume", "/update_weights", "/load_lora_adapter", "/sleep", "/wake_up", "/reset_prefix_cache"]
POSTS += ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"]
POSTS += ["/shutdown_weight_transfer_engine"]
GETS = ["/is_paused", "/weight_info", "/is_sleeping", "/server_info", "/get_world_size"]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ChatService]:
    (tmp_path / "weights" / "step_8").mkdir(parents=True)
    async with chat_service(tmp_path, weight_roots=[tmp_path / "weights"]) as service:
        yield service


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """One service for the tests that must not leave a trace."""
    async with chat_service(tmp_path_factory.mktemp("shared")) as service:
        yield service


async def done(service: ChatService, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
    status, answer, _ = await service.call(method, path, **kwargs)
    assert status == 200, answer
    return answer


async def refused(service: ChatService, path: str, **kwargs: Any) -> tuple[int, str, str | None]:
    status, answer, _ = await service.call("POST", path, **kwargs)
    return status, answer["error"]["code"], answer["error"]["param"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pause_and_resume(shared: ChatService, mode: str) -> None:
    service = shared
    params = {"mode": mode, "clear_cache": "false"}
    assert await done(service, "POST", "/pause", params=params) == {"status": "paused"}
    assert service.coordinator.paused is PauseMode(mode)
    assert await done(service, "GET", "/is_paused") == {"is_paused": True}
    assert await done(service, "POST", "/resume") == {"status": "resumed"}
    assert await done(service, "GET", "/is_paused") == {"is_paused": False}


async def test_a_directory_becomes_the_next_version(service: ChatService, tmp_path: Path) -> None:
    directory = str(tmp_path / "weights" / "step_8")
    answer = await done(service, "POST", "/update_weights", json={"weight_dir": directory})
    assert (answer["status"], answer["weight_version"], answer["report"]["version"]) == ("ok", "1", 1)
    await done(service, "POST", "/update_weights", json={"weight_dir": directory, "version": 8})
    updates = [(update.version, update.directory) for update, _ in service.coordinator.updates]
    assert updates == [(1, directory), (8, directory)]
    assert await done(service, "GET", "/weight_info") == {"weight_version": "0"}  # the fleet of this coordinator


async def test_weights_that_are_refused(service: ChatService, tmp_path: Path) -> None:
    outside = {"weight_dir": str(tmp_path)}
    assert await refused(service, "/update_weights", json=outside) == (400, "invalid_request", "weight_dir")
    none = {"weight_dir": None}
    assert await refused(service, "/update_weights", json=none) == (400, "unsupported_parameter", "weight_dir")
    assert await refused(service, "/update_weights", json={}) == (400, "invalid_request", "weight_dir")
    both = {
        "weight_dir": str(tmp_path),
        "update_info": {"names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]},
    }
    assert await refused(service, "/update_weights", json=both) == (400, "invalid_request", "weight_dir")
    service.coordinator.update_error = Conflict("version 1 is under way")
    known = {"weight_dir": str(tmp_path / "weights" / "step_8")}
    assert (await refused(service, "/update_weights", json=known))[:2] == (409, "conflict")


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/v1/load_lora_adapter"])
async def test_an_adapter_is_an_update_and_a_name(service: ChatService, tmp_path: Path, path: str) -> None:
    status, _, _ = await service.call("POST", "/v1/chat/completions", json={**CHAT, "model": "step-8"})
    assert status == 404
    adapter = str(tmp_path / "weights" / "step_8")
    await done(service, "POST", path, json={"lora_name": "step-8", "lora_path": adapter, "load_inplace": False})
    [(update, _)] = service.coordinator.updates
    assert (update.adapter, update.version) == (adapter, 1)
    models = (await done(service, "GET", "/v1/models"))["data"]
    assert [(one["id"], one["max_model_len"]) for one in models] == [(MODEL, 4096), ("step-8", 4096)]
    body = {"model": "step-8", "token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert (await done(service, "POST", "/inference/v1/generate", json=body))["model"] == "step-8"


async def test_sleep_and_wake(service: ChatService) -> None:
    params = {"level": "2", "tags": "weights"}
    assert await done(service, "POST", "/sleep", params=params) == {"status": "sleeping", "level": 2}
    assert service.coordinator.sleep_levels == [2]
    assert await done(service, "GET", "/is_sleeping") == {"is_sleeping": True}
    answer = await done(service, "POST", "/wake_up", params=[("tags", "weights")])
    assert answer == {"status": "sleeping", "tags": ["weights"]}
    answer = await done(service, "POST", "/wake_up")
    assert answer == {"status": "awake", "tags": None}


async def test_what_trainers_read_of_the_server(service: ChatService) -> None:
    service.coordinator.weight_dtypes = ["bfloat16", "bfloat16"]
    params = {"config_format": "json"}
    config = (await done(service, "GET", "/server_info", params=params))["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.bfloat16"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["quantization"] is None
    assert (config["model_config"]["max_model_len"], config["lora_config"]) == (4096, None)
    assert config["weight_transfer_config"] == {"backend": "nccl"}
    assert isinstance((await done(service, "GET", "/server_info"))["vllm_config"], str)
    assert await done(service, "GET", "/get_world_size") == {"world_size": 2}
    assert await done(service, "GET", "/get_world_size", params={"include_dp": "false"}) == {"world_size": 1}
    service.coordinator.replica_error = "lost"  # quarantined replicas do not join a group
    for include_dp in ("true", "false"):
        assert await done(service, "GET", "/get_world_size", params={"include_dp": include_dp}) == {"world_size": 0}
    answer = await done(service, "POST", "/reset_prefix_cache", json={"reset_running_requests": False})
    assert answer == {"success": False}


@pytest.mark.parametrize("path", REFUSED)
async def test_verbs_that_are_refused_say_what_to_do(shared: ChatService, path: str) -> None:
    status, answer, _ = await shared.call("POST", path, json={"init_info": {}})
    assert (status, answer["error"]["code"]) == (400, "unsupported_verb")
    assert REFUSED[path] in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=now", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=0", "level"),
        ("/wake_up?tags=all", "tags"),
        ("/finish_session", "session_id"),
    ],
)
async def test_bad_parameters_are_named(shared: ChatService, path: str, param: str) -> None:
    status, code, named = await refused(shared, path)
    assert (status, code) == (400, "invalid_request")
    assert (named or "").startswith(param)


async def test_every_verb_needs_the_admin_key(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["user-1"], "admin-1")) as service:
        user, admin = {"authorization": "Bearer user-1"}, {"authorization": "Bearer admin-1"}
        for method, paths in (("POST", [*POSTS, *REFUSED]), ("GET", GETS)):
            for path in paths:
                assert (await service.call(method, path))[0] == 401
                assert (await service.call(method, path, headers=user))[0] == 403
        assert (await service.call("POST", "/pause", headers=admin))[0] == 200
        assert (await service.call("GET", "/is_paused", headers=admin))[1] == {"is_paused": True}


async def test_the_mode_rules_hold(tmp_path: Path) -> None:
    rules = ModeRules(mode="shared", allows_weights=False, can_sleep=False)
    async with chat_service(tmp_path, rules=rules, weight_roots=[tmp_path]) as service:
        assert (await refused(service, "/update_weights", json={"weight_dir": str(tmp_path)}))[0] == 400
        assert (await refused(service, "/sleep"))[0] == 400
        assert service.coordinator.updates == []
