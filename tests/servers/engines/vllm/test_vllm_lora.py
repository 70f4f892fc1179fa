"""LoRA adapters on real vLLM (CPU, float32), proved against transformers with the adapter merged.

All tests share one engine and run in order; each leaves the adapter that it names.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess
from agentloop_servers.engines.vllm.weights import LoraAdapters
from tests.support.transfer.adapters import POLICY, merged_model, write_adapter

pytestmark = [pytest.mark.engine, pytest.mark.long]

SAME, DIFFERENT = 0.001, 0.03  # mean absolute difference of logprobs
PROMPT = [1, 5, 9, 20, 33, 40, 41, 42]


@dataclass(frozen=True)
class AdapterSite:
    process: VllmProcess
    lora: LoraAdapters
    one: Path
    two: Path


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdapterSite]:
    folder = tmp_path_factory.mktemp("adapters")
    config = VllmConfig(
        model=str(POLICY),
        initial_version=0,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory_bytes=64 * 2**20,
        lora_rank=8,
        worker_extension="tests.support.transfer.adapters.SpoilableWorker",
    )
    process = VllmProcess(config)
    lora = LoraAdapters(config, process)
    await process.start()
    try:
        await lora.start()
        one = write_adapter(folder / "one", seed=1)
        two = write_adapter(folder / "two", seed=2, rank=8, alpha=16, targets=("q_proj", "up_proj"))
        yield AdapterSite(process, lora, one, two)
    finally:
        await process.close()
        lora.close()


@functools.cache
def independent(adapter: Path | None) -> Any:
    return merged_model(adapter)


def difference(adapter: Path | None, ids: list[int], logprobs: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference from the merged model's logprobs, per token."""
    with torch.inference_mode():
        logits = independent(adapter)(torch.tensor([PROMPT + ids])).logits[0]
    own = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return (own - logprobs).abs()


async def sample(
    site: AdapterSite, name: str, num_tokens: int, progress: list[int]
) -> tuple[list[int], torch.Tensor]:
    from vllm import SamplingParams  # noqa: PLC0415 - an engine is imported only where one is started
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=7, logprobs=0, detokenize=False)
    salt = str(zlib.crc32(name.encode()))  # like a weight version, so that no two adapters share KV
    prompt = TokensPrompt(prompt_token_ids=PROMPT, cache_salt=salt)
    async for output in site.process.llm.generate(prompt, params, name, lora_request=site.lora.request):
        progress.append(len(output.outputs[0].token_ids))
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)]
    return ids, torch.tensor(logprobs)


async def assert_serves(site: AdapterSite, adapter: Path | None, others: list[Path | None], name: str) -> None:
    ids, logprobs = await sample(site, name, 48, [])
    assert float(difference(adapter, ids, logprobs).mean()) < SAME
    for other in others:
        assert float(difference(other, ids, logprobs).mean()) > DIFFERENT


async def test_the_first_adapter_changes_nothing(site: AdapterSite) -> None:
    await assert_serves(site, None, [site.one, site.two], "zero")


async def commit_in_flight(
    site: AdapterSite, adapter: Path, name: str, *, is_cache_cleared: bool
) -> tuple[int, list[int], torch.Tensor]:
    """Replace the adapter during a request. Return its token count before that, and its final ids and logprobs."""
    progress: list[int] = []
    request = asyncio.create_task(sample(site, name, 300, progress))
    async with asyncio.timeout(60):
        while len(progress) < 10:
            await asyncio.sleep(0.002)
    assert (await asyncio.to_thread(site.lora.check, str(adapter))).num_bytes > 0
    await site.process.llm.pause_generation(mode="keep", clear_cache=is_cache_cleared)
    report = await site.lora.commit(str(adapter))
    num_before = progress[-1]
    await site.process.llm.resume_generation()
    ids, logprobs = await request
    assert report.num_verified == len(load_file(adapter / "adapter_model.safetensors"))
    print(f"swap {report.swap_ms:.1f} ms, verify {report.verify_ms:.1f} ms, {report.num_verified} tensors")
    assert 10 <= num_before < 250
    return num_before, ids, logprobs


