"""The HTTP app on a real socket. The table of bad inputs specifies the refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi import Request

from agentloop.api.coordinator import Page, RolloutTerms
from agentloop.api.facts import FactsQuery, ListOrder
from agentloop.engine.interface import PushSource, TensorInfo, WeightUpdate
from agentloop.errors import (
    EngineLost,
    EnginePaused,
    Forbidden,
    InvalidRequest,
    NoHealthyReplica,
    WeightUpdateFailed,
)
from agentloop.plugins import AllowedImports
from agentloop.types import KVPolicy, PauseMode
from agentloop.values import codec
from agentloop.values.checks import is_loopback
from agentloop_servers.config.service import WorkerSettings
from agentloop_servers.http.auth import Keys, User, key_digest
from agentloop_servers.http.guard import HttpLimits
from agentloop_servers.ingress.admin import ModeRules
from agentloop_servers.ingress.app import create_app
from tests.support.endpoint.front_door import serving
from tests.support.engine.engines import ReversingEngine
from tests.support.fleet.fake_coordinator import FakeCoordinator
from tests.support.records.samples import make_group

LIMITS = HttpLimits(max_body_bytes=200_000, max_direct_calls=2, body_timeout_s=1.0, coordinator_timeout_s=5.0)
RULES = ModeRules()
PUSH = {
    "addresses": ["127.0.0.1:5000"],
    "token": "t",
    "tensors": [{"name": "w", "dtype": "float32", "shape": [2]}],
}
GENERATE = {"token_ids": [1, 2, 3], "sampling": {"max_tokens": 2}}
TASK = {"task_id": "t", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Door:
    url: str
    coordinator: FakeCoordinator
    engine: ReversingEngine
    http: aiohttp.ClientSession
    root: Path

    async def call(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        """Return status, JSON body and headers, after checking the properties that every answer has."""
        async with self.http.request(method, self.url + path, **kwargs) as answer:
            assert answer.headers["x-request-id"]
            body = orjson.loads(await answer.read())
            if answer.status >= 400 and path != "/health":
                assert set(body) == {"error"}
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert len(orjson.dumps(body)) < 16_384
            return answer.status, body, answer.headers


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path, Keys()) as door:
        yield door


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    """One server for the tables of requests that must leave no trace."""
    async with opened(tmp_path_factory.mktemp("shared"), Keys()) as door:
        yield door


class opened:
    """Serve an app with the given keys; its weight root is `tmp_path/weights`."""

    def __init__(
        self,
        tmp_path: Path,
        keys: Keys,
        rules: ModeRules = RULES,
        allowed_imports: AllowedImports = AllowedImports(),  # noqa: B008 - frozen
        nodes_without: Callable[[str], tuple[str, ...]] | None = None,
    ) -> None:
        self._allowed_imports = allowed_imports
        self._nodes_without = nodes_without
        self._root = tmp_path / "weights"
        self._root.mkdir(exist_ok=True)
        self._keys = keys
        self._rules = rules

    async def __aenter__(self) -> Door:
        coordinator, engine = FakeCoordinator(), ReversingEngine()
        app = create_app(
            coordinator,
            engine.connect,
            self._keys,
            LIMITS,
            weight_roots=[self._root],
            tool_names=frozenset({"calculator"}),
            rules=self._rules,
            allowed_imports=self._allowed_imports,
            nodes_without=self._nodes_without,
        )
        self._serving = serving(app)
        url = await self._serving.__aenter__()
        self._http = aiohttp.ClientSession()
        return Door(url, coordinator, engine, self._http, self._root)

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()
        await self._serving.__aexit__(None, None, None)


async def given_back(door: Door) -> None:
    """Wait until the process has released all its leases."""
    async with asyncio.timeout(20):
        while door.coordinator.leases:
            await asyncio.sleep(0.01)


# Accepted requests


async def test_generate_takes_ids_and_gives_ids_and_the_lease_is_given_back(door: Door) -> None:
    status, body, _ = await door.call("POST", "/generate", json=GENERATE)
    assert status == 200
    assert body["token_ids"] == [3, 2]
    assert body["weight_versions"] == [{"version": 0, "start": 0, "end": 2}]
    assert door.coordinator.num_leased == 1
    await given_back(door)


async def test_a_retryable_failure_is_repeated_once_on_another_lease(door: Door) -> None:
    door.engine.errors = [EngineLost("gone")]
    status, body, _ = await door.call("POST", "/generate", json=GENERATE)
    assert (status, body["replica_id"]) == (200, "url-2")
    door.engine.errors = [EngineLost("gone"), EngineLost("gone too")]
    status, body, headers = await door.call("POST", "/generate", json=GENERATE)
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "engine_lost", "1")
    await given_back(door)


async def test_a_direct_call_waits_a_pause_out_on_its_replica(door: Door) -> None:
    door.engine.errors = [EnginePaused("an update")] * 3
    status, body, _ = await door.call("POST", "/generate", json=GENERATE)
    assert (status, body["replica_id"], len(door.engine.requests)) == (200, "url-1", 4)
    assert door.coordinator.moved == []


async def test_a_permanent_failure_is_not_repeated(door: Door) -> None:
    door.engine.errors = [InvalidRequest("no such token", param="token_ids")]
    status, body, _ = await door.call("POST", "/generate", json=GENERATE)
    assert (status, body["error"]["param"], len(door.engine.requests)) == (400, "token_ids", 1)


async def test_a_client_that_leaves_cancels_the_call_and_frees_the_lease(door: Door) -> None:
    door.engine.is_hanging = True
    call = asyncio.create_task(door.call("POST", "/generate", json=GENERATE))
    async with asyncio.timeout(20):
        await door.engine.started.wait()
        call.cancel()
        await door.engine.cancelled.wait()
        await given_back(door)


async def test_a_call_past_its_deadline_is_ended(door: Door) -> None:
    door.engine.is_hanging = True
    status, body, _ = await door.call("POST", "/generate", json={**GENERATE, "timeout_s": 0.1})
    assert (status, body["error"]["code"], door.engine.num_cancelled) == (504, "deadline_exceeded", 1)


async def test_direct_calls_are_bounded(door: Door) -> None:
    door.engine.is_hanging = True
    calls = [asyncio.create_task(door.call("POST", "/generate", json=GENERATE)) for _ in range(2)]
    async with asyncio.timeout(20):
        while len(door.engine.requests) < 2:
            await asyncio.sleep(0.01)
    status, body, headers = await door.call("POST", "/generate", json=GENERATE)
    assert (status, body["error"]["code"]) == (429, "overloaded")
    assert 1 <= int(headers["retry-after"]) <= 60
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_rollouts_from_submit_to_the_last_page(door: Door) -> None:
    body = {"tasks": [TASK, {**TASK, "tools": ["calculator"]}], "num_samples": 3, "rollout_id": "mine"}
    status, answer, _ = await door.call("POST", "/rollouts", json=body)
    assert (status, answer["num_accepted"], answer["is_done"]) == (200, 6, True)
    again = await door.call("POST", "/rollouts", json=body)
    assert again[1] == answer  # the repeated submit
    other = await door.call("POST", "/rollouts", json={**body, "num_samples": 1})
    assert (other[0], other[1]["error"]["code"]) == (409, "conflict")
    assert list(door.coordinator.groups["mine"]) == ["mine-000000", "mine-000001"]
    assert (await door.call("GET", "/rollouts/mine"))[1]["num_finished"] == 6
    status, page, _ = await door.call("GET", "/rollouts/mine/trajectories?after=4&limit=5")
    assert (len(page["trajectories"]), page["cursor"]) == (2, 6)
    assert (await door.call("POST", "/rollouts/mine/cancel"))[0] == 200
    assert door.coordinator.is_cancelled


async def test_trajectories_come_as_msgpack_too(door: Door) -> None:
    await door.call("POST", "/rollouts", json={"tasks": [TASK], "rollout_id": "mine"})
    url = f"{door.url}/rollouts/mine/trajectories"
    async with door.http.get(url, headers={"accept": "application/msgpack"}) as answer:
        assert answer.content_type == "application/msgpack"
        page = codec.decode(await answer.read(), Page)
    assert page.trajectories[0].path.response_ids.tolist() == list(range(100, 108))


async def test_a_read_waits_for_the_first_trajectory(door: Door) -> None:
    door.coordinator.is_holding = True
    await door.call("POST", "/rollouts", json={"tasks": [TASK], "rollout_id": "mine"})
    assert (await door.call("GET", "/rollouts/mine/trajectories"))[1]["trajectories"] == []
    reading = asyncio.create_task(door.call("GET", "/rollouts/mine/trajectories?wait_s=30"))
    await asyncio.sleep(0.1)
    assert not reading.done()
    door.coordinator.finish_held("mine")
    async with asyncio.timeout(20):
        assert len((await reading)[1]["trajectories"]) == 1


async def test_status_and_health(door: Door) -> None:
    status = (await door.call("GET", "/status"))[1]
    assert (status["is_ready"], status["replicas"][0]["replica_id"]) == (True, "replica-1")
    assert (await door.call("GET", "/health"))[:2] == (200, {"is_ready": True, "is_degraded": False})
    door.coordinator.is_ready = False
    await asyncio.sleep(1.1)  # a cached status is at most a second old
    status, body, headers = await door.call("GET", "/health")
    assert (status, body, headers["retry-after"]) == (503, {"is_ready": False, "is_degraded": True}, "1")


async def test_health_checks_ask_the_coordinator_once_a_second_at_most(door: Door) -> None:
    """The answer is still correct a second later; a coordinator that hangs is not ready."""
    asked = door.coordinator.num_status_calls
    assert {(await door.call("GET", "/health"))[0] for _ in range(100)} == {200}
    await asyncio.gather(*(door.call("GET", "/health") for _ in range(100)))
    assert door.coordinator.num_status_calls - asked <= 5  # elapsed time adds some of them
    door.coordinator.is_ready = False
    async with asyncio.timeout(30):
        while (await door.call("GET", "/health"))[0] == 200:
            await asyncio.sleep(0.1)
    door.coordinator.is_ready = True
    door.coordinator.status_delay_s = 3600.0
    await asyncio.sleep(1.1)
    assert (await door.call("GET", "/health"))[:2] == (503, {"is_ready": False, "is_degraded": True})


async def test_admin_routes_reach_the_fleet(door: Door) -> None:
    assert (await door.call("POST", "/admin/pause", json={"mode": "wait"}))[1] == {"is_paused": True}
    assert door.coordinator.paused is PauseMode.WAIT
    assert (await door.call("POST", "/admin/resume"))[1] == {"is_paused": False}
    (door.root / "v1").mkdir()
    body = {"version": 0, "directory": str(door.root / "v1"), "kv_policy": "keep"}
    status, report, _ = await door.call("POST", "/admin/weights", json=body)
    assert status == 200
    assert (report["version"], report["kv_policy"]) == (0, "keep")
    [(update, policy)] = door.coordinator.updates
    assert (update.version, update.directory, policy) == (0, str((door.root / "v1").resolve()), KVPolicy.KEEP)


async def test_sleep_and_wake_reach_the_fleet_and_tell_what_is_asleep(door: Door) -> None:
    status, body, _ = await door.call("POST", "/admin/sleep", json={"level": 2})
    assert (status, body, door.coordinator.sleep_levels) == (200, {"asleep": ["weights", "kv_cache"]}, [2])
    assert (await door.call("GET", "/status"))[1]["asleep"] == ["weights", "kv_cache"]
    assert (await door.call("POST", "/admin/wake", json={"tags": ["weights"]}))[1] == {"asleep": ["kv_cache"]}
    assert (await door.call("POST", "/admin/wake", json={}))[1] == {"asleep": []}


async def test_tensors_are_announced_to_the_fleet(door: Door) -> None:
    status, report, _ = await door.call("POST", "/admin/weights", json={"version": 1, "push": PUSH})
    assert (status, report["version"]) == (200, 1)
    source = PushSource(("127.0.0.1:5000",), "t", (TensorInfo("w", "float32", (2,)),))
    assert door.coordinator.updates == [(WeightUpdate(1, push=source), None)]


async def test_an_adapter_lies_under_the_roots_too(door: Door) -> None:
    (door.root / "lora").mkdir()
    body = {"version": 1, "adapter": str(door.root / "lora")}
    assert (await door.call("POST", "/admin/weights", json=body))[0] == 200
    assert door.coordinator.updates[0][0].adapter == str((door.root / "lora").resolve())
    status, answer, _ = await door.call("POST", "/admin/weights", json={"version": 2, "adapter": "/"})
    assert (status, answer["error"]["param"]) == (400, "adapter")


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        (ModeRules(), set()),
        (ModeRules("debug", allows_push=False, can_sleep=False), {"push", "sleep", "wake"}),
        (ModeRules("colocated", allows_weights=False), {"directory", "push", "adapter"}),
        (ModeRules("hybrid", allows_adapters=False), {"adapter"}),
    ],
)
async def test_the_mode_says_what_is_possible(tmp_path: Path, rules: ModeRules, refused: set[str]) -> None:
    async with opened(tmp_path, Keys(), rules) as door:
        questions = {
            "directory": ("/admin/weights", {"version": 1, "directory": str(door.root)}),
            "push": ("/admin/weights", {"version": 1, "push": PUSH}),
            "adapter": ("/admin/weights", {"version": 1, "adapter": str(door.root)}),
            "sleep": ("/admin/sleep", {}),
            "wake": ("/admin/wake", {}),
        }
        for name, (path, body) in questions.items():
            status, answer, _ = await door.call("POST", path, json=body)
            assert status == (400 if name in refused else 200), name
            if name in refused:
                assert rules.mode in answer["error"]["message"]
        assert len(door.coordinator.updates) == 3 - len(refused & {"directory", "push", "adapter"})


async def test_records_are_listed_by_their_facts(door: Door) -> None:
    query = "order=slowest&failed=true&task=t1&text=a%20b&limit=200&cursor=[1,2]&min_reward=0.5&max_s=1e3"
    status, page, _ = await door.call("GET", f"/trajectories?{query}")
    assert status == 200
    asked = FactsQuery(ListOrder.SLOWEST, True, "t1", "a b", 200, "[1,2]", min_reward=0.5, max_s=1000.0)
    assert door.coordinator.listed == [asked]
    assert (page["records"][0]["reward"], page["records"][0]["task"], page["cursor"]) == (
        0.5,
        "What is 2 + 3?",
        "[7,7]",
    )
    assert page["totals"][0]["num_records"] == 1
    for wrong in ("order=longest", "limit=201", "limit=0", "failed=maybe", "min_s=x", f"text={'x' * 300}"):
        status, answer, _ = await door.call("GET", f"/trajectories?{wrong}")
        assert (status, answer["error"]["param"]) == (400, wrong.partition("=")[0])


async def test_the_openapi_page_tells_every_route_and_body(door: Door) -> None:
    _, schema, _ = await door.call("GET", "/openapi.json")
    assert set(schema["paths"]) == {
        "/health",
        "/health_generate",
        "/generate",
        "/rollouts",
        "/rollouts/{rollout_id}",
        "/rollouts/{rollout_id}/trajectories",
        "/rollouts/{rollout_id}/acknowledge",
        "/rollouts/{rollout_id}/annotate",
        "/rollouts/{rollout_id}/cancel",
        "/status",
        "/trajectories",
        "/trajectories/notable",
        "/trajectories/{seq}",
        "/updates",
        "/phases",
        "/metrics",
        "/flight",
        "/history",
        "/why",
        "/admin/users",
        "/admin/drain",
        "/admin/hold",
        "/admin/hold/renew",
        "/admin/pause",
        "/admin/resume",
        "/admin/weights",
        "/admin/weights/follow",
        "/admin/sleep",
        "/admin/wake",
    }
    text = orjson.dumps(schema).decode()
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schema["components"]["schemas"])
    assert {"GenerateBody", "SubmitBody", "TaskBody", "Trajectory", "ErrorBody", "PushBody"} <= names
    sources = schema["components"]["schemas"]["WeightsBody"]["oneOf"]
    assert [source["required"] for source in sources] == [["directory"], ["push"], ["adapter"]]
    assert "HTTPValidationError" not in text or "422" not in schema["paths"]["/generate"]["post"]["responses"]


async def test_the_clients_request_id_is_kept_if_it_is_sane(door: Door) -> None:
    _, _, headers = await door.call("GET", "/status", headers={"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    _, _, headers = await door.call("GET", "/nowhere", headers={"x-request-id": "a b\u00ff" + "c" * 200})
    assert len(headers["x-request-id"]) == 32


# Refused requests

JSON = {"content-type": "application/json"}


def annotate(name: str = "advantage", **changed: Any) -> bytes:
    one = {"group_id": "g", "sample_index": 0, "scope": "record", "values": [[0.5]], **changed}
    return orjson.dumps({"name": name, "annotations": [one]})


DEEP = b'{"tasks": [{"task_id": "t", "messages": [{"role": "user"}], "reference": ' + b"[" * 90_000
CASES: dict[str, tuple[str, bytes, int, str | None]] = {
    # Name: path, body, status, and the prefix of the param.
    "empty": ("/generate", b"", 400, None),
    "null": ("/generate", b"null", 400, None),
    "list": ("/generate", b"[]", 400, None),
    "malformed": ("/generate", b"{token_ids: [1]}", 400, None),
    "truncated": ("/generate", orjson.dumps(GENERATE)[:-3], 400, None),
    "trailing": ("/generate", orjson.dumps(GENERATE) + b"x", 400, None),
    "utf-16": ("/generate", orjson.dumps(GENERATE).decode().encode("utf-16"), 400, None),
    "byte order mark": ("/generate", b"\xef\xbb\xbf" + orjson.dumps(GENERATE), 400, None),
    "invalid utf-8": ("/rollouts", b'{"tasks": [{"task_id": "\xff"}]}', 400, None),
    "annotation of NaN": ("/rollouts/r/annotate", annotate().replace(b"0.5", b"NaN"), 400, "annotations.0.values"),
    "annotation beyond 32 bits": ("/rollouts/r/annotate", annotate(values=[[1e39]]), 400, "values"),
    "annotation without a scope": ("/rollouts/r/annotate", annotate(scope="turn"), 400, "annotations.0.scope"),
    "annotation of no name": ("/rollouts/r/annotate", annotate("a b"), 400, "name"),
    "annotation of no rollout": ("/rollouts/r/annotate", annotate(), 404, "rollout_id"),
    "NaN": ("/generate", b'{"token_ids":[1],"sampling":{"max_tokens":1,"temperature":NaN}}', 400, "sampling.temp"),
    "-Infinity": (
        "/generate",
        b'{"token_ids":[1],"sampling":{"max_tokens":1},"timeout_s":-Infinity}',
        400,
        "timeout",
    ),
    "1e999": (
        "/generate",
        b'{"token_ids":[1],"sampling":{"max_tokens":1,"temperature":1e999}}',
        400,
        "sampling.temp",
    ),
    "NaN in free JSON": (
        "/rollouts",
        b'{"tasks":[{"task_id":"t","messages":[{"role":"user"}],"reference":{"x":[NaN]}}]}',
        400,
        "tasks.0.reference",
    ),
    "lone surrogate": (
        "/rollouts",
        b'{"tasks":[{"task_id":"t","messages":[{"role":"user","content":"\\ud800"}]}]}',
        400,
        None,
    ),
    "deep nesting": ("/rollouts", DEEP + b"]" * 90_000 + b"}]}", 400, None),
    "huge integer": ("/generate", b'{"token_ids":[' + b"9" * 5000 + b'],"sampling":{"max_tokens":1}}', 400, None),
    "integer beyond 64 bits": (
        "/generate",
        b'{"token_ids":[1180591620717411303424],"sampling":{"max_tokens":1}}',
        400,
        "token_ids",
    ),
    "bool for an integer": ("/generate", b'{"token_ids":[true],"sampling":{"max_tokens":1}}', 400, "token_ids.0"),
    "string for a number": (
        "/generate",
        b'{"token_ids":[1],"sampling":{"max_tokens":"1"}}',
        400,
        "sampling.max_tokens",
    ),
    "float for an integer": ("/generate", b'{"token_ids":[1.5],"sampling":{"max_tokens":1}}', 400, "token_ids.0"),
    "negative id": ("/generate", b'{"token_ids":[-1],"sampling":{"max_tokens":1}}', 400, "token_ids.0"),
    "max_tokens 0": ("/generate", b'{"token_ids":[1],"sampling":{"max_tokens":0}}', 400, "sampling.max_tokens"),
    "unknown field": ("/generate", b'{"token_ids":[1],"sampling":{"max_tokens":1},"model":"x"}', 400, "model"),
    "missing field": ("/generate", b'{"token_ids":[1]}', 400, "sampling"),
    "no tasks": ("/rollouts", b'{"tasks":[]}', 400, "tasks"),
    "too many samples": (
        "/rollouts",
        orjson.dumps({"tasks": [TASK], "num_samples": 1_000_000}),
        400,
        "num_samples",
    ),
    "unknown tool": ("/rollouts", orjson.dumps({"tasks": [TASK, {**TASK, "tools": ["rm"]}]}), 400, "tasks.1.tools"),
    "unknown loop": ("/rollouts", orjson.dumps({"tasks": [{**TASK, "loop": "no_loop"}]}), 400, "tasks.0.loop"),
    "unknown reward": ("/rollouts", orjson.dumps({"tasks": [{**TASK, "reward": "no"}]}), 400, "tasks.0.reward"),
    "unknown pause mode": ("/admin/pause", b'{"mode":"stop"}', 400, "mode"),
    "no source": ("/admin/weights", b'{"version":1}', 400, "directory"),
    "two sources": ("/admin/weights", b'{"version":1,"directory":"/x","adapter":"/x"}', 400, "directory"),
    "a push without tensors": (
        "/admin/weights",
        b'{"version":1,"push":{"addresses":["h:1"],"token":"t","tensors":[]}}',
        400,
        "push.tensors",
    ),
    "an address without a port": (
        "/admin/weights",
        b'{"version":1,"push":{"addresses":["h"],"token":"t","tensors":[]}}',
        400,
        "push.addresses.0",
    ),
    "sleep level 3": ("/admin/sleep", b'{"level":3}', 400, "level"),
    "unknown memory": ("/admin/wake", b'{"tags":["lora"]}', 400, "tags.0"),
    "negative version": ("/admin/weights", b'{"version":-1,"directory":"/x"}', 400, "version"),
    "too large": ("/generate", b" " * 200_001, 413, None),
}


@pytest.mark.parametrize("name", CASES)
async def test_bad_bodies(shared: Door, name: str) -> None:
    path, data, expected, param = CASES[name]
    status, body, _ = await shared.call("POST", path, data=data, headers=JSON)
    assert status == expected
    assert body["error"]["type"] == "invalid_request_error"
    assert (body["error"]["param"] or "").startswith(param or "")
    assert (body["error"]["param"] is None) == (param is None)
    assert shared.engine.requests == []
    assert shared.coordinator.groups == {}
    assert (await shared.call("GET", "/status"))[0] == 200


async def test_a_chunked_body_is_cut_at_the_bound(door: Door) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while num_sent < 50_000_000:
            num_sent += 10_000
            yield b" " * 10_000
            await asyncio.sleep(0)

    try:
        status, body, _ = await door.call("POST", "/generate", data=endless(), headers=JSON)
        assert (status, body["error"]["code"]) == (413, "body_too_large")
    except aiohttp.ClientConnectionError:
        pass  # the server may close before the client has read the answer
    assert num_sent < 20_000_000
    assert (await door.call("GET", "/status"))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/plain"}, 400, "invalid_request"),
        ({"content-type": "application/json; charset=utf-16"}, 400, "invalid_request"),
        ({"content-type": "application/msgpack"}, 400, "invalid_request"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json", "content-encoding": "zstd"}, 415, "unsupported_media_type"),
    ],
)
async def test_other_media_types_are_refused(shared: Door, headers: dict[str, str], status: int, code: str) -> None:
    answer = await shared.call("POST", "/generate", data=b"\x1f\x8b\x08", headers=headers)
    assert (answer[0], answer[1]["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "//status", 404, "not_found"),
        ("GET", "/status/", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("GET", "/rollouts/unknown", 404, "not_found"),
        ("GET", "/rollouts/unknown/trajectories", 404, "not_found"),
        ("POST", "/rollouts/unknown/cancel", 404, "not_found"),
        ("GET", "/rollouts/a%20b", 400, "invalid_request"),
        ("GET", "/rollouts/r/trajectories?after=-1", 400, "invalid_request"),
        ("GET", "/rollouts/r/trajectories?after=x", 400, "invalid_request"),
        ("GET", "/rollouts/r/trajectories?limit=100000", 400, "invalid_request"),
        ("GET", "/rollouts/r/trajectories?wait_s=nan", 400, "invalid_request"),
        ("GET", "/rollouts/r/trajectories?wait_s=inf", 400, "invalid_request"),
    ],
)
async def test_bad_paths_and_queries(shared: Door, method: str, path: str, status: int, code: str) -> None:
    answer = await shared.call(method, path)
    assert (answer[0], answer[1]["error"]["code"]) == (status, code)


async def test_coordinator_errors_keep_their_code_and_others_become_a_plain_500(door: Door) -> None:
    door.coordinator.next_errors = [NoHealthyReplica("none")] * 1000  # retried until the call's deadline
    status, body, headers = await door.call("POST", "/generate", json={**GENERATE, "timeout_s": 0.5})
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_healthy_replica", "1")
    door.coordinator.next_errors = [RuntimeError("/secret/path at 10.0.0.1")]
    status, body, _ = await door.call("GET", "/status")
    assert (status, body["error"]["code"], body["error"]["message"]) == (500, "internal_error", "internal error")
    door.coordinator.next_errors = [WeightUpdateFailed("replica-1")]
    (door.root / "v").mkdir()
    body = {"version": 1, "directory": str(door.root / "v")}
    assert (await door.call("POST", "/admin/weights", json=body))[1]["error"]["code"] == "weight_update_failed"


# Keys

KEYS = Keys.of(["user-1", "user-2"], "admin")


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    async with opened(tmp_path_factory.mktemp("locked"), KEYS) as door:
        yield door


USER_ROUTES = [
    ("POST", "/generate"),
    ("POST", "/rollouts"),
    ("GET", "/rollouts/r"),
    ("GET", "/rollouts/r/trajectories"),
    ("POST", "/rollouts/r/cancel"),
    ("GET", "/status"),
    *(("GET", path) for path in ("/trajectories", "/trajectories/7", "/trajectories/notable", "/updates")),
]
ADMIN_ROUTES = [("POST", f"/admin/{verb}") for verb in ("pause", "resume", "weights", "sleep", "wake")]
ADMIN_ROUTES += [("GET", path) for path in ("/flight", "/history", "/why", "/phases")]


@pytest.mark.parametrize(("method", "path"), USER_ROUTES + ADMIN_ROUTES)
async def test_without_a_good_key_every_route_says_401_before_it_reads_a_body(
    locked: Door, method: str, path: str
) -> None:
    wrong: list[list[tuple[str, str]]] = [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic dXNlci0xOg==")],
        [("authorization", "bearer user-1")],
        [("authorization", "user-1")],
        [("authorization", "Bearer user-1"), ("authorization", "Bearer user-1")],
        [("x-api-key", "wrong")],
    ]
    for headers in wrong:
        status, body, answered = await locked.call(method, path, data=b"{", headers=headers)
        assert (status, body["error"]["code"]) == (401, "unauthorized")
        assert answered["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_a_users_key_does_not_open_admin_routes(locked: Door, method: str, path: str) -> None:
    headers = {"authorization": "Bearer user-1"}
    status, body, _ = await locked.call(method, path, data=b"{}", headers=headers)
    assert (status, body["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("key", ["user-1", "user-2", "admin"])
async def test_good_keys_open_user_routes(locked: Door, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert (await locked.call("POST", "/generate", json=GENERATE, headers=headers))[0] == 200
    assert (await locked.call("GET", "/health"))[0] == 200


async def test_the_admin_key_opens_admin_routes(locked: Door) -> None:
    headers = {"authorization": "Bearer admin"}
    assert (await locked.call("POST", "/admin/resume", headers=headers))[0] == 200


@pytest.mark.parametrize(
    ("keys", "user_is_open", "admin_is_open"),
    [(Keys(), True, True), (Keys.of(["u"]), False, False), (Keys.of([], "a"), True, False)],
)
async def test_which_routes_are_open_without_a_key(
    tmp_path: Path, keys: Keys, user_is_open: bool, admin_is_open: bool
) -> None:
    async with opened(tmp_path, keys) as door:
        assert ((await door.call("GET", "/status"))[0] == 200) == user_is_open
        assert ((await door.call("POST", "/admin/resume"))[0] == 200) == admin_is_open
        if not keys.is_open:
            headers = {"authorization": "Bearer u"}
            assert (await door.call("POST", "/admin/resume", headers=headers))[0] == 403


@pytest.mark.parametrize(
    ("peer", "is_open"), [(("127.0.0.1", 5), True), (("::1", 5), True), (("10.0.0.9", 5), False), (None, False)]
)
async def test_without_an_admin_key_only_this_machine_commands(peer: tuple[str, int] | None, is_open: bool) -> None:
    request = Request({"type": "http", "headers": [], "client": peer})
    if is_open:
        await Keys().require_admin(request)
        return
    with pytest.raises(Forbidden):
        await Keys().require_admin(request)


def test_keys_are_kept_as_hashes_and_needed_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "user-1" not in repr(KEYS.users)
    KEYS.check_bind("0.0.0.0")
    Keys().check_bind("127.0.0.1")
    for keys in (Keys(), Keys.of(["u"]), Keys.of([], "a")):
        with pytest.raises(InvalidRequest):
            keys.check_bind("0.0.0.0")
    with pytest.raises(InvalidRequest):
        Keys.of(["two words"])
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "10.0.0.1", "example.com")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setenv("TEST_KEYS", "user-1,user-2")
    monkeypatch.setenv("TEST_ADMIN", "admin")
    assert Keys.from_environment("TEST_KEYS", "TEST_ADMIN").users == KEYS.users
    assert Keys.from_environment("TEST_ABSENT", "TEST_ABSENT").users == Keys().users == ()


# Weight paths


@pytest.mark.parametrize(
    "directory",
    [
        "{root}/../secret",
        "{root}/link",
        "{root}/link/inner",
        "{root}/file.safetensors",
        "{root}/absent",
        "{root}/loop",
        "{root}\x00/v1",
        "../../etc",
        "weights/v1",
        "/etc",
        "file://{root}/v1",
        "https://example.com/v1",
        "{root}-sibling",
    ],
)
async def test_weights_come_from_under_the_roots_only(door: Door, directory: str) -> None:
    (door.root / "v1").mkdir()
    (door.root / "file.safetensors").touch()
    (door.root.parent / "secret" / "inner").mkdir(parents=True)
    (door.root.parent / f"{door.root.name}-sibling").mkdir()
    (door.root / "link").symlink_to(door.root.parent / "secret")
    (door.root / "loop").symlink_to(door.root / "loop")
    body = {"version": 1, "directory": directory.format(root=door.root)}
    status, answer, _ = await door.call("POST", "/admin/weights", json=body)
    assert (status, answer["error"]["param"]) == (400, "directory")
    # The message is the same for all of them: it reveals nothing of the file system except the roots.
    assert answer["error"]["message"] == (
        f"{body['directory']!r} is not the absolute path of a folder under the service's weight roots "
        f"({door.root}): move the folder there, or add its parent to 'weight_roots' in the config"
    )
    assert door.coordinator.updates == []


async def test_weights_that_a_host_does_not_see_touch_no_replica(tmp_path: Path) -> None:
    seen = []

    def nodes_without(directory: str) -> tuple[str, ...]:
        seen.append(directory)
        return ("10.0.0.2", "10.0.0.3") if directory.endswith("v1") else ()

    async with opened(tmp_path, Keys(), nodes_without=nodes_without) as door:
        for version in (1, 2):
            (door.root / f"v{version}").mkdir()
        body = {"version": 1, "directory": str(door.root / "v1")}
        status, answer, _ = await door.call("POST", "/admin/weights", json=body)
        assert (status, answer["error"]["param"]) == (400, "directory")
        message = "is missing on 10.0.0.2, 10.0.0.3: copy it there, because every host reads it"
        assert answer["error"]["message"] == f"{str(door.root / 'v1')!r} {message}"
        assert door.coordinator.updates == []
        body = {"version": 2, "directory": str(door.root / "v2")}
        assert (await door.call("POST", "/admin/weights", json=body))[0] == 200
    assert seen == [str(door.root / "v1"), str(door.root / "v2")]


async def test_a_link_that_stays_under_the_root_is_followed(door: Door) -> None:
    (door.root / "v1").mkdir()
    (door.root / "latest").symlink_to(door.root / "v1")
    body = {"version": 1, "directory": str(door.root / "latest")}
    assert (await door.call("POST", "/admin/weights", json=body))[0] == 200
    assert door.coordinator.updates[0][0].directory == str((door.root / "v1").resolve())


@pytest.mark.parametrize(
    ("field", "name", "status"),
    [
        ("loop", "tool_loop", 200),
        ("loop", "my_loops:Loop", 200),
        ("reward", "my_loops.rewards:near", 200),
        ("loop", "my_loops_too:Loop", 403),
        ("loop", "subprocess:Popen", 403),
        ("reward", "os:system", 403),
        ("reward", "my_loops:os.system", 403),
        ("environment", "my_loops:Shop", 200),
        ("environment", "os:Shop", 403),
    ],
)
async def test_a_task_names_the_modules_that_the_operator_lists(tmp_path: Path, field: str, name: str, status: int):
    async with opened(tmp_path, Keys(), allowed_imports=AllowedImports(("my_loops",))) as door:
        got, body, _ = await door.call("POST", "/rollouts", json={"tasks": [TASK, {**TASK, field: name}]})
        assert got == status
        if status == 403:
            assert body["error"]["param"] == f"tasks.1.{field}"
            assert "workers.allowed_imports" in body["error"]["message"]
            assert door.coordinator.submitted == []


def test_user_keys_close_imports_unless_the_operator_lists_some():
    listing = WorkerSettings(allowed_imports=["my_loops"])
    assert WorkerSettings().imports(has_user_keys=False) == AllowedImports(None)
    assert WorkerSettings().imports(has_user_keys=True) == AllowedImports(())
    assert listing.imports(has_user_keys=False) == listing.imports(has_user_keys=True)
    assert listing.imports(has_user_keys=True) == AllowedImports(("my_loops",))


# Owners


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_reaches_its_own_rollouts_and_the_admin_all(tmp_path: Path) -> None:
    async with opened(tmp_path, Keys.of(["alice", "bob"], "root")) as door:
        for key, name in (("alice", "a"), ("bob", "b")):
            body = {"tasks": [TASK], "rollout_id": name, "priority": 3, "max_running": 7, "share": 2.0}
            status, made, _ = await door.call("POST", "/rollouts", json=body, headers=bearer(key))
            assert (status, made["priority"], made["rollout_id"]) == (200, 3, name)
            assert made["owner"] == User.of_key(key).name
        terms = {name.partition("~")[2]: terms for name, terms in door.coordinator.terms.items()}
        assert terms["a"].owner != terms["b"].owner
        assert (terms["a"].share, terms["a"].max_running) == (2.0, 7)
        whole = f"{terms['a'].owner}~a"
        for path, method in (("", "GET"), ("/trajectories", "GET"), ("/cancel", "POST")):
            answers = [
                (await door.call(method, f"/rollouts/{name}{path}", headers=bearer(key)))[0]
                for name in ("a", whole)
                for key in ("alice", "bob", "root")
            ]
            # the admin refers to another user's rollout by its full id
            assert answers == [200, 404, 404, 200, 404, 200]


async def test_rollouts_of_a_retired_key_are_its_users(tmp_path: Path) -> None:
    digests = {name: key_digest(name) for name in ("old", "new", "other")}
    alice = User("alice", (digests["new"],), retired=(digests["old"],))
    async with opened(tmp_path, Keys([alice, User.of_key("other")])) as door:
        body = {"tasks": [TASK], "rollout_id": "r"}
        submit = door.coordinator.submit
        for name in ("old", "other"):
            groups = (make_group(f"of-{name}", 1),)
            owner = User.of_key(name).name
            await submit(f"of-{name}", groups, RolloutTerms(owner), (owner,))
        for key, answers in (("new", [200, 404]), ("other", [404, 200]), ("old", [401, 401])):
            for index, name in enumerate(("of-old", "of-other")):
                status, answer, _ = await door.call("GET", f"/rollouts/{name}", headers=bearer(key))
                assert status == answers[index]
                if status == 200:
                    assert answer["rollout_id"] == name
        for key in ("new", "other"):  # one name, two rollouts
            assert (await door.call("POST", "/rollouts", json=body, headers=bearer(key)))[0] == 200
        found = {
            key: (await door.call("GET", "/status", headers=bearer(key)))[1]["rollouts"] for key in ("new", "other")
        }
        assert [one["rollout_id"] for one in found["new"]] == ["of-old", "r"]
        assert [one["owner"] for one in found["new"]] == [User.of_key("old").name, "alice"]
        assert [one["rollout_id"] for one in found["other"]] == ["of-other", "r"]


async def test_without_keys_everybody_reaches_everything(door: Door) -> None:
    await door.call("POST", "/rollouts", json={"tasks": [TASK], "rollout_id": "r"})
    assert (await door.call("GET", "/rollouts/r"))[0] == 200


@pytest.mark.parametrize(
    "fields", [{"priority": 1001}, {"share": 0}, {"share": 1e9}, {"max_running": 0}, {"priority": 0.5}]
)
async def test_terms_are_bounded(shared: Door, fields: dict[str, object]) -> None:
    status, body, _ = await shared.call("POST", "/rollouts", json={"tasks": [TASK], **fields})
    assert (status, body["error"]["param"]) == (400, next(iter(fields)))
