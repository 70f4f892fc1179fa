"""Invalid keys, hosts, paths and framings give no access on the real chat endpoint, and sessions stay private.

Covers the rows of the fault table about permissions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from structlog.testing import capture_logs

from agentloop_servers.http.auth import Keys, SessionKeys
from tests.support.endpoint.chat_service import MODEL, ChatService, chat_service
from tests.support.endpoint.raw_requests import (
    BODY,
    BOUNDS,
    CHAT,
    DATA,
    JSON,
    USER,
    bearer,
    check_good,
    exchanged,
    refused,
    request,
)

KEYS = Keys.of(["user-1", "user-2"], "admin-1")


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """A service without keys."""
    async with chat_service(tmp_path_factory.mktemp("open"), bounds=BOUNDS) as service:
        yield service


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """The same service with keys."""
    async with chat_service(tmp_path_factory.mktemp("locked"), keys=KEYS, bounds=BOUNDS) as service:
        yield service


# Rows 51 to 54: keys, hosts, smuggling

ROUTES = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", f"{CHAT}/render"),
    ("POST", "/generate"),
    ("POST", "/sessions"),
    ("GET", "/sessions/s"),
    ("DELETE", "/sessions/s"),
    ("GET", "/sessions/s/trajectories"),
    ("POST", "/sessions/s/reward"),
    ("POST", "/sessions/s/finish"),
    ("POST", f"/sessions/s{CHAT}"),
    ("POST", "/sessions/s/v1/messages"),
    ("POST", "/admin/pause"),
]
WRONG_KEYS: dict[str, list[tuple[str, str]]] = {
    "no key": [],
    "wrong key": [("authorization", "Bearer wrong")],
    "wrong plain key": [("x-api-key", "wrong")],
    "no word": [("authorization", "Bearer ")],
    "Basic": [("authorization", "Basic dXNlci0xOg==")],
    "lower-case bearer": [("authorization", "bearer user-1")],
    "no scheme": [("authorization", "user-1")],
    "two bearers": [("authorization", "Bearer user-1"), ("authorization", "Bearer user-1")],
    "two plain keys": [("x-api-key", "user-1"), ("x-api-key", "user-1")],
    "two that differ": [("authorization", "Bearer user-1"), ("x-api-key", "user-2")],
    "session key of nobody": [("authorization", "Bearer sk-agentloop-s.00")],
    "long key": [("authorization", f"Bearer {'a' * 5000}")],
    "letters beyond ASCII": [("authorization", "Bearer \xfc\xf6")],
}


@pytest.mark.parametrize("name", WRONG_KEYS)
async def test_51_without_a_good_key(locked: ChatService, name: str) -> None:
    """Two forms are accepted: `Authorization: Bearer <key>`, with this capitalization, and `x-api-key: <key>`."""
    sent = [f"{header}: {value}" for header, value in WRONG_KEYS[name]]
    for method, path in ROUTES:
        asked = request(*sent, "Content-Length: 1", method=method, target=path, body=b"{")
        answer = await refused(locked, asked, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer", path
        assert b"user-1" not in answer.body, path


@pytest.mark.parametrize(
    "headers",
    [
        bearer("user-1"),
        {"x-api-key": "user-2"},
        bearer("admin-1"),
        {"x-api-key": "user-1", "authorization": "Bearer user-1"},
    ],
)
async def test_51_accepted_forms(locked: ChatService, headers: dict[str, str]) -> None:
    await check_good(locked, headers)


@pytest.mark.parametrize("host", ["a/x?", "a#b", "127.0.0.1/v1/models?", "a\\b", "", "a b", "a@b", "x\r\nHost: y"])
async def test_52_a_bad_host_opens_nothing(locked: ChatService, host: str) -> None:
    for target in (
        CHAT,
        "/admin/pause",
        "//v1/models",
        "/v1/../admin/pause",
        "/%61dmin/pause",
        "/v1/%2e%2e/status",
    ):
        for method in ("GET", "POST"):
            answers = await exchanged(locked, request("Content-Length: 0", method=method, target=target, host=host))
            assert {answer.status for answer in answers} <= {400, 401, 404, 405}
    await check_good(locked, bearer("user-1"))


LOCAL = ("localhost", "LocalHost:80", "127.0.0.1:1", "127.9.9.9", "[::1]:8000", "[::1]")
FOREIGN = (
    "evil.example.com",
    "evil.example.com:8000",
    "127.0.0.1.evil.com",
    "localhost.evil.com",
    "10.0.0.1",
    "[::2]",
)


@pytest.mark.parametrize("host", LOCAL)
async def test_52_without_keys_this_machine_is_served_by_its_names(service: ChatService, host: str) -> None:
    for headers in ([], [f"Origin: http://{host}"], [f"Origin: https://{host}"]):
        [answer] = await exchanged(service, request(*headers, method="GET", target="/v1/models", host=host))
        assert answer.status == 200


@pytest.mark.parametrize("target", [CHAT, "/admin/pause", "/v1/models", "/health"])
async def test_52_without_keys_no_page_of_another_site_is_served(service: ChatService, target: str) -> None:
    """A page whose name resolves to this host (DNS rebinding) is detected by Host, any other page by Origin."""
    named = [(host, []) for host in FOREIGN]
    sites = [("localhost", [f"Origin: {site}"]) for site in (*(f"http://{host}" for host in FOREIGN), "null", "")]
    for host, headers in named + sites:
        answer = await refused(
            service, request("Content-Length: 0", *headers, target=target, host=host), 403, "not_local"
        )
        assert b"localhost" in answer.body
        assert b"AGENTLOOP_KEY" in answer.body
    assert service.coordinator.paused is None


async def test_52_with_keys_a_service_has_any_name(locked: ChatService) -> None:
    headers = (
        JSON,
        f"Content-Length: {len(DATA)}",
        "Authorization: Bearer user-1",
        "Origin: https://app.example.com",
    )
    [answer] = await exchanged(locked, request(*headers, host="models.example.com", body=DATA))
    assert answer.status == 200


@pytest.mark.parametrize(
    "session_id", ["%E6%97%A5", "s-1%00", "%0d%0a", "s%0d%0aset-cookie:%20a", "s%20t", "a" * 200, "%FF"]
)
async def test_52_what_is_no_session_id_is_no_session(service: ChatService, session_id: str) -> None:
    chat = (JSON, f"Content-Length: {len(DATA)}")
    for method, target, headers, body in (
        ("GET", f"/sessions/{session_id}", [], b""),
        ("GET", f"/sessions/{session_id}/trajectories", [], b""),
        ("DELETE", f"/sessions/{session_id}", [], b""),
        ("POST", f"/sessions/{session_id}{CHAT}", chat, DATA),
    ):
        answer = await refused(
            service, request(*headers, method=method, target=target, body=body), 404, "session_not_found"
        )
        assert "x-session-id" not in answer.headers


async def test_51_without_keys_two_keys_name_no_session(service: ChatService) -> None:
    first, second = [(await service.call("POST", "/sessions", json={}))[1] for _ in range(2)]
    for one, other in ((first["api_key"], second["api_key"]), ("any", first["api_key"]), (first["api_key"], "any")):
        headers = {"authorization": f"Bearer {one}", "x-api-key": other}
        status, answer, _ = await service.call("POST", CHAT, json=BODY, headers=headers)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
    equal = {"authorization": f"Bearer {first['api_key']}", "x-api-key": first["api_key"]}
    assert (await service.call("POST", CHAT, json=BODY, headers=equal))[2]["x-session-id"] == first["session_id"]


@pytest.mark.parametrize("length", [f" {len(DATA)}", f"{len(DATA)} ", f"\t{len(DATA)} \t"])
async def test_53_a_length_may_have_white_space_around_it(service: ChatService, length: str) -> None:
    [answer] = await exchanged(service, request(JSON, f"Content-Length:{length}", body=DATA))
    assert answer.status == 200


@pytest.mark.parametrize(
    "target",
    [
        f"/{CHAT}",
        "/v1/../admin/pause",
        "/health/../admin/pause",
        "/health/%2e%2e/admin/pause",
        "/%2e%2e/admin/pause",
        "/health;/../admin/pause",
        "http://127.0.0.1/admin/pause",
        "http://admin/admin/pause",
        f"http://user-1@x{CHAT}",
        "/admin/pause/",
        "/admin%2fpause",
        "/ADMIN/pause",
        "*",
    ],
)
async def test_52_no_spelling_of_a_path_goes_round_the_key(locked: ChatService, target: str) -> None:
    answers = await exchanged(locked, request("Content-Length: 0", target=target))
    assert {answer.status for answer in answers} <= {400, 401, 404, 405}
    assert locked.coordinator.paused is None


SMUGGLED = b"POST /admin/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: 6", "Transfer-Encoding: chunked"], b"0\r\n\r\n" + SMUGGLED),
        (["Transfer-Encoding: chunked", "Content-Length: 6"], b"0\r\n\r\n" + SMUGGLED),
        (["Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"], SMUGGLED),
        (["Content-Length: 0, 5"], SMUGGLED),
        (["Content-Length: +5"], b"12345" + SMUGGLED),
        (["Content-Length: -1"], SMUGGLED),
        (["Content-Length: 0x5"], b"12345" + SMUGGLED),
        (["Content-Length: " + "9" * 40], SMUGGLED),
        (["Transfer-Encoding: chunked"], b"zz\r\nabc\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"-1\r\nabc\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
        (["Transfer-Encoding: xchunked"], b"0\r\n\r\n" + SMUGGLED),
        (["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n" + SMUGGLED),
        (["Transfer-Encoding : chunked"], b"0\r\n\r\n" + SMUGGLED),
        ([" X: folded"], SMUGGLED),
        (["X: a\x00b"], SMUGGLED),
    ],
)
async def test_53_requests_of_two_readings_are_refused(
    service: ChatService, headers: list[str], body: bytes
) -> None:
    """They never contain a second request: the connection is closed, or the following bytes are not processed."""
    answers = await exchanged(service, request(*headers, body=body, is_last=False))
    assert len(answers) <= 1
    assert {answer.status for answer in answers} <= {400, 413}
    assert service.coordinator.paused is None
    await check_good(service)


async def test_54_a_users_key_and_a_sessions_key_have_their_bounds(locked: ChatService) -> None:
    user = bearer("user-1")
    for verb in ("pause", "resume", "sleep", "wake", "weights"):
        status, body, _ = await locked.call("POST", f"/admin/{verb}", data=b"{}", headers=user)
        assert (status, body["error"]["code"]) == (403, "forbidden")
    _, made, _ = await locked.call("POST", "/sessions", json={"session_id": "own"}, headers=user)
    key = bearer(made["api_key"])
    await locked.call("POST", "/sessions", json={"session_id": "other"}, headers=user)
    assert (await locked.call("POST", "/sessions", json={}, headers=key))[0] == 403
    assert (await locked.call("POST", "/admin/pause", data=b"{}", headers=key))[0] in (401, 403)
    assert (await locked.call("GET", "/status", headers=key))[0] in (401, 403)
    for path in ("/sessions/other", "/sessions/nobody", "/sessions/own"):
        for method, one in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/finish"),
            ("POST", f"{path}/reward"),
        ):
            assert (await locked.call(method, one, json={}, headers=key))[0] == 403  # the key is for calls
    control = bearer(made["control_key"])
    for path in ("/sessions/other", "/sessions/nobody"):
        assert (await locked.call("GET", path, headers=control))[0] == 404
    assert (await locked.call("POST", "/sessions", json={}, headers=control))[0] == 403
    assert (await locked.call("GET", "/status", headers=control))[0] == 401
    assert (await locked.call("POST", f"/sessions/other{CHAT}", json=BODY, headers=key))[0] == 404
    _, answer, headers = await locked.call("POST", CHAT, json=BODY, headers=key)
    assert answer["session"]["session_id"] == headers["x-session-id"] == "own"
    assert (await locked.call("GET", "/sessions/own", headers=control))[1]["num_turns"] == 1


# Rows 60 and 61: other users' sessions, and log contents


async def test_60_nobody_sees_another_keys_session(locked: ChatService) -> None:
    """The status is 404, as for an unknown session.

    Prefix timing is not visible over HTTP: the engine's cache salt handles it.
    """
    owner, other = bearer("user-1"), bearer("user-2")
    await locked.call("POST", "/sessions", json={"session_id": "private"}, headers=owner)
    path = "/sessions/private"
    await locked.call("POST", f"{path}{CHAT}", json=BODY, headers=owner)
    asked: list[tuple[str, str, Any, dict[str, str]]] = [
        ("GET", path, None, {}),
        ("GET", f"{path}/trajectories", None, {}),
        ("DELETE", path, None, {}),
        ("POST", f"{path}/reward", {"reward": 1}, {}),
        ("POST", f"{path}/finish", {}, {}),
        ("POST", f"{path}{CHAT}", BODY, {}),
        ("POST", f"{path}{CHAT}/render", BODY, {}),
        ("POST", f"{path}/v1/messages", BODY, {}),
        ("POST", f"{path}/v1/messages/count_tokens", {"model": MODEL, "messages": [USER]}, {}),
        ("POST", f"{path}/v1/responses", {"model": MODEL, "input": "x"}, {}),
        ("POST", f"{path}/generate", {"token_ids": [1], "sampling": {"max_tokens": 1}}, {}),
    ]
    for method, one, body, headers in asked:
        status, answer, _ = await locked.call(method, one, json=body, headers={**other, **headers})
        assert (status, answer["error"]["code"]) == (404, "session_not_found"), (method, one)
    for named in (
        {"headers": {**other, "x-session-id": "private"}, "json": BODY},
        {"headers": other, "json": {**BODY, "session": "private"}},
    ):
        status, answer, headers = await locked.call("POST", CHAT, **named)  # a separate session of the same name
        assert (status, headers["x-session-id"], answer["session"]["session_id"]) == (200, "private", "private")
    assert (await locked.call("GET", path, headers=owner))[1]["num_turns"] == 1
    assert (await locked.call("GET", path, headers=other))[1]["num_turns"] == 2


@pytest.mark.parametrize("request_id", ["a b", "a\x1b[31mred", "x" * 200, "a\tb", '{"a":1}', "\xff"])
async def test_61_a_request_id_that_could_write_logs_is_replaced(service: ChatService, request_id: str) -> None:
    sent = request(f"X-Request-ID: {request_id}", "Content-Length: 0", target="/nowhere")
    for answer in await exchanged(service, sent):  # no answer: the server closed the connection
        assert request_id not in answer.headers.get("x-request-id", "")
    [kept] = await exchanged(service, request("X-Request-ID: trace-7", "Content-Length: 0", target="/nowhere"))
    assert kept.headers["x-request-id"] == "trace-7"


async def test_61_keys_are_not_logged(locked: ChatService) -> None:
    secrets = {"authorization": "Bearer user-1", "x-secret": "hush\n".strip()}
    with capture_logs() as logs:
        locked.coordinator.next_errors = [RuntimeError("broken")]
        status, body, _ = await locked.call("GET", "/status", headers=secrets)
        await locked.call("POST", CHAT, json={**BODY, "model": "x\n\rINFO forged"}, headers=secrets)
        await locked.call("GET", "/status", headers=bearer("user-3"))
    assert (status, body["error"]["message"]) == (500, "internal error")
    assert [one["event"] for one in logs] == ["request_failed"]
    assert not any(word in repr(logs) for word in ("user-1", "user-3", "hush"))


async def test_a_removed_user_has_no_powers_and_the_admin_reaches_its_sessions(tmp_path: Path) -> None:
    keys = Keys.of(["user-1", "user-2"], "admin-1")
    first, second, admin = keys.users
    async with chat_service(tmp_path, keys=keys, bounds=BOUNDS) as service:

        async def ask(key: str, method: str, path: str, body: Any = None) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await service.call(method, path, json=body, headers=headers))[0]

        made = {}
        for name, key in (("own", "user-1"), ("shared", "user-1"), ("shared", "user-2")):
            body = {"session_id": name}
            _, made[name, key], _ = await service.call("POST", "/sessions", json=body, headers=bearer(key))
        keys.learn((second, admin))
        for key in (made["own", "user-1"]["api_key"], made["own", "user-1"]["control_key"], "user-1"):
            assert await ask(key, "POST", f"/sessions/own{CHAT}", BODY) == 401
        control_key = made["own", "user-1"]["control_key"]
        assert await ask(control_key, "POST", "/sessions/own/reward", {"reward": 1.0}) == 401
        assert await ask("user-2", "GET", f"/sessions/{first.name}~own") == 404
        for name in ("own", f"{first.name}~own"):
            assert await ask("admin-1", "GET", f"/sessions/{name}") == 200
            assert await ask("admin-1", "POST", f"/sessions/{name}{CHAT}", BODY) == 200
        assert await ask("admin-1", "POST", "/sessions/own/finish", {}) == 200
        assert await ask("admin-1", "GET", "/sessions/shared") == 409  # two users have a session of this name
        assert await ask("admin-1", "DELETE", f"/sessions/{first.name}~shared") == 200
        assert await ask("admin-1", "GET", "/sessions/shared") == 200
        assert await ask("user-2", "GET", "/sessions/shared") == 200


def test_a_turn_is_a_users_only_by_a_valid_key() -> None:
    keys, sessions = Keys.of(["user-1"], "admin-1"), SessionKeys("secret")
    user = keys.users[0].name
    for key, name in (
        ("user-1", user),
        ("wrong", ""),
        (sessions.agent_key(f"{user}~s"), user),
        (sessions.control_key(f"{user}~s"), user),
        (SessionKeys("forged").agent_key(f"{user}~s"), ""),
        (sessions.agent_key("stranger~s"), ""),
        (f"sk-agentloop-{user}~s.{'0' * 64}", ""),
    ):
        assert keys.turn_user(Headers({"authorization": f"Bearer {key}"}), sessions.opened_by) == name
