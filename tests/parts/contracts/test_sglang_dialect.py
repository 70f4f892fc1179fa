"""SGLang's dialect over the whole service: two ingress processes, two simulated replicas, a slime-like trainer.

slime and Miles are not published packages. `SlimeLikeTrainer` is our reimplementation: it sends the requests of
their published code (slime `rollout/sglang_rollout.py` 0044b40, `backends/sglang_utils/` server_control.py 15b8e50,
sglang_engine.py 03b32d8, external.py 130027a; Miles `sglang_api_client.py` 0526543).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentloop.engine.interface import Engine
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.processes.engine_parts import build_engine
from tests.support.service.whole_service import ServiceSite, simulated_config, whole_site

WEIGHTS = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v1"


@dataclass
class Sample:
    """A sample as slime stores it: every answer is appended, for any finish reason."""

    session_id: str
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # for the whole response
    status: str = "pending"


class SlimeLikeTrainer:
    """The client half. It knows only the router's address and the workers that the router lists."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def control(self, path: str, **body: Any) -> dict[str, Any]:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def get(self, path: str) -> dict[str, Any]:
        async with self.http.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def attach(self) -> int:
        """Read the engine's size like `--rollout-external`, and wait until the engine is idle. Returns its GPU
        count.
        """
        info = await self.get("/server_info")
        assert info.get("disaggregation_mode") not in ("prefill", "decode")
        assert not info.get("encoder_only")
        await self.get("/health_generate")
        await self.get("/flush_cache")
        return int(info.get("num_gpus") or info["tp_size"] * info["pp_size"])

    async def generate(self, sample: Sample, max_new_tokens: int, **asked: Any) -> Sample:
        """Sample the rest of a response, from the tokens so far."""
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": max_new_tokens - len(sample.response),
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "ignore_eos": True,
        }
        body = {"input_ids": sample.prompt + sample.response, "sampling_params": params, "return_logprob": True}
        status, answer = await self.post("/generate", {**body, **asked}, **{"X-SMG-Routing-Key": sample.session_id})
        assert status == 200, answer
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        num_before = len(sample.response)
        sample.spans += [
            (one["version"], num_before + one["start"], num_before + one["end"]) for one in meta["weight_versions"]
        ]
        sample.response += [entry[1] for entry in entries]
        sample.logprobs += [entry[0] for entry in entries]
        sample.versions.append(meta["weight_version"])
        sample.status = {"length": "truncated", "abort": "aborted"}.get(meta["finish_reason"]["type"], "completed")
        assert answer["output_ids"] == [entry[1] for entry in entries]
        return sample

    async def abort_until_idle(self) -> None:
        """Abort at every worker that the router lists until no worker has a request."""
        for worker in (await self.get("/workers"))["workers"]:
            there = SlimeLikeTrainer(self.http, worker["url"])
            while True:
                await there.control("/abort_request", abort_all=True)
                loads = (await there.get("/v1/loads?include=core,disagg,queues"))["loads"]
                if not sum(load["num_total_reqs"] for load in loads):
                    break
                await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Site:
    """The service, its engines, and one trainer per ingress process."""

    service: ServiceSite
    engines: list[Engine]
    trainers: list[SlimeLikeTrainer]

    async def until_running(self, num: int) -> None:
        async with asyncio.timeout(20):
            while sum(engine.load().num_running for engine in self.engines) < num:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def site_of(tmp_path: Path) -> AsyncIterator[Site]:
    engines: list[Engine] = []

    def build(config: ServiceConfig) -> Engine:
        engines.append(build_engine(config))
        return engines[-1]

    async with (
        whole_site(simulated_config(ingress_replicas=2, mode="standalone"), tmp_path, build) as service,
        aiohttp.ClientSession() as http,
    ):
        yield Site(service, engines, [SlimeLikeTrainer(http, url) for url in service.urls])


async def test_a_trainer_attaches_samples_aborts_and_puts_partial_samples_back(tmp_path: Path) -> None:
    async with site_of(tmp_path) as site:
        first, second = site.trainers
        assert await first.attach() == 2
        samples = [Sample(f"sample-{index}", [index + 5, *range(20, 84)]) for index in range(8)]
        works = [site.trainers[index % 2].generate(sample, 3000) for index, sample in enumerate(samples)]
        running = [asyncio.create_task(work) for work in works]
        await site.until_running(8)
        await asyncio.sleep(0.2)
        await first.abort_until_idle()
        await asyncio.gather(*running)
        partial = {sample.session_id: list(sample.response) for sample in samples}
        assert all(sample.status == "aborted" and 0 < len(sample.response) < 3000 for sample in samples)
        lengths = [len(sample.response) + 30 for sample in samples]
        put_back = zip(samples, lengths, strict=True)
        await asyncio.gather(*(second.generate(sample, length) for sample, length in put_back))
        for sample, length in zip(samples, lengths, strict=True):
            assert sample.response[: length - 30] == partial[sample.session_id]
            assert (sample.status, len(sample.response), len(sample.logprobs)) == ("truncated", length, length)
            assert sample.versions == ["0", "0"]
        held = (await site.service.coordinator.status()).replicas
        assert sum(one.num_leases for one in held) == 8  # one per routing key, through either process


