"""Weight updates on real vLLM (CPU), proved against transformers.

Comparing an engine with itself would not detect a layer that kept its old weights.

The tied model is the shipped policy in float32: there the CPU build packs its weights on every machine, and a
trained policy's logits are too large for bfloat16 to stay within `SAME`. The untied model is random, in bfloat16,
and its engine starts with dummy weights.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from agentloop.engine.interface import (
    CommitReport,
    Delta,
    GroupBackend,
    GroupInit,
    LeaveGroup,
    Packing,
    StageReport,
    StagingDevice,
    TensorInfo,
    TransferPart,
    WeightUpdate,
)
from agentloop.engine.weight_digest import read_files
from agentloop.errors import (
    CheckpointUnreadable,
    Conflict,
    EngineLost,
    EngineUnusable,
    WeightsRefused,
    WeightUpdateFailed,
)
from agentloop.types import GenerateRequest, Generation, KVPolicy, PauseMode, SamplingParams
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.engine import VllmEngine
from agentloop_servers.weight_transfer.broadcast import Outgoing
from agentloop_servers.weight_transfer.layout import tensor_info
from agentloop_servers.weight_transfer.receiver import Receiver, receive
from agentloop_servers.weight_transfer.sender import WeightSender
from tests.benchmarks.shapes import SHAPES, make_tensors, write_checkpoint, write_model_folder
from tests.servers.weight_transfer.group_trainer import free_port, joined, runs

pytestmark = pytest.mark.engine

POLICY = Path(__file__).parents[4] / "examples" / "tiny_policy"
END_OF_TURN = json.loads((POLICY / "v0" / "config.json").read_text())["eos_token_id"]
SAME = 0.02  # mean absolute difference of logprobs
DIFFERENT = 0.1
TIE = 1e-3  # difference of logits within which prefill and decode may round to different best ids


def config(model: Path, **changed: object) -> VllmConfig:
    fields: dict[str, object] = {
        "model": str(model),
        "initial_version": 0,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 64 * 2**20,
    }
    return VllmConfig(**{**fields, **changed})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random checkpoints without tied embeddings, in two files each."""
    fields = json.loads((POLICY / "v0" / "config.json").read_text())
    fields |= {"tie_word_embeddings": False, "initializer_range": 0.06, "num_hidden_layers": 2}
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields)).to(torch.bfloat16)
        folder = tmp_path_factory.mktemp("untied") / f"v{seed}"
        model.save_pretrained(folder, max_shard_size="1MB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="module")
async def tied_engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(config(POLICY / "v0", dtype="float32"))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
async def dummy_engine(
    untied: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("no weights")
    (folder / "config.json").write_bytes((untied[0] / "config.json").read_bytes())
    engine = VllmEngine(config(folder, initial_version=None, load_format="dummy", weight_staging="none"))
    await engine.start()
    yield engine
    await engine.close()


def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(POLICY / "v0" / "tokenizer.json"))
    questions = ("What is 37 * 12 + 5?", "What is 8 + 9?", "What is (4 + 6) * 11?", "What is 90 - 17?")
    texts = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions)
    return [tuple(tokenizer.encode(text).ids) for text in texts]