async def test_a_frozen_request_goes_on_under_the_new_adapter(site: AdapterSite) -> None:
    num_before, ids, logprobs = await commit_in_flight(site, site.one, "recompute", is_cache_cleared=True)
    assert len(ids) == 300
    old, new = difference(None, ids, logprobs), difference(site.one, ids, logprobs)
    assert float(old[:num_before].mean()) < SAME
    assert float(new[num_before:].mean()) < SAME  # the prompt's KV also comes from the new adapter
    assert float(new[:num_before].mean()) > DIFFERENT
    assert float(old[num_before:].mean()) > DIFFERENT


async def test_a_new_request_is_under_the_new_adapter_too(site: AdapterSite) -> None:
    await assert_serves(site, site.one, [None, site.two], "new")


async def test_a_second_adapter_leaves_nothing_of_the_first(site: AdapterSite) -> None:
    """Another rank, fewer layers and kept KV: the output is near the new adapter and far from the old one."""
    num_before, ids, logprobs = await commit_in_flight(site, site.two, "keep", is_cache_cleared=False)
    assert float(difference(site.one, ids, logprobs)[:num_before].mean()) < SAME
    new, old = (difference(adapter, ids, logprobs)[num_before:] for adapter in (site.two, site.one))
    print(f"mean difference under kept KV: {float(new.mean()):.4f}, from the old adapter {float(old.mean()):.4f}")
    assert float(old.mean()) > 2 * float(new.mean())
    await assert_serves(site, site.two, [None, site.one], "second")


async def test_a_worker_that_lost_its_adapter_finds_the_served_one_again(site: AdapterSite) -> None:
    """Reloading base weights drops adapters silently; requests carry the path of the last commit's adapter."""
    await site.process.llm.pause_generation(mode="keep", clear_cache=True)
    await site.process.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(POLICY)})
    assert not await site.process.llm.list_loras()
    await site.process.llm.resume_generation()
    await assert_serves(site, site.two, [None, site.one], "found")


@pytest.mark.parametrize(
    ("layer", "index"),
    [
        ("model.layers.1.self_attn.qkv_proj", 0),  # a tensor of the adapter
        ("model.layers.1.self_attn.qkv_proj", 2),  # a slice next to it that the adapter does not have
        ("model.layers.3.mlp.down_proj", 0),  # a layer that the adapter does not have
    ],
)
async def test_one_wrong_number_in_a_worker_is_found(site: AdapterSite, layer: str, index: int) -> None:
    await site.process.on_workers("weights_verify_adapter", 1, str(site.two))
    await site.process.on_workers("spoil_adapter", layer, index)
    with pytest.raises(Exception, match=f"layer {layer} differs from the adapter's tensors"):
        await site.process.on_workers("weights_verify_adapter", 1, str(site.two))
    await site.lora.commit(str(site.two))


async def test_an_adapter_that_was_never_loaded_is_found(site: AdapterSite, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="differs from the adapter's tensors"):
        await site.process.on_workers("weights_verify_adapter", 1, str(site.one))
    tensors = load_file(site.two / "adapter_model.safetensors")
    renamed = {name.replace("layers.0", "layers.9"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((site.two / "adapter_config.json").read_bytes())
    with pytest.raises(Exception, match=r"has no layer for the adapter's model\.layers\.9|differs from"):
        await site.process.on_workers("weights_verify_adapter", 1, str(tmp_path))


async def test_a_failed_commit_raises_and_a_later_one_repairs(site: AdapterSite, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="adapter"):
        await site.lora.commit(str(tmp_path))
    await site.lora.commit(str(site.one))
    await assert_serves(site, site.one, [None, site.two], "repaired")