async def test_a_trainer_pauses_updates_from_disk_and_goes_on(tmp_path: Path) -> None:
    """In-place pause: the call in flight has tokens of both versions. Also: refused versions, a killed replica."""
    async with site_of(tmp_path) as site:
        first, second = site.trainers
        sample = Sample("a", [*range(5, 69)])
        running = asyncio.create_task(first.generate(sample, 700, rid="a"))
        await site.until_running(1)
        await first.control("/pause_generation", mode="in_place")
        assert not running.done()
        report = await second.control("/update_weights_from_disk", model_path=str(WEIGHTS), weight_version="1")
        assert (report["success"], report["weight_version"]) == (True, "1")
        assert (await second.get("/get_weight_version"))["weight_version"] == "1"
        await first.control("/continue_generation")
        await running
        assert (sample.status, len(sample.response), sample.versions) == ("truncated", 700, ["1"])
        [(_, start, end), (_, begin, last)] = sample.spans
        assert ([span[0] for span in sample.spans], start, last) == (["0", "1"], 0, 700)
        assert 0 < end == begin

        for body, code, param in (
            ({"model_path": str(WEIGHTS), "weight_version": "0"}, 400, "weight_version"),
            ({"model_path": str(tmp_path), "weight_version": "2"}, 400, "model_path"),
        ):
            status, answer = await first.post("/update_weights_from_disk", body)
            assert (status, answer["success"], answer["error"]["param"]) == (code, False, param), answer
        asked = {"input_ids": [5], "weight_version": {"min_version": 2}}
        status, answer = await first.post("/generate", asked)
        assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (
            409,
            "weight_version_not_served",
            True,
        )

        sample = Sample("b", [*range(5, 69)])
        running = asyncio.create_task(second.generate(sample, 700))
        await site.until_running(1)
        await asyncio.sleep(0.2)
        [victim] = [engine for engine in site.engines if engine.load().num_running]
        await victim.close()
        await running
        assert (sample.status, len(sample.response), sample.versions) == ("truncated", 700, ["1"])


async def test_a_pause_that_aborts_reaches_the_calls_of_every_process(tmp_path: Path) -> None:
    """slime's default mode: running calls end with their tokens, and calls that arrive during the pause wait."""
    async with site_of(tmp_path) as site:
        samples = [Sample(f"sample-{index}", [index + 5, *range(20, 84)]) for index in range(4)]
        works = [site.trainers[index % 2].generate(sample, 3000) for index, sample in enumerate(samples)]
        running = [asyncio.create_task(work) for work in works]
        await site.until_running(4)
        await asyncio.sleep(0.2)
        await site.trainers[0].control("/pause_generation")
        await asyncio.gather(*running)
        assert all(sample.status == "aborted" and sample.response for sample in samples)
        later = asyncio.create_task(site.trainers[1].generate(Sample("later", [5, 6]), 4))
        await asyncio.sleep(0.1)
        assert not later.done()
        await site.trainers[1].control("/continue_generation")
        assert (await later).status == "truncated"


@pytest.mark.parametrize("options", [{}, {"is_flat": True, "parts": 2, "has_session": True}])
async def test_a_trainers_group_brings_weights_while_a_call_goes_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Two rounds over gloo: as slime, which does not end an update explicitly, and as Miles, which does."""
    async with site_of(tmp_path) as site:
        order = json.dumps({"folder": str(WEIGHTS), "version": 7, "rounds": 2, **options})
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.parts.contracts.sglang_group_trainer", site.trainers[1].url, order),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        updating, samples = asyncio.create_task(process.communicate()), list[Sample]()
        async with asyncio.timeout(60):
            while not (updating.done() and samples):
                samples.append(await site.trainers[0].generate(Sample("a", [*range(5, 69)]), 300))
        out, err = await updating
        assert (process.returncode, out.split()) == (0, [b"7", b"8"]), err.decode()
        samples.append(await site.trainers[0].generate(Sample("a", [*range(5, 69)]), 300))
        versions = [version for sample in samples for version, _, _ in sample.spans]
        assert (versions[0], versions[-1], versions) == ("0", "8", sorted(versions))
        status, answer = await site.trainers[0].post("/destroy_weights_update_group", {"group_name": "unknown"})
        assert (status, answer["success"]) == (200, True)
        body = {"names": ["a", "b"], "dtypes": ["float32"], "shapes": [[1], [1]]}
        status, answer = await site.trainers[0].post("/update_weights_from_distributed", body)
        assert (status, answer["success"], answer["error"]["param"]) == (400, False, "dtypes")
        status, answer = await site.trainers[0].post(
            "/update_weights_from_distributed", {**body, "dtypes": ["x"] * 2}
        )
        assert (status, answer["success"], answer["error"]["code"]) == (404, False, "not_found")
