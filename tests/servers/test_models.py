"""Models in addition to the policy: the model that a call reaches, in every dialect, and the recorded model."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest, ModelNotFound, NotFound, RewardError, ServiceUnavailable
from agentloop.rollout.models import ModelCall, judge_score
from agentloop.types import Judge, Limits, Message, RolloutTask, Trajectory
from agentloop_servers.app import application
from agentloop_servers.config.service import NamedModel, ServiceConfig
from agentloop_servers.local import drain, running_service
from agentloop_servers.processes.shared import ModelRun
from tests.support.service.whole_service import SECRET, ServiceSite, simulated_config, whole_site

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
JUDGE_VERSION = 7
TASK = RolloutTask("t", (Message("user", "Hi"),), limits=Limits(max_turns=1, max_tokens_per_turn=8))


@dataclass
class Site:
    policy: ServiceSite
    judge: ServiceSite
    http: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        async with self.http.post(self.policy.urls[0] + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def two_models(folder: Path) -> AsyncIterator[Site]:
    beside = {"name": "judge", "model": "examples/tiny_policy/v0", "model_version": JUDGE_VERSION}
    config = simulated_config(models=[{**beside, "engine": {"kind": "simulated"}}])
    (policy_dir := folder / "run").mkdir()
    (judge_dir := folder / "judge").mkdir()
    async with whole_site(config.of_model("judge"), judge_dir) as judge:
        others = {ModelRun("judge", judge_dir, SECRET): judge.front}
        async with whole_site(config, policy_dir, others=others) as policy, aiohttp.ClientSession() as http:
            yield Site(policy, judge, http)


def versions_of(record: Trajectory) -> set[int]:
    """Return the weight versions of a record's tokens."""
    return {span.version for path in record.paths for span in path.weight_versions}


def versions_in(answer: Any) -> set[int]:
    """Return the versions of all spans in an answer, at any depth."""
    if isinstance(answer, dict):
        own = {int(answer["version"])} if "version" in answer else set[int]()
        return own.union(*map(versions_in, answer.values()))
    return set[int]().union(*map(versions_in, answer)) if isinstance(answer, list) else set()


async def test_the_models_name_picks_it_in_every_dialect(tmp_path: Path) -> None:
    async with two_models(tmp_path) as site:
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", HELLO),
            ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "store": False}),
            ("/v1/messages", HELLO),
            ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
        ]
        for path, body in calls:
            for model, version in (("judge", JUDGE_VERSION), ("default", 0)):
                status, answer = await site.post(path, {**body, "model": model})
                assert status == 200, (path, answer)
                assert f'"{version}"' in str(answer).replace("'", '"') or f"'version': {version}" in str(answer), (
                    path
                )
            status, answer = await site.post(path, {**body, "model": "nobody"})
            assert (status, "'judge'" in str(answer)) == (404, True), (path, answer)
        streamed = {**HELLO, "model": "judge", "stream": True}
        async with site.http.post(f"{site.policy.urls[0]}/v1/chat/completions", json=streamed) as answer:
            text = await answer.text()
        assert f'"system_fingerprint":"v{JUDGE_VERSION}"' in text
        assert text.endswith("data: [DONE]\n\n")


async def test_below_its_path_a_model_has_all_routes(tmp_path: Path) -> None:
    async with two_models(tmp_path) as site:
        url = site.policy.urls[0]
        async with site.http.get(f"{url}/v1/models") as answer:
            listed = {one["id"]: one["weight_version"] for one in (await answer.json())["data"]}
        assert listed == {site.policy.config.served_name: 0, "judge": JUDGE_VERSION}
        async with RolloutClient(f"{url}/models/judge") as client:
            assert (await client.status()).weight_version == JUDGE_VERSION
            async with client.session() as session:
                async with session.openai as openai:
                    await openai.chat.completions.create(model="judge", **HELLO)
                record = await session.finish(reward=1.0)
            with pytest.raises(ModelNotFound, match="'judge'"):
                await client.submit([RolloutTask("t", (Message("user", "Hi"),), reward=Judge("nobody", "Right?"))])
            rollout = await client.submit([TASK], num_samples=2)
            sampled = [record async for record in rollout]
            assert tuple(one.rollout_id for one in (await client.status()).rollouts) == rollout.rollout_ids
        assert [versions_of(one) for one in sampled] == [{JUDGE_VERSION}] * 2
        assert {span.version for span in record.paths[0].weight_versions} == {JUDGE_VERSION}
        async with site.http.get(f"{url}/models/nobody/status") as answer:
            assert answer.status == 404


@pytest.mark.ray
async def test_each_worker_process_runs_the_rollouts_of_all_models(tmp_path: Path) -> None:
    """With isolated processes, whose loops and judges call another model through their worker."""
    beside = {"name": "judge", "model": "examples/tiny_policy/v0", "model_version": JUDGE_VERSION}
    workers = {"replicas": 1, "isolation": "process", "max_processes": 2}
    config = simulated_config(models=[{**beside, "engine": {"kind": "simulated"}}], workers=workers, port=0)
    task = replace(TASK, reward=Judge("judge", "Is it right?"))
    versions, is_judged = {}, {}
    async with running_service(config, tmp_path / "run") as url:
        for name, path in (("policy", ""), ("judge", "/models/judge")):
            async with RolloutClient(url + path) as client:
                rollout = await client.submit([task], num_samples=2)
                records = [record async for record in rollout]
                versions[name] = [versions_of(one) for one in records]
                # The simulated judge answers anything: a verdict is a reward, no verdict is this error.
                errors = [one.reward_error or "" for one in records if one.reward is None]
                is_judged[name] = all("the answer of judge" in error for error in errors)
        num_left = await drain(config, tmp_path / "run", 1.0)
        async with RolloutClient(f"{url}/models/judge") as client:
            with pytest.raises(ServiceUnavailable):
                await client.submit([TASK])
    assert versions == {"policy": [{0}] * 2, "judge": [{JUDGE_VERSION}] * 2}
    assert is_judged == {"policy": True, "judge": True}
    assert num_left == 0