@functools.cache
def independent(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Return the float32 logits of every position, computed by the independent model."""
    with torch.inference_mode():
        return independent(folder)(torch.tensor([ids])).logits[0]


def mean_difference(folder: Path, pairs: list[tuple[tuple[int, ...], Generation]]) -> float:
    """Return the mean absolute logprob difference between the engine and the independent model."""
    differences = []
    for prompt, generation in pairs:
        ids = (*prompt, *generation.token_ids)
        logprobs = logits(folder, ids[:-1])[len(prompt) - 1 :].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        differences.append((own - torch.tensor(generation.logprobs)).abs())
    return float(torch.cat(differences).mean())


async def sampled(engine: VllmEngine, name: str) -> list[tuple[tuple[int, ...], Generation]]:
    # Only up to the end of the turn: the tokens after it are nearly random, and bfloat16 rounds them coarsely.
    requests = [
        GenerateRequest(
            f"{name}-{index}", prompt, SamplingParams(max_tokens=64, seed=index, stop_token_ids=(END_OF_TURN,))
        )
        for index, prompt in enumerate(prompts() * 4)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [(request.token_ids, generation) for request, generation in zip(requests, generations, strict=True)]


async def assert_holds(engine: VllmEngine, folder: Path, other: Path) -> None:
    pairs = await sampled(engine, "proof")
    same, different = mean_difference(folder, pairs), mean_difference(other, pairs)
    print(f"mean |difference|: {same:.4f}, other version {different:.4f}")
    assert same < SAME
    assert different > DIFFERENT


async def update(engine: VllmEngine, version: int, folder: Path, kv_policy: KVPolicy = KVPolicy.KEEP) -> None:
    await engine.stage(WeightUpdate(version, str(folder)))
    await engine.pause(PauseMode.KEEP, kv_policy)
    await engine.commit(version)
    await engine.resume()


async def test_a_tied_model_computes_with_the_committed_weights(tied_engine: VllmEngine) -> None:
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")
    await update(tied_engine, 1, POLICY / "v1")
    await assert_holds(tied_engine, POLICY / "v1", POLICY / "v0")
    await update(tied_engine, 2, POLICY / "v0")
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of a mixture of experts whose expert size is padded by the CPU build."""
    shape, folders = replace(SHAPES["tiny-moe"], intermediate=48), []
    for version in (0, 1):
        folder = tmp_path_factory.mktemp("experts") / f"v{version}"
        write_model_folder(shape, folder, max_context_tokens=512, dtype="float32")
        folders.append(
            write_checkpoint(make_tensors(shape, torch.device("cpu"), torch.float32, 1000 * version), folder)
        )
    return folders[0], folders[1]


async def test_experts_compute_with_the_committed_weights(experts: tuple[Path, Path], sender: WeightSender) -> None:
    engine = VllmEngine(config(experts[0], dtype="float32"))
    await engine.start()
    try:
        await assert_holds(engine, experts[0], experts[1])
        await update(engine, 1, experts[1])
        await assert_holds(engine, experts[1], experts[0])
        _, committed = await push(engine, 2, experts[0], sender)
        await assert_holds(engine, experts[0], experts[1])
        assert (committed.num_verified, committed.num_unverified) == (17, 2)  # all except the experts of two layers
    finally:
        await engine.close()


def write_wrong_shape(source: Path, target: Path) -> Path:
    """Write a checkpoint with one matrix that is too small, in the middle of its layer's tensors."""
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        small = {
            name: tensor[:, :-1].contiguous() for name, tensor in tensors.items() if "1.self_attn.k_proj" in name
        }
        save_file({**tensors, **small}, target / path.name)
    return target


async def test_a_dummy_loaded_engine_serves_from_its_first_good_commit(
    dummy_engine: VllmEngine, untied: tuple[Path, Path], tmp_path: Path
) -> None:
    request = GenerateRequest("early", (1, 2, 3), SamplingParams(max_tokens=4))
    assert dummy_engine.weight_version is None
    assert not dummy_engine.is_usable
    with pytest.raises(EngineUnusable):
        await dummy_engine.generate(request)
    with pytest.raises(WeightUpdateFailed):  # the shapes of this model are not known yet
        await update(dummy_engine, 6, write_wrong_shape(untied[0], tmp_path))
    assert dummy_engine.weight_version is None
    assert not dummy_engine.is_usable
    await update(dummy_engine, 7, untied[0])  # the failed load left no state behind
    assert dummy_engine.weight_version == 7
    assert dummy_engine.is_usable
    await assert_holds(dummy_engine, untied[0], untied[1])


async def test_an_untied_model_computes_with_the_committed_weights(
    dummy_engine: VllmEngine, untied: tuple[Path, Path]
) -> None:
    await update(dummy_engine, 8, untied[1])
    await assert_holds(dummy_engine, untied[1], untied[0])


async def test_a_folder_that_changes_after_its_stage_is_not_committed(
    dummy_engine: VllmEngine, untied: tuple[Path, Path], tmp_path: Path
) -> None:
    for source in untied[0].glob("*.safetensors"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    await dummy_engine.stage(WeightUpdate(9, str(tmp_path)))
    (tmp_path / source.name).unlink()
    await dummy_engine.pause(PauseMode.KEEP)
    with pytest.raises(WeightUpdateFailed, match="changed while the weights were staged"):
        await dummy_engine.commit(9)
    assert not dummy_engine.is_usable
    await update(dummy_engine, 10, untied[0])
    await assert_holds(dummy_engine, untied[0], untied[1])


async def test_after_a_failed_commit_all_ranks_take_a_good_one(tmp_path: Path) -> None:
    """vLLM keeps later ranks' answers to a failed call in their queues, where its next call would read them."""
    engine = VllmEngine(config(POLICY / "v0", dtype="float32", tensor_parallel_size=2))
    await engine.start()
    try:
        weights = tmp_path / "model.safetensors"
        weights.write_bytes((POLICY / "v1" / weights.name).read_bytes())
        await engine.stage(WeightUpdate(1, str(tmp_path)))
        weights.unlink()
        await engine.pause(PauseMode.KEEP)
        with pytest.raises(WeightUpdateFailed, match=r"worker rank 0 failed: .* changed while the weights were"):
            await engine.commit(1)
        await update(engine, 2, POLICY / "v1")
        await assert_holds(engine, POLICY / "v1", POLICY / "v0")
    finally:
        await engine.close()


async def test_a_checkpoint_of_another_model_is_refused(
    dummy_engine: VllmEngine, untied: tuple[Path, Path], tmp_path: Path
) -> None:
    await update(dummy_engine, 11, untied[0])
    with pytest.raises(CheckpointUnreadable, match="served model"):
        await dummy_engine.stage(WeightUpdate(12, str(POLICY / "v0")))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnreadable, match="not a float type"):
        await dummy_engine.stage(WeightUpdate(12, str(tmp_path)))
    assert dummy_engine.is_usable


# Pushed tensors


async def push(
    engine: VllmEngine,
    version: int,
    folder: Path,
    sender: WeightSender,
    tensors: dict[str, torch.Tensor] | None = None,
) -> tuple[StageReport, CommitReport]:
    """Update like `update`, with the tensors of a folder pushed from this process."""
    items = [outgoing(name, tensor) for name, tensor in stored(folder).items()]
    offer = replace(sender.offer(items), num_receivers=1)
    sending = asyncio.create_task(asyncio.to_thread(sender.run, 60.0))
    try:
        staged = await engine.stage(WeightUpdate(version, push=offer))
        await engine.pause(PauseMode.KEEP)
        committed = await engine.commit(version)
        await engine.resume()
    except BaseException:
        sender.cancel("the update failed")
        await asyncio.gather(sending, return_exceptions=True)
        raise
    await sending
    return staged, committed


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def outgoing(name: str, tensor: torch.Tensor) -> Outgoing:
    info = TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return Outgoing(info, lambda: tensor)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender()
    yield sender
    sender.close()


async def test_a_head_that_differs_from_the_tied_embeddings_is_refused_while_it_is_staged(
    tied_engine: VllmEngine, sender: WeightSender, tmp_path: Path
) -> None:
    version, tensors = tied_engine.weight_version, stored(POLICY / "v0")
    assert tied_engine.weight_digest == (await read_files(str(POLICY / "v0"))).digest
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnreadable, match=r"lm_head\.weight has other values than the embeddings"):
        await tied_engine.stage(WeightUpdate(version + 1, str(tmp_path)))
    offer = replace(sender.offer([outgoing(*one) for one in tensors.items()]), num_receivers=1)
    sending = asyncio.create_task(asyncio.to_thread(sender.run, 60.0))
    with pytest.raises(CheckpointUnreadable, match=r"lm_head\.weight has other values than the embeddings"):
        await tied_engine.stage(WeightUpdate(version + 1, push=offer))
    await asyncio.gather(sending, return_exceptions=True)
    assert tied_engine.weight_version == version
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


