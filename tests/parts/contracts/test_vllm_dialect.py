"""The RL dialect over the whole service: two ingress processes, two simulated replicas, a trainer that updates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.service.whole_service import simulated_config, whole_site

GENERATE = "/inference/v1/generate"
WEIGHTS = Path(__file__).parents[3] / "examples" / "tiny_policy" / "v1"
NEVER = {"2": -100}  # the stop token


async def posted(http: aiohttp.ClientSession, url: str, body: Any = None, **options: Any) -> dict[str, Any]:
    async with http.post(url, json=body, **options) as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def test_a_call_goes_on_through_the_update_of_a_trainer(tmp_path: Path) -> None:
    """prime-rl's update: pause, load from a directory, resume. The call in flight has tokens of both versions."""
    async with (
        whole_site(simulated_config(ingress_replicas=2), tmp_path) as site,
        aiohttp.ClientSession() as http,
    ):
        first, second = site.urls
        body = {"token_ids": [*range(5, 69)], "sampling_params": {"max_tokens": 700, "logit_bias": NEVER}}
        running = asyncio.create_task(posted(http, first + GENERATE, body, headers={"X-Session-ID": "a"}))
        async with asyncio.timeout(20):
            while not sum(one.load.num_running for one in (await site.coordinator.status()).replicas):
                await asyncio.sleep(0.01)
        await posted(http, f"{first}/pause", params={"mode": "keep", "clear_cache": "false"})
        assert not running.done()
        report = await posted(http, f"{second}/update_weights", {"weight_dir": str(WEIGHTS)})
        assert (report["weight_version"], len(report["report"]["replicas"])) == ("1", 2)
        assert (await site.coordinator.status()).is_paused
        await posted(http, f"{first}/resume")
        [choice] = (await running)["choices"]
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 700)


async def test_turns_of_one_session_find_their_kv_through_any_process(tmp_path: Path) -> None:
    async with (
        whole_site(simulated_config(ingress_replicas=2), tmp_path) as site,
        aiohttp.ClientSession() as http,
    ):
        for name in ("a", "b", "c", "d"):
            ids = [ord(name), *range(5, 133)]
            for turn in range(4):
                body = {"token_ids": ids, "sampling_params": {"max_tokens": 32, "logit_bias": NEVER}}
                url = site.urls[turn % 2] + GENERATE
                answer = await posted(http, url, body, headers={"X-Session-ID": name})
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= len(ids) - 32 - 16 if turn else cached == 0, (name, turn)
                ids += answer["choices"][0]["token_ids"]
        held = (await site.coordinator.status()).replicas
        assert sum(one.num_leases for one in held) == 4
        assert [one.num_leases for one in held] != [4, 0]
