"""The users' file: names, key rotation, limits, and reloading by every process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from structlog.testing import capture_logs

from agentloop.api.owners import UserLimits, UserTable
from agentloop.concurrency.clock import VirtualClock
from agentloop.errors import InvalidRequest
from agentloop.scheduling.dispatch_order import UserTurns
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.simulation.policy import LatencyModel
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.endpoint.users import ServedUsers
from agentloop_servers.http.auth import Keys
from agentloop_servers.users import load_users, table_of
from tests.support.engine.scripted import RENDERER
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

CALL = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "min_tokens": 200}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, *users: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"users": list(users)}))
    return path


ROOT = {"name": "root", "keys": [digest("root")], "admin": True}


def test_a_file_says_names_keys_and_limits(tmp_path: Path) -> None:
    limits = {"open_calls": 2, "sessions": 3, "live_trajectories": 4, "tokens_per_minute": 5}
    keys = {"keys": [digest("new"), digest("newer")], "retired": [digest("old")]}
    alice, root = load_users(
        write(tmp_path / "users.yaml", {"name": "alice", **keys, "share": 2, "limits": limits}, ROOT)
    )
    assert (alice.limits, root.limits) == (UserLimits(2, 3, 4, 5, 2.0), UserLimits())
    assert (alice.is_admin, root.is_admin) == (False, True)
    assert alice.names[0] == "alice"
    assert alice.names[1:] == tuple(f"key-{digest(key)[:12]}" for key in ("new", "newer", "old"))
    table = table_of((alice, root))
    assert table.names[f"key-{digest('old')[:12]}"] == "alice"
    assert table.limits["alice"] == alice.limits


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("users: [", "not valid YAML"),
        ("people: []", "users: Field required"),
        ("users: []", "users"),
        ("users: [{name: a b}]", r"users\.0\.name"),
        ("users: [{name: a, keys: [plain]}]", r"users\.0\.keys\.0"),
        ("users: [{name: a, key: x}]", r"users\.0\.key: Extra"),
        ("users: [{name: a}, {name: a}]", "a name occurs twice"),
        (f"users: [{{name: a, keys: [{'ab' * 32}]}}, {{name: b, retired: [{'ab' * 32}]}}]", "a key occurs twice"),
        ("users: [{name: a, share: 0}]", r"users\.0\.share"),
    ],
)
def test_a_bad_file_is_refused_by_its_name_and_field(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=rf"users\.yaml.*{names}"):
        load_users(path)
    with pytest.raises(InvalidRequest, match="cannot read the user file"):
        load_users(tmp_path / "absent")


def test_tokens_are_those_of_the_last_minute() -> None:
    clock = VirtualClock()
    users = UserTurns(lambda: UserTable({}, {"a": UserLimits(tokens_per_minute=100)}), clock)

    async def main() -> None:
        for _ in range(3):
            users.count_tokens("a", 40)
            await clock.sleep(20.0)
        assert (users.tokens_of("a"), users.has_tokens("a")) == (80, True)  # the first call is a minute old
        users.count_tokens("a", 40)
        assert not users.has_tokens("a")
        assert users.has_tokens("b")
        await clock.sleep(30.0)
        assert users.has_tokens("a")

    clock.run(main())


def build(config: ServiceConfig) -> SimulatedEngine:
    """Build an engine whose calls take two seconds."""
    return SimulatedEngine(
        SimulatedSpec(RENDERER.vocab_size, 4096, num_blocks=64_000, latency=LatencyModel(decode_s=0.01))
    )


class Users:
    def __init__(self, site: ServiceSite, path: Path, http: aiohttp.ClientSession) -> None:
        self.site, self.path, self.http = site, path, http

    async def ask(self, key: str, method: str, path: str, body: Any = None, process: int = 0) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.request(method, self.site.urls[process] + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def users(tmp_path: Path) -> AsyncIterator[Users]:
    (tmp_path / "run").mkdir()
    bounded = {"limits": {"open_calls": 2, "sessions": 4}}
    path = write(
        tmp_path / "users.yaml",
        {"name": "alice", "keys": [digest("a1")], **bounded},
        {"name": "bob", "keys": [digest("b")]},
        ROOT,
    )
    config = simulated_config(replicas=1, ingress_replicas=2, users=str(path))
    async with whole_site(config, tmp_path / "run", build) as site, aiohttp.ClientSession() as http:
        yield Users(site, path, http)


@pytest.mark.slow
async def test_a_user_has_its_limits_and_others_have_theirs(users: Users) -> None:
    sessions = [(await users.ask("a1", "POST", "/sessions", {}))[1] for _ in range(4)]
    status, refused = await users.ask("a1", "POST", "/sessions", {})
    assert (status, refused["error"]["code"]) == (429, "overloaded")
    assert "user 'alice' has 4 open sessions" in refused["error"]["message"]
    assert (await users.ask("b", "POST", "/sessions", {}))[0] == 200
    paths = [f"/sessions/{one['session_id']}/v1/chat/completions" for one in sessions]
    calls = [asyncio.create_task(users.ask("a1", "POST", path, CALL)) for path in paths[:2]]
    await asyncio.sleep(0.7)
    status, refused = await users.ask("a1", "POST", paths[2], CALL)
    assert (status, refused["error"]["code"]) == (429, "overloaded")
    assert (await users.ask("b", "POST", "/v1/chat/completions", CALL))[0] == 200
    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
    assert (await users.ask("a1", "POST", paths[2], CALL))[0] == 200
    async with asyncio.timeout(20):
        while True:  # reports are sent once a second
            _, status = await users.ask("root", "GET", "/status", process=1)
            used = {one["name"]: one for one in status["users"]}
            if used.get("alice", {}).get("sessions") == 4 and used["alice"]["tokens_last_minute"] >= 600:
                break
            await asyncio.sleep(0.1)
    assert used["bob"]["sessions"] == 2
    _, status = await users.ask("b", "GET", "/status")
    assert [one["name"] for one in status["users"]] == ["bob"]


async def test_keys_rotate_without_a_restart(users: Users) -> None:
    made = (await users.ask("a1", "POST", "/sessions", {"session_id": "kept"}))[1]
    write(users.path, {"name": "alice", "keys": [digest("a2")], "retired": [digest("a1")]}, ROOT)
    assert (await users.ask("a2", "GET", "/status"))[0] == 401  # the change is not loaded yet
    assert (await users.ask("a1", "POST", "/admin/users"))[0] == 403
    assert (await users.ask("root", "POST", "/admin/users")) == (200, {"num_users": 2})
    assert (await users.ask("a1", "GET", "/status"))[0] == 401
    assert (await users.ask("a2", "GET", f"/sessions/{made['session_id']}"))[0] == 200
    async with asyncio.timeout(20):
        while (await users.ask("b", "GET", "/status", process=1))[0] != 401:  # the other process follows
            await asyncio.sleep(0.1)
    assert (await users.ask("a2", "GET", "/status", process=1))[0] == 200
    users.path.write_text("users: [")
    assert (await users.ask("root", "POST", "/admin/users"))[0] == 400
    assert (await users.ask("a2", "GET", "/status"))[0] == 200  # the previous users stay


async def test_two_processes_list_a_users_sessions_as_one(users: Users) -> None:
    for index in range(12):
        assert (await users.ask("b", "POST", "/sessions", {"session_id": f"s-{index:02}"}, index % 2))[0] == 200
    names = [f"s-{index:02}" for index in range(12)]
    for process in (0, 1):
        _, whole = await users.ask("b", "GET", "/sessions", process=process)
        assert [one["session_id"] for one in whole["sessions"]] == names
        _, page = await users.ask("b", "GET", "/sessions?after=s-03&limit=5", process=process)
        assert [one["session_id"] for one in page["sessions"]] == names[4:9]
    assert (await users.ask("a1", "GET", "/sessions"))[1] == {"sessions": []}


async def test_open_sessions_of_a_removed_user_are_named_in_one_line() -> None:
    keys = Keys.of(["alice", "bob"], "root")
    alice, *others = keys.users

    async def count() -> dict[str, int]:
        return {alice.name: 2, others[0].name: 1, "": 1}

    users = ServedUsers(keys, FakeCoordinator(), lambda: tuple(others), count)
    with capture_logs() as lines:
        await users.read_again()
        await users.read_again()
    named = [line for line in lines if line["event"] == "open_sessions_without_a_user"]
    assert [(line["user"], line["num_sessions"]) for line in named[:1]] == [(alice.name, 2)]
    assert {line["user"] for line in named} == {alice.name}
