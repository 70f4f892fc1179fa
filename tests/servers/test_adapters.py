"""Named adapters over HTTP: calls in every dialect, adapters per user, and refusals that state the remedy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentloop.client.client import RolloutClient
from agentloop.engine.interface import OnProgress
from agentloop.errors import AdapterInUse, Forbidden, InvalidRequest, ModelNotFound, NotFound
from agentloop.simulation.engine import SimulatedEngine, SimulatedSpec
from agentloop.types import GenerateRequest, Generation, Message, RolloutTask
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.ingress.admin import ModeRules
from tests.servers.test_users import ROOT, digest, write
from tests.support.engine.scripted import RENDERER
from tests.support.fleet.live_run import write_checkpoint
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

SAID = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "?", "messages": SAID, "max_tokens": 3}),
    "stream": ("/v1/chat/completions", {"model": "?", "messages": SAID, "max_tokens": 3, "stream": True}),
    "completion": ("/v1/completions", {"model": "?", "prompt": "Hi", "max_tokens": 3}),
    "echo": ("/v1/completions", {"model": "?", "prompt": "Hi there", "max_tokens": 0, "echo": True, "logprobs": 1}),
    "response": ("/v1/responses", {"model": "?", "input": "Hi", "max_output_tokens": 3}),
    "message": ("/v1/messages", {"model": "?", "messages": SAID, "max_tokens": 3}),
    "vllm": ("/inference/v1/generate", {"model": "?", "token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
    "sglang": ("/generate", {"lora_path": "?", "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}),
    "generate": ("/generate", {"model": "?", "token_ids": [5, 6], "sampling": {"max_tokens": 3}}),
    "score": ("/score", {"model": "?", "prompts": [{"token_ids": [5, 6, 7]}]}),
}


class Recording(SimulatedEngine):
    """Records the adapter of every request, and the versions of its answer."""

    served: list[tuple[str, set[int]]]

    async def generate(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> Generation:
        generation = await super().generate(request, on_progress)
        self.served.append((request.adapter, {span.version for span in generation.weight_versions}))
        return generation

    async def stream(self, request: GenerateRequest, on_progress: OnProgress | None = None) -> AsyncIterator[Any]:
        async for item in super().stream(request, on_progress):
            if isinstance(item, Generation):
                self.served.append((request.adapter, {span.version for span in item.weight_versions}))
            yield item


class Tenants:
    """A service with two adapter slots, and its users: alice and bob push, carol does not."""

    def __init__(self, site: ServiceSite, http: aiohttp.ClientSession, folder: Path, served: list[Any]) -> None:
        self.site, self.http, self.folder, self.served = site, http, folder, served

    def client(self, key: str) -> RolloutClient:
        return RolloutClient(self.site.urls[0], api_key=key, retry_timeout_s=1.0)

    async def ask(self, key: str, path: str, body: Any = None, process: int = 0) -> tuple[int, Any]:
        headers, method = {"authorization": f"Bearer {key}"}, "GET" if body is None else "POST"
        url = self.site.urls[process] + path
        async with self.http.request(method, url, json=body, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def push(self, key: str, name: str, version: int = 0, **options: Any):
        async with self.client(key) as client:
            return await client.update_adapter(self.folder, version=version, name=name, **options)

    async def models(self, key: str) -> dict[str, tuple[int, str]]:
        _, found = await self.ask(key, "/v1/models", process=1)
        return {one["id"]: (one["weight_version"], one["parent"]) for one in found["data"] if "parent" in one}


@asynccontextmanager
async def tenants(folder: Path) -> AsyncIterator[Tenants]:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "weights").mkdir(exist_ok=True)
    people = {name: {"name": name, "keys": [digest(name)]} for name in ("alice", "bob", "carol")}
    path = write(
        folder / "users.yaml",
        *({**people[name], "adapters": True} for name in ("alice", "bob")),
        people["carol"],
        ROOT,
    )
    served: list[Any] = []

    def build(config: ServiceConfig) -> SimulatedEngine:
        engine = Recording(SimulatedSpec(RENDERER.vocab_size, 4096, num_blocks=64_000, lora_rank=8, max_loras=3))
        engine.served = served
        return engine

    config = simulated_config(
        replicas=2,
        ingress_replicas=2,
        users=str(path),
        weight_roots=[str(folder / "weights")],
        engine={"lora_rank": 8, "max_loras": 3},
    )
    async with whole_site(config, folder / "run", build) as site, aiohttp.ClientSession() as http:
        yield Tenants(site, http, write_checkpoint(folder / "weights"), served)


async def test_every_dialect_calls_an_adapter_of_the_callers_alone(tmp_path: Path) -> None:
    async with tenants(tmp_path) as service:
        await service.push("alice", "math", 7)
        await service.push("bob", "math", 2)
        report = await service.push("root", "law", 4)
        assert (report.adapter, report.version, report.previous_version) == ("law", 4, None)
        assert [one.error for one in report.replicas] == [None, None]
        own = {"alice": ("alice~math", 7), "bob": ("bob~math", 2)}
        for name, (path, body) in CALLS.items():
            field = "lora_path" if "lora_path" in body else "model"
            for user in ("alice", "bob"):
                for model, expected in (("math", own[user]), ("law", ("law", 4)), ("default", ("", 0))):
                    service.served.clear()
                    status, answer = await service.ask(user, path, {**body, field: model}, process=model == "law")
                    assert status == 200, (name, answer)
                    whole, version = expected
                    assert service.served[-1] == (whole, {version}), (name, user, model, service.served)
            for model in ("math", "alice~math"):
                status, answer = await service.ask("carol", path, {**body, field: model})
                told = answer["error"]
                assert (status, told["code"]) == (404, "model_not_found"), (name, answer)
                assert "'law'" in told["message"]
                assert "alice" not in told["message"].replace(repr(model), "")
        assert await service.models("alice") == {"math": (7, "v0"), "law": (4, "v0")}
        assert await service.models("carol") == {"law": (4, "v0")}
        assert set(await service.models("root")) == {"alice~math", "bob~math", "law"}
        _, one = await service.ask("alice", "/v1/models/math")
        assert (one["id"], one["weight_version"], one["parent"]) == ("math", 7, "v0")
        for user, names in (("alice", ["math", "law"]), ("carol", ["law"]), ("root", [*own, "law"])):
            _, status = await service.ask(user, "/status")
            names = [f"{name}~math" if name in own else name for name in names]
            assert [one["name"] for one in status["adapters"]] == names
            assert [one["adapter"] for one in status["updates"]] == names


async def test_sessions_and_rollouts_are_under_their_adapter(tmp_path: Path) -> None:
    async with tenants(tmp_path) as service, service.client("alice") as client, service.client("bob") as other:
        await client.update_adapter(service.folder, version=3, name="math")
        async with client.session(adapter="math") as session:
            await session.openai.chat.completions.create(model="whatever", messages=SAID, max_tokens=3)
            await client.update_adapter(service.folder, version=5, name="math")
            await session.openai.chat.completions.create(model="default", messages=SAID, max_tokens=3)
            record = await session.finish()
        assert (record.adapter, record.versions) == ("math", (3, 5))
        _, answer = await service.ask("alice", "/v1/chat/completions", {**CALLS["chat"][1], "model": "math"})
        status, shown = await service.ask("alice", f"/sessions/{answer['session']['session_id']}/trajectories")
        assert status == 200, shown
        assert shown[0]["adapter"] == "math"
        task = RolloutTask("t", (Message("user", "Hi"),))
        rollout = await client.submit([task], num_samples=4, adapter="math", max_staleness=0)
        records = [record async for record in rollout]
        assert {(one.adapter, one.versions, one.staleness) for one in records} == {("math", (5,), 0)}
        assert {adapter for adapter, _ in service.served} == {"alice~math"}
        with pytest.raises(ModelNotFound, match="served adapters: none"):
            await other.submit([task], adapter="math")
        with pytest.raises(NotFound):
            async with other.session(adapter="math"):
                pass
        scores = await client.score([[5, 6, 7]], model="math")
        assert scores[0].weight_version == 5
        generation = await client.generate([5, 6], max_tokens=2, model="math")
        assert generation.weight_versions[0].version == 5


async def test_who_may_push_what_and_the_verbs_of_vllm(tmp_path: Path) -> None:
    async with tenants(tmp_path) as service:
        folder = str(service.folder)
        with pytest.raises(Forbidden):
            await service.push("carol", "mine")
        with pytest.raises(InvalidRequest, match="push an adapter, with a `name`"):
            await service.push("root", None)
        with pytest.raises(Forbidden):
            await service.push("alice", None)
        with pytest.raises(InvalidRequest, match="no other model of this service has"):
            await service.push("alice", "default")
        with pytest.raises(InvalidRequest, match="weight roots"):
            async with service.client("alice") as client:
                await client.update_adapter("/etc", version=1, name="etc")
        for body in ({"directory": folder, "version": 2}, {"adapter": folder, "version": 2}):
            assert (await service.ask("alice", "/admin/weights", body))[0] == 403
            status, answer = await service.ask("root", "/admin/weights", body)
            assert (status, answer["error"]["param"]) == (400, "name"), answer
        load = {"lora_name": "math", "lora_path": folder}
        versions = []
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            status, answer = await service.ask("alice", path, {**load, "load_inplace": True})
            assert (status, answer["report"]["adapter"]) == (200, "math"), answer
            versions.append(answer["weight_version"])
        assert versions == ["0", "1"]
        for field, value in (("lora_path", "/etc"), ("lora_name", "default")):
            status, answer = await service.ask("alice", "/v1/load_lora_adapter", {**load, field: value})
            assert (status, answer["error"]["param"]) == (400, field), answer
        assert (await service.ask("carol", "/v1/load_lora_adapter", load))[0] == 403
        status, answer = await service.ask("bob", "/v1/unload_lora_adapter", {"lora_name": "math"})
        assert (status, answer["error"]["param"]) == (404, "lora_name"), answer
        async with service.client("alice") as client, service.client("root") as root:
            task = RolloutTask("t", (Message("user", "Hi"),))
            await root.pause()
            rollout = await client.submit([task], adapter="math")
            with pytest.raises(AdapterInUse):
                await client.unload_adapter("math")
            await root.resume()
            assert [one.is_complete async for one in rollout] == [True]
            await client.unload_adapter("math")
            assert await service.models("alice") == {}
    with pytest.raises(InvalidRequest, match="sleep at level 1"):
        ModeRules(names_adapters=True).check_sleep(2)


async def test_a_service_without_places_for_adapters_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "weights").mkdir()
    folder = write_checkpoint(tmp_path / "weights")
    config = simulated_config(replicas=1, weight_roots=[str(folder)])
    async with whole_site(config, tmp_path / "run") as site, RolloutClient(site.urls[0]) as client:
        with pytest.raises(InvalidRequest, match="`max_loras`, or push without a name") as refused:
            await client.update_adapter(folder, version=2, name="math")
        assert refused.value.param == "name"
        with pytest.raises(ModelNotFound):
            await client.generate([5], max_tokens=1, model="math")


async def test_adapters_outlive_the_service(tmp_path: Path) -> None:
    async with tenants(tmp_path) as service:
        await service.push("alice", "math", 3)
        await service.push("root", "law", 9)
    async with tenants(tmp_path) as service:
        assert await service.models("alice") == {"math": (3, "v0"), "law": (9, "v0")}
        async with service.client("alice") as client:
            generation = await client.generate([5, 6], max_tokens=2, model="math")
        assert generation.weight_versions[0].version == 3
        assert (await service.push("alice", "math", 4)).previous_version == 3