async def test_pushed_weights_wait_beside_the_served_ones(tied_engine: VllmEngine, sender: WeightSender) -> None:
    """Two updates over the same link. The engine's label is the first update's, and then increases."""
    version = tied_engine.weight_version
    assert version is not None
    staged, committed = await push(tied_engine, version + 1, POLICY / "v1", sender)
    assert (staged.staging_device, staged.transport) == (StagingDevice.HOST, "shm")
    assert staged.num_bytes > 1e6
    assert committed.num_verified > 10
    await assert_holds(tied_engine, POLICY / "v1", POLICY / "v0")
    await push(tied_engine, version + 2, POLICY / "v0", sender)
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


async def test_a_trainer_that_gives_up_changes_nothing(tied_engine: VllmEngine, sender: WeightSender) -> None:
    version = tied_engine.weight_version
    assert version is not None

    def die() -> torch.Tensor:
        sender.cancel("the trainer gave up")
        return torch.zeros(0)

    items = [outgoing(name, tensor) for name, tensor in stored(POLICY / "v1").items()]
    items[3] = replace(items[3], load=die)
    offer = replace(sender.offer(items), num_receivers=1)
    sending = asyncio.create_task(asyncio.to_thread(sender.run, 60.0))
    with pytest.raises(CheckpointUnreadable):
        await tied_engine.stage(WeightUpdate(version + 1, push=offer))
    with pytest.raises(WeightUpdateFailed):
        await sending
    assert tied_engine.weight_version == version
    await tied_engine.pause(PauseMode.KEEP)
    with pytest.raises(Conflict, match="nothing is staged"):
        await tied_engine.commit(version + 1)
    await tied_engine.resume()
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


