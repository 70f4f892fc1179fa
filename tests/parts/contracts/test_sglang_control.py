"""The control verbs of SGLang's server over the real app: the effect of each on the fleet, and the refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import Conflict
from agentloop.types import PauseMode
from agentloop_contracts.sglang_control import REFUSED
from agentloop_servers.http.auth import Keys
from tests.support.endpoint.chat_service import MODEL, ChatService, chat_service

GETS = ["/flush_cache", "/get_weight_version", "/model_info", "/get_model_info", "/server_info", "/get_server_info"]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ChatService]:
    (tmp_path / "weights" / "weight_v000007").mkdir(parents=True)
    async with chat_service(tmp_path, weight_roots=[tmp_path / "weights"]) as service:
        yield service


async def done(service: ChatService, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
    status, answer, _ = await service.call(method, path, **kwargs)
    assert status == 200, answer
    return answer


async def refused(service: ChatService, path: str, **body: Any) -> tuple[int, str, str | None]:
    status, answer, _ = await service.call("POST", path, json=body)
    assert (answer["success"], answer["message"]) == (False, answer["error"]["message"])
    return status, answer["error"]["code"], answer["error"]["param"]


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ({}, PauseMode.ABORT),
        ({"mode": "retract"}, PauseMode.KEEP),
        ({"mode": "in_place"}, PauseMode.KEEP),
    ],
)
async def test_pause_and_continue(service: ChatService, body: dict[str, Any], mode: PauseMode) -> None:
    assert (await done(service, "POST", "/pause_generation", json=body))["status"] == "ok"
    assert service.coordinator.paused is mode
    assert (await done(service, "POST", "/continue_generation", json={}))["status"] == "ok"
    assert service.coordinator.paused is None


async def test_a_directory_becomes_the_version_that_is_named(service: ChatService, tmp_path: Path) -> None:
    path = "/update_weights_from_disk"
    body = {"model_path": str(tmp_path / "weights" / "weight_v000007"), "load_format": "auto"}
    for given, version, policy in (
        ({}, 1, None),
        ({"weight_version": "7"}, 7, None),
        ({"weight_version": "8", "flush_cache": True}, 8, "fresh"),  # this service's own policy is KEEP
    ):
        answer = await done(service, "POST", path, json={**body, **given})
        assert (answer["success"], answer["weight_version"]) == (True, str(version))
        update, used = service.coordinator.updates[-1]
        assert (update.version, update.directory, used) == (version, body["model_path"], policy)
    assert await refused(service, path, model_path=str(tmp_path)) == (400, "invalid_request", "model_path")
    for field, value, code in (
        ("weight_version", "seven", "invalid_request"),
        ("weight_version", 7, "invalid_request"),
        ("load_format", "flattened_bucket", "invalid_request"),
        ("abort_all_requests", True, "unsupported_parameter"),
        ("keep_pause", True, "unsupported_parameter"),
        ("model", "x", "invalid_request"),
    ):
        assert await refused(service, path, **{**body, field: value}) == (400, code, field)
    service.coordinator.update_error = Conflict("version 1 is under way")
    assert (await refused(service, path, **body))[:2] == (409, "conflict")


async def test_memory(service: ChatService) -> None:
    """slime's order around a training step: release all memory, resume weights, then the KV cache and graphs."""
    assert await refused(service, "/release_memory_occupation", tags=["kv_cache"]) == (
        400,
        "unsupported_parameter",
        "tags",
    )
    await done(service, "POST", "/release_memory_occupation", json={})
    assert service.coordinator.sleep_levels == [1]
    for tags, asleep in ((["weights"], {"kv_cache"}), (["kv_cache", "cuda_graph"], set())):
        await done(service, "POST", "/resume_memory_occupation", json={"tags": tags})
        assert {*(await service.coordinator.status()).asleep} == asleep
    await done(service, "POST", "/resume_memory_occupation", json={"tags": ["cuda_graph"]})


async def test_what_trainers_read_of_the_server(service: ChatService) -> None:
    service.coordinator.weight_dtypes = ["bfloat16", "bfloat16"]
    for path in ("/server_info", "/get_server_info"):
        info = await done(service, "GET", path, params={"config_format": "json"})
        assert (info["tp_size"], info["pp_size"], info["num_gpus"], info["encoder_only"]) == (2, 1, 2, False)
        assert (info["ready"], info["applied"], info["sync_state"], info["weight_version"]) == (
            True,
            0,
            "IDLE",
            "0",
        )
        assert info["vllm_config"]["model_config"]["model"] == MODEL  # vLLM's clients also request this route
    for path in ("/model_info", "/get_model_info", "/get_weight_version"):
        assert (await done(service, "GET", path))["weight_version"] == "0"
    assert (await done(service, "GET", "/health_generate"))["is_ready"]
    for method in ("GET", "POST"):
        await done(service, method, "/flush_cache")


@pytest.mark.parametrize("path", REFUSED)
async def test_verbs_that_are_refused_say_what_to_do(service: ChatService, path: str) -> None:
    assert (await refused(service, path, group_name="g"))[:2] == (400, "unsupported_verb")


async def test_control_needs_the_admin_key(tmp_path: Path) -> None:
    async with chat_service(tmp_path, keys=Keys.of(["user-1"], "admin-1")) as service:
        user, admin = ({"authorization": f"Bearer {key}"} for key in ("user-1", "admin-1"))
        for path in ("/pause_generation", "/continue_generation", "/release_memory_occupation", *REFUSED):
            assert (await service.call("POST", path, json={}, headers=user))[0] == 403
        for path in GETS:
            assert (await service.call("GET", path, headers=user))[0] == 403
            assert (await service.call("GET", path, headers=admin))[0] == 200
