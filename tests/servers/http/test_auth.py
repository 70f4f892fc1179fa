"""Identification of a request's session, and the permission to use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentloop_servers.http.auth import Keys
from tests.support.endpoint.fake_endpoint import FakeRegistry, serving_endpoint

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GENERATE = {"token_ids": [1, 2], "sampling": {"max_tokens": 2}}


class AuthSite:
    def __init__(self, url: str, registry: FakeRegistry, http: aiohttp.ClientSession) -> None:
        self.url, self.registry, self.http = url, registry, http

    async def call(
        self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> tuple[int, Any, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        async with self.http.request(method, self.url + path, json=body, headers=sent) as answer:
            assert answer.headers["x-request-id"]
            return answer.status, await answer.json(), answer.headers

    async def chat(self, path: str = "/v1", body: Any = CHAT, key: str | None = None, **headers: str) -> Any:
        return await self.call("POST", f"{path}/chat/completions", body, key, **headers)


@pytest.fixture(scope="module")
async def open_service() -> AsyncIterator[tuple[str, FakeRegistry]]:
    registry = FakeRegistry()
    async with serving_endpoint(registry) as url:
        yield url, registry


@pytest.fixture(scope="module")
async def locked_service() -> AsyncIterator[tuple[str, FakeRegistry]]:
    registry = FakeRegistry()
    async with serving_endpoint(registry, Keys.of(["alice", "bob"], "root")) as url:
        yield url, registry


@pytest.fixture
async def site(open_service: tuple[str, FakeRegistry]) -> AsyncIterator[AuthSite]:
    url, registry = open_service
    registry.reset()
    async with aiohttp.ClientSession() as http:
        yield AuthSite(url, registry, http)


@pytest.fixture
async def locked(locked_service: tuple[str, FakeRegistry]) -> AsyncIterator[AuthSite]:
    """A site with the user keys `alice` and `bob` and the admin key `root`."""
    url, registry = locked_service
    registry.reset()
    async with aiohttp.ClientSession() as http:
        yield AuthSite(url, registry, http)


async def test_header_and_body_create_a_session_on_first_use(site: AuthSite) -> None:
    for how in ({"x_session_id": "a"}, {"body": {**CHAT, "session": "a"}}, {"body": {**CHAT, "session_id": "a"}}):
        status, answer, headers = await site.chat(**how)  # type: ignore[arg-type]
        assert (status, headers["x-session-id"], answer["session"]["session_id"]) == (200, "a", "a")
    assert list(site.registry.sessions) == ["a"]


async def test_no_name_makes_a_session_for_this_call_alone(site: AuthSite) -> None:
    first, second = [(await site.chat())[2]["x-session-id"] for _ in range(2)]
    assert first != second


async def test_path_and_key_name_a_session_that_must_exist(site: AuthSite) -> None:
    status, answer, _ = await site.chat("/sessions/a/v1")
    assert (status, answer["error"]["code"]) == (404, "session_not_found")
    created = (await site.call("POST", "/sessions", {"session_id": "a"}))[1]
    assert created["base_url"] == f"{site.url}/sessions/a/v1"
    assert created["direct_url"] is None
    assert (await site.chat("/sessions/a/v1"))[0] == 200
    status, _, headers = await site.chat(key=created["api_key"])
    assert (status, headers["x-session-id"]) == (200, "a")
    assert [call[0] for call in site.registry.calls] == ["a", "a"]


async def test_names_that_agree_are_one_and_names_that_do_not_are_refused(site: AuthSite) -> None:
    key = (await site.call("POST", "/sessions", {"session_id": "a"}))[1]["api_key"]
    everything = {"body": {**CHAT, "session": "a"}, "key": key, "x_session_id": "a"}
    assert (await site.chat("/sessions/a/v1", **everything))[0] == 200  # type: ignore[arg-type]
    for wrong in (
        {"x_session_id": "b", "body": {**CHAT, "session": "a"}},
        {"x_session_id": "b", "key": key},
        {"body": {**CHAT, "session": "b"}, "key": key},
        {"path": "/sessions/a/v1", "body": {**CHAT, "session": "b"}},
        {"body": {**CHAT, "session": "a", "session_id": "b"}},
        {"x_session_id": "a b"},
        {"x_session_id": "a" * 129},
        {"x_session_id": ""},
    ):
        status, answer, _ = await site.chat(**wrong)  # type: ignore[arg-type]
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert len(site.registry.calls) == 1
    assert list(site.registry.sessions) == ["a"]


async def test_beside_a_path_the_header_of_a_client_of_vllm_says_nothing(site: AuthSite) -> None:
    await site.call("POST", "/sessions", {"session_id": "a"})
    for name in ("b", "trace/1", ""):
        status, _, headers = await site.chat("/sessions/a/v1", x_session_id=name)
        assert (status, headers["x-session-id"]) == (200, "a")
    assert list(site.registry.sessions) == ["a"]


async def test_a_session_key_opens_its_own_session_and_nothing_else(locked: AuthSite) -> None:
    created = [(await locked.call("POST", "/sessions", {"session_id": name}, key="alice"))[1] for name in "ab"]
    key = created[0]["api_key"]
    assert (await locked.chat(key=key))[2]["x-session-id"] == "a"
    assert (await locked.chat(x_api_key=key))[2]["x-session-id"] == "a"
    assert (await locked.chat("/sessions/a/v1", key=key))[0] == 200
    assert (await locked.chat("/sessions/b/v1", key=key))[0] == 404
    for method, path in CONTROL_ROUTES:
        assert (await locked.call(method, path.format("a"), {}, key=key))[0] == 403
    assert (await locked.call("POST", "/sessions", {}, key=key))[0] == 403
    assert (await locked.call("GET", "/status", key=key))[0] == 401
    assert (await locked.call("POST", "/admin/pause", {}, key=key))[0] == 401
    assert (await locked.call("POST", "/generate", GENERATE, key=key))[2]["x-session-id"] == "a"
    control = created[0]["control_key"]
    for method, path in CONTROL_ROUTES:
        assert (await locked.call(method, path.format("b"), {"reward": 1.0}, key=control))[0] == 404
    for method, path, body in (
        ("GET", "/status", None),
        ("POST", "/admin/pause", {}),
        ("GET", "/rollouts/r", None),
    ):
        assert (await locked.call(method, path, body, key=control))[0] == 401
    assert (await locked.call("GET", "/sessions/a", key=control))[0] == 200
    assert (await locked.call("POST", "/sessions/a/reward", {"reward": 1.0}, key=control))[1]["reward"] == 1.0


CONTROL_ROUTES = [
    ("GET", "/sessions/{}"),
    ("GET", "/sessions/{}/trajectories"),
    ("POST", "/sessions/{}/reward"),
    ("POST", "/sessions/{}/finish"),
    ("POST", "/sessions/{}/revoke"),
    ("DELETE", "/sessions/{}"),
]


async def test_without_users_a_session_is_ended_by_its_control_key_alone(site: AuthSite) -> None:
    made = (await site.call("POST", "/sessions", {"session_id": "a"}))[1]
    for key in (None, "anything", made["api_key"]):
        for method, path in CONTROL_ROUTES[2:]:
            assert (await site.call(method, path.format("a"), {"reward": 1.0}, key=key))[0] == 403
    assert (await site.call("GET", "/sessions/a"))[1]["reward"] is None
    control = made["control_key"]
    assert (await site.call("POST", "/sessions/a/reward", {"reward": 0.5}, key=control))[1]["reward"] == 0.5
    assert (await site.call("POST", "/sessions/a/revoke", None, key=control))[1]["is_revoked"] is True
    assert (await site.call("POST", "/sessions/a/finish", {}, key=control))[0] == 200
    assert (await site.call("DELETE", "/sessions/a", key=control))[0] == 200
    await site.chat(x_session_id="b")  # no client received a key of it
    assert (await site.call("POST", "/sessions/b/finish", {}))[0] == 200


async def test_without_users_no_other_route_takes_a_sessions_key(site: AuthSite) -> None:
    made = (await site.call("POST", "/sessions", {"session_id": "a"}))[1]
    routes = [
        ("POST", "/admin/pause", {}),
        ("POST", "/admin/resume", None),
        ("POST", "/admin/weights", {"version": 1, "directory": "/x"}),
        ("GET", "/status", None),
        ("GET", "/sessions", None),
        ("POST", "/rollouts", {"tasks": []}),
        ("POST", "/rollouts/r/cancel", None),
    ]
    for key in (made["api_key"], made["control_key"]):
        for method, path, body in routes:
            assert (await site.call(method, path, body, key=key))[0] == 403
            assert (await site.call(method, path, body, x_api_key=key, authorization="Bearer else"))[0] in (
                400,
                403,
            )
    # unprotected as before, with a warning at the start
    assert (await site.call("POST", "/admin/resume"))[0] == 200


async def test_a_user_lists_its_own_sessions(locked: AuthSite) -> None:
    for key, names in (("alice", "ca"), ("bob", "ab")):
        for name in names:
            await locked.call("POST", "/sessions", {"session_id": name, "rollout_id": "run"}, key=key)
    listed = {
        key: (await locked.call("GET", "/sessions", key=key))[1]["sessions"] for key in ("alice", "bob", "root")
    }
    assert {key: [one["session_id"] for one in found] for key, found in listed.items()} == {
        "alice": ["a", "c"],
        "bob": ["a", "b"],
        "root": [],
    }


async def test_a_forged_session_key_is_no_key_even_where_none_is_needed(site: AuthSite) -> None:
    key = (await site.call("POST", "/sessions", {"session_id": "a"}))[1]["api_key"]
    assert (await site.chat(key=key[:-1] + ("0" if key[-1] != "0" else "1")))[0] == 401
    assert (await site.chat(key="sk-anything-else"))[0] == 200


async def test_generate_is_recorded_only_where_a_session_is_named(site: AuthSite) -> None:
    status, answer, headers = await site.call("POST", "/generate", GENERATE)
    assert (status, answer["token_ids"]) == (200, [2, 1])
    assert "x-session-id" not in headers
    for path, extra in (("/generate", {"x_session_id": "a"}), ("/sessions/a/generate", {})):
        status, answer, headers = await site.call("POST", path, GENERATE, **extra)
        assert (status, answer["token_ids"], headers["x-session-id"]) == (200, [0, 1, 2, 3], "a")
    assert [call[1].prompt_ids for call in site.registry.calls] == [(1, 2), (1, 2)]


async def test_the_life_of_a_session_over_http(site: AuthSite) -> None:
    control = (await site.call("POST", "/sessions", {"session_id": "a", "ttl_s": 60}))[1]["control_key"]
    status, answer, _ = await site.call("POST", "/sessions/a/reward", {"reward": 0.5}, key=control)
    assert (status, answer["reward"], answer["state"]) == (200, 0.5, "open")
    status, answer, _ = await site.call("POST", "/sessions/a/finish", {"reward": 1.0}, key=control)
    assert (status, len(answer)) == (200, 1)
    status, answer, headers = await site.chat("/sessions/a/v1")
    assert (status, answer["error"]["code"]) == (409, "session_finished")
    assert (headers["x-should-retry"], headers["x-session-id"]) == ("false", "a")
    status, answer, _ = await site.call("GET", "/sessions/a")
    assert (answer["state"], answer["stop_reason"], answer["reward"]) == ("finished", "completed", 1.0)
    assert (await site.call("GET", "/sessions/a/trajectories"))[0] == 200
    status, answer, _ = await site.call("DELETE", "/sessions/a", key=control)
    assert answer == {"session_id": "a", "is_deleted": True}
    assert (await site.call("GET", "/sessions/a"))[0] == 404