async def assert_offers(engine: VllmEngine, sent: dict[str, torch.Tensor]) -> None:
    """Check that the engine offers exactly these tensors."""
    offer = await engine.offer()
    assert offer is not None
    received: dict[str, torch.Tensor] = {}

    def take() -> None:
        incoming = Receiver(torch.device("cpu"), 0).open(
            replace(offer, num_receivers=1), can_hold=True, timeout_s=30.0
        )
        receive(incoming, lambda name, tensor: received.update({name: tensor.clone()}))

    await asyncio.to_thread(take)
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())


async def test_weights_that_came_by_a_push_can_be_given_on(tied_engine: VllmEngine, sender: WeightSender) -> None:
    version = tied_engine.weight_version
    assert version is not None
    await push(tied_engine, version + 1, POLICY / "v1", sender)
    await assert_offers(tied_engine, stored(POLICY / "v1"))


async def test_without_memory_for_staging_the_commit_receives(
    dummy_engine: VllmEngine, untied: tuple[Path, Path], sender: WeightSender
) -> None:
    version = dummy_engine.weight_version
    assert version is not None
    staged, committed = await push(dummy_engine, version + 1, untied[1], sender)
    assert staged.staging_device is StagingDevice.NOWHERE
    assert committed.transfer_ms > 0
    await assert_holds(dummy_engine, untied[1], untied[0])


async def greedy_across_update(engine: VllmEngine, prompt: tuple[int, ...], folder: Path) -> Generation:
    """Return a greedy generation whose weights are swapped under RECOMPUTE after some tokens."""
    version = engine.weight_version
    assert version is not None
    request = GenerateRequest("across", prompt, SamplingParams(max_tokens=160, temperature=0.0))
    num_tokens, update_task = 0, None
    async for piece in engine.stream(request):
        if isinstance(piece, Generation):
            assert update_task is not None
            await update_task
            return piece
        assert isinstance(piece, Delta)
        num_tokens += len(piece.token_ids)
        if num_tokens >= 8 and update_task is None:
            update_task = asyncio.create_task(update(engine, version + 1, folder, KVPolicy.RECOMPUTE))
    raise AssertionError("a stream ends with its generation")