async def test_scores_are_those_of_the_named_model(tmp_path: Path) -> None:
    async with two_models(tmp_path) as site, RolloutClient(site.policy.urls[0]) as client:
        [of_policy], [of_judge] = await client.score([[5, 6, 7]]), await client.score([[5, 6, 7]], model="judge")
        assert (of_policy.weight_version, of_judge.weight_version) == (0, JUDGE_VERSION)
        with pytest.raises(NotFound):
            await client.score([[5, 6, 7]], model="nobody")


async def test_a_sessions_calls_to_another_model_are_not_on_its_path(tmp_path: Path) -> None:
    async with (
        two_models(tmp_path) as site,
        RolloutClient(site.policy.urls[0]) as client,
        client.session() as session,
    ):
        async with session.openai as openai:
            await openai.chat.completions.create(model="anything", **HELLO)
            other = await openai.chat.completions.create(model="judge", **HELLO)
            assert other.system_fingerprint == f"v{JUDGE_VERSION}"
        record = await session.finish(reward=1.0)
    assert len(record.paths) == 1
    assert {span.version for span in record.paths[0].weight_versions} == {0}


async def test_a_task_whose_judge_is_not_served_is_refused_at_once(tmp_path: Path) -> None:
    async with two_models(tmp_path) as site, RolloutClient(site.policy.urls[0]) as client:
        task = RolloutTask("t", (Message("user", "Hi"),), reward=Judge("nobody", "Is it right?"))
        with pytest.raises(ModelNotFound, match="'judge'"):
            await client.submit([task])


class Scripted:
    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.calls: list[ModelCall] = []

    async def chat(self, call: ModelCall) -> str:
        self.calls.append(call)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "score"),
    [("Yes.", 1.0), ("no", 0.0), ("Not sure, 0.25", 0.25), ("first yes, then No!", 0.0), ("1", 1.0), (".5", 0.5)],
)
async def test_a_judges_last_word_is_the_score(answer: str, score: float) -> None:
    models, task = Scripted(answer), RolloutTask("t", (Message("user", "2 + 3?"),), reference="5")
    said = (*task.messages, Message("assistant", "It is 5."))
    assert await judge_score(Judge("judge", "Is it right?"), models, task, said) == score
    asked = models.calls[0].messages[0].content
    assert all(part in asked for part in ("Is it right?", "user: 2 + 3?", "assistant: It is 5.", "Reference: 5"))


@pytest.mark.parametrize("answer", ["", "yesterday", "42", "nothing", "10.5"])
async def test_an_answer_without_a_verdict_is_no_score(answer: str) -> None:
    with pytest.raises(RewardError, match="contains no yes, no or number"):
        await judge_score(Judge("judge", "r"), Scripted(answer), RolloutTask("t", (Message("user", "q"),)), ())


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"models": [{"name": "default", "model": "m"}]}, "names must be unique"),
        ({"models": [{"name": "a", "model": "m"}, {"name": "a", "model": "m"}]}, "names must be unique"),
        ({"models": [{"name": "A b", "model": "m"}]}, r"models\.0\.name"),
        ({"models": [{"name": "a", "model": "m"}], "cluster": {}}, "one host"),
        ({"turns": {}}, "`turns` requires several models"),
        ({"models": [{"name": "a", "model": "m"}], "turns": {}}, "`turns` requires several models"),
        (
            {"models": [{"name": "a", "model": "m", "engine": {"load_format": "dummy"}}]},
            "weights are not pushed in this mode",
        ),
    ],
)
def test_models_that_do_not_go_together_are_refused(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        ServiceConfig.model_validate({"model": "examples/tiny_policy/v1", **changed})


def test_a_model_without_its_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = simulated_config(models=[NamedModel(name="judge", model="no/such").model_dump()])
    with pytest.raises(InvalidRequest, match="no/such"):
        application(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_too_large_to_sleep_in_the_host_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folders = [shutil.copytree("examples/tiny_policy/v1", tmp_path / name) for name in ("policy", "judge")]
    for folder in folders:
        with (folder / "model-2.safetensors").open("wb") as file:
            file.truncate(2**40)  # a sparse file
    own = {"mode": "colocated", "engine": {"kind": "vllm"}}
    models = [{"name": "judge", "model": str(folders[1]), **own}]
    given = {**own, "model": str(folders[0]), "models": models, "turns": {}}
    with pytest.raises(InvalidRequest, match=r"need 1024\.0 GiB .*policy 1024\.0 \+ judge 1024\.0"):
        application(ServiceConfig.model_validate(given), tmp_path / "run")
    assert not (tmp_path / "run").exists()