async def test_recompute_goes_on_as_a_fresh_engine_with_the_new_weights_does(tied_engine: VllmEngine) -> None:
    """The ids are equal up to a pair of ids that the independent model ranks as tied."""
    prompt, folder = prompts()[0], POLICY / "v1"
    both = await greedy_across_update(tied_engine, prompt, folder)
    old, new = both.weight_versions
    assert (old.start, new.end) == (0, 160)
    prefix = prompt + both.token_ids[: old.end]
    children = set(multiprocessing.active_children())
    fresh = VllmEngine(config(folder, initial_version=1, dtype="float32"))
    await fresh.start()
    (process,) = set(multiprocessing.active_children()) - children
    try:
        rest = SamplingParams(max_tokens=160 - old.end, temperature=0.0)
        expected = await fresh.generate(GenerateRequest("fresh", prefix, rest))
        assert_same_greedy_path(folder, prefix, both.token_ids[old.end :], expected.token_ids)
        await assert_dies_cleanly(fresh, process.pid)
    finally:
        await fresh.close()


def assert_same_greedy_path(
    folder: Path, prefix: tuple[int, ...], ids: Sequence[int], others: Sequence[int]
) -> None:
    pairs = enumerate(zip(ids, others, strict=True))
    parted = next((index for index, (a, b) in pairs if a != b), None)
    if parted is not None:
        last = logits(folder, (*prefix, *ids[:parted]))[-1]
        assert abs(float(last[ids[parted]] - last[others[parted]])) < TIE
    assert parted is None or parted >= 8


async def assert_dies_cleanly(engine: VllmEngine, pid: int | None) -> None:
    """Kill the engine process, and check that calls in flight and later ones raise EngineLost."""
    assert pid is not None
    request = GenerateRequest("last", prompts()[0], SamplingParams(max_tokens=400))
    call = asyncio.create_task(engine.generate(request))
    while engine.load().num_running == 0:
        await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost):
        await asyncio.wait_for(call, 30)
    with pytest.raises(EngineLost):
        await engine.check_health()


# Broken weights


def write_noise(target: Path, factor: float) -> Path:
    """Write a finite checkpoint of the shipped policy with one matrix multiplied by `factor`."""
    tensors = stored(POLICY / "v1")
    name = next(name for name in tensors if "1.mlp.down_proj" in name)
    noise = {**tensors, name: tensors[name].float() * factor}
    assert all(bool(tensor.isfinite().all()) for tensor in noise.values())
    save_file(noise, target / "model.safetensors")
    return target


async def in_flight(engine: VllmEngine, name: str, pieces: list[Delta | Generation]) -> None:
    sampling = SamplingParams(max_tokens=400, min_tokens=400, temperature=1.0)
    async for piece in engine.stream(GenerateRequest(name, prompts()[0], sampling)):
        pieces.append(piece)


@pytest.mark.parametrize("num_in_flight", [3, 40])  # 32 fit: with 40, no slot is free for the canary check
async def test_noise_is_refused_and_no_token_of_it_given_out(
    tied_engine: VllmEngine, tmp_path: Path, num_in_flight: int
) -> None:
    version = tied_engine.weight_version
    assert version is not None
    heard: list[list[Delta | Generation]] = [[] for _ in range(num_in_flight)]
    asking = [asyncio.create_task(in_flight(tied_engine, f"s{n}", pieces)) for n, pieces in enumerate(heard)]
    while not all(heard[:3]):
        await asyncio.sleep(0.01)
    with pytest.raises(WeightUpdateFailed, match=f"version {version + 1}: ") as refused:
        await update(tied_engine, version + 1, write_noise(tmp_path, 1e30))
    if num_in_flight == 3:
        assert isinstance(refused.value, WeightsRefused)
        assert "fixed prompt are all equal" in refused.value.message
    ended = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(one, EngineUnusable) for one in ended)
    spans = {span.version for pieces in heard for piece in pieces for span in piece.weight_versions}
    assert spans == {version}
    assert not tied_engine.is_usable
    with pytest.raises(EngineUnusable):
        await tied_engine.generate(GenerateRequest("refused", (1, 2), SamplingParams(max_tokens=1)))
    await update(tied_engine, version, POLICY / "v0")  # restores the served weights
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


@pytest.mark.parametrize("num_in_flight", [3, 40])
async def test_good_weights_are_looked_at_beside_what_is_in_flight(
    tied_engine: VllmEngine, num_in_flight: int
) -> None:
    version = tied_engine.weight_version
    assert version is not None
    heard: list[list[Delta | Generation]] = [[] for _ in range(num_in_flight)]
    asking = [asyncio.create_task(in_flight(tied_engine, f"g{n}", pieces)) for n, pieces in enumerate(heard)]
    while not all(heard[:3]):
        await asyncio.sleep(0.01)
    await tied_engine.stage(WeightUpdate(version + 1, str(POLICY / "v0")))
    await tied_engine.pause(PauseMode.KEEP)
    await tied_engine.commit(version + 1)
    canary_s = await tied_engine.resume()
    print(f"{num_in_flight} in flight: the canary check took {canary_s * 1e3:.1f} ms")
    assert 0 < canary_s < 5
    assert await tied_engine.resume() == 0.0
    await asyncio.gather(*asking)
    ends = [pieces[-1] for pieces in heard[:3]]
    assert [[span.version for span in end.weight_versions] for end in ends] == [[version, version + 1]] * 3


async def test_forced_noise_is_served(tied_engine: VllmEngine, tmp_path: Path) -> None:
    version = tied_engine.weight_version
    assert version is not None
    await tied_engine.stage(WeightUpdate(version + 1, str(write_noise(tmp_path, 1e30)), is_forced=True))
    await tied_engine.pause(PauseMode.KEEP)
    await tied_engine.commit(version + 1)
    assert await tied_engine.resume() == 0.0
    noise = await tied_engine.generate(GenerateRequest("noise", (1, 2), SamplingParams(max_tokens=4)))
    assert noise.logprobs == pytest.approx([-math.log(tied_engine.info.vocab_size)] * 4, abs=1e-4)
    await update(tied_engine, version + 2, POLICY / "v0")
    await assert_holds(tied_engine, POLICY / "v0", POLICY / "v1")


# A trainer's own group


async def test_a_trainers_group_brings_weights_beside_the_served_ones(tied_engine: VllmEngine) -> None:
    """Two parts, the second packed. A part that does not fit or a transfer that misses a part changes nothing."""
    tensors = stored(POLICY / "v1")
    infos = [tensor_info(name, tensor) for name, tensor in tensors.items()]
    port, half = free_port(), len(infos) // 2
    version = (tied_engine.weight_version or 0) + 1
    join = GroupInit("g", GroupBackend.VLLM, "127.0.0.1", port, 1, 2)
    joining = asyncio.create_task(tied_engine.follow_trainer(join))
    group = await asyncio.to_thread(joined, "g", port, 2)
    await joining

    async def sent(transfer_id: str, part: Sequence[TensorInfo], packed_bytes: int) -> None:
        packing = Packing.PACKED if packed_bytes else Packing.PLAIN
        order = TransferPart("g", tuple(part), packing, packed_bytes, transfer_id=transfer_id)
        receiving = asyncio.create_task(tied_engine.follow_trainer(order))
        for data in runs([tensors[one.name] for one in part], packed_bytes):
            await asyncio.to_thread(dist.broadcast, data, 0, group)
        await receiving

    before = tied_engine.weight_version
    await sent("lacking", infos[:half], 0)
    with pytest.raises(CheckpointUnreadable, match="are missing in the checkpoint"):
        await tied_engine.stage(WeightUpdate(version, transfer="lacking"))
    wrong = TransferPart("g", (replace(infos[0], shape=(3, 3)),), Packing.PLAIN, transfer_id="wrong")
    with pytest.raises(CheckpointUnreadable, match="has shape"):
        await tied_engine.follow_trainer(wrong)
    assert tied_engine.weight_version == before
    await sent("whole", infos[:half], 0)
    await sent("whole", infos[half:], 100_000)
    report = await tied_engine.stage(WeightUpdate(version, transfer="whole"))
    assert (report.staging_device, report.transport) == (StagingDevice.HOST, "gloo")
    await tied_engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    await tied_engine.commit(version)
    await tied_engine.resume()
    await assert_holds(tied_engine, POLICY / "v1", POLICY / "v0")
    await assert_offers(tied_engine, tensors)
    await tied_engine.follow_trainer(LeaveGroup("g"))
