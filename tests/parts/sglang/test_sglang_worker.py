"""Our calls inside SGLang's scheduler, on a scheduler with the same control flow, and a model with fused layers.

`Loop` reproduces the parts of SGLang 0.5.17's overlapped loop, pauses and flush that the calls use, and `NewLoop`
those of 0.5.23; the real ones run in `tests/gpu/sglang_scheduler.py`. If SGLang is not installed, stand-ins define
the request types that the calls pass to it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentloop.engine.interface import CommitReport, TensorInfo
from agentloop.values import codec
from agentloop_servers.weight_transfer.vllm_worker import WeightWorker
from agentloop_servers.weight_transfer.worker_calls import (
    CALL,
    CheckedFolder,
    RequestCounts,
    SchedulerAnswers,
    SchedulerCall,
    StageOrder,
    StageProgress,
    StageState,
    StagingSetup,
    WorkerMethod,
    from_text,
    to_text,
)
from agentloop_sglang.worker import SchedulerExtension

HIDDEN, VOCAB = 8, 12
RANKS = SimpleNamespace(tp_rank=0, tp_size=1, pp_size=1, dp_size=1)


@dataclass
class PauseRequest:
    mode: str


@dataclass
class ContinueRequest:
    torch_empty_cache: bool


@dataclass
class Abort:
    rid: str


@dataclass
class RpcOutput:
    success: bool
    message: str


@pytest.fixture(autouse=True, params=["0.5.17", "0.5.23"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install exactly the names that the calls import from an SGLang version."""

    def load(model: Any, weights: Any, device: torch.device) -> None:
        model.load_weights(weights)

    names = {
        "sglang.srt.managers.io_struct": {
            "PauseGenerationReqInput": PauseRequest,
            "ContinueGenerationReqInput": ContinueRequest,
            "AbortReq": Abort,
            "RpcReqOutput": RpcOutput,
        },
        "sglang.srt.managers.schedule_batch": {"FINISH_ABORT": lambda: "abort"},
        "sglang.srt.mem_cache.common": {"release_kv_cache": lambda req, cache: cache.release(req)},
        "sglang.srt.runtime_context": {},
        "sglang.srt.model_loader.loader": {
            "DefaultModelLoader": SimpleNamespace(load_weights_and_postprocess=load),
        },
        "sglang.srt.model_loader.utils": {"set_default_torch_dtype": lambda dtype: torch.no_grad()},
    }
    if request.param == "0.5.23":
        names["sglang.srt.mem_cache.common"] = {
            "release_kv_cache": lambda req, cache, *, checkpoint: cache.release(req, checkpoint)
        }
        names["sglang.srt.runtime_context"] = {"get_parallel": lambda: RANKS}
    for name, members in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules or not hasattr(sys.modules[parent], "__file__"):
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return str(request.param)


class Req:
    """The fields of SGLang's Req that the calls read."""

    def __init__(self, rid: str, length: int) -> None:
        self.rid, self.length = rid, length
        self.output_ids: list[int] = []
        self.stream = False
        self.take_row(None)
        self.to_finish: str | None = None
        self.finished_reason: str | None = None
        self.grammar = None
        self.return_logprob = True
        self.time_stats = SimpleNamespace(set_completion_time=lambda: None)

    def take_row(self, row: int | None) -> None:
        self.req_pool_idx = row

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self) -> None:
        if self.finished_reason is None:
            self.finished_reason, self.to_finish = self.to_finish, None
        if self.finished_reason is None and len(self.output_ids) >= self.length:
            self.finished_reason = "length"


class NewReq(Req):
    def take_row(self, row: int | None) -> None:
        self.kv = SimpleNamespace(holds_kv=row is not None)


@dataclass
class Batch:
    reqs: list[Req] = field(default_factory=list)


class Cache:
    """A cache that lists the holders of KV."""

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self.num_resets = 0

    def release(self, req: Req, checkpoint: bool = True) -> None:
        assert checkpoint
        self.holders.remove(req.rid)
        req.take_row(None)


class Loop:
    """SGLang's loop: a batch is launched before the results of the previous one are processed."""

    new_req = Req

    def __init__(self) -> None:
        self.tp_cpu_group = None
        self.enable_overlap = True
        self.waiting_queue: list[Req] = []
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.cur_batch_for_debug: Batch | None = None
        self.chunked_req = None
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.result_queue: deque[Any] = deque()
        self._engine_paused = False
        self.tree_cache = Cache()
        self.sent: list[Any] = []
        self.ipc_channels = SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=lambda output, req: self.sent.append(output.rid))
        )
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, _: self.sent.extend(reqs))
        self.num_launched = 0

    def step(self) -> None:
        if self._engine_paused:
            return
        left_out = self.finishing()
        self.running_batch.reqs = [
            req for req in self.running_batch.reqs if not req.finished() and req not in left_out
        ]
        for req in self.waiting_queue:
            req.take_row(1)
            self.tree_cache.holders.add(req.rid)
        self.running_batch.reqs += self.waiting_queue
        self.waiting_queue = []
        batch = Batch(list(self.running_batch.reqs)) if self.running_batch.reqs else None
        self.cur_batch_for_debug = batch
        if batch is not None:
            self.num_launched += 1
            self.result_queue.append((batch, SimpleNamespace(token=self.num_launched)))
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = batch

    def finishing(self) -> list[Req]:
        return []

    def process_batch_result(self, batch: Batch, result: Any) -> None:
        for req in batch.reqs:
            if not req.finished():
                req.output_ids.append(result.token)
                req.update_finish_state()
                if req.finished():
                    self.tree_cache.release(req)

    def pause_generation(self, request: PauseRequest) -> None:
        self._engine_paused = True
        if request.mode == "in_place":
            return
        assert request.mode == "retract"
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = None
        for req in [req for req in self.running_batch.reqs if not req.finished()]:
            self.tree_cache.release(req)
            self.waiting_queue.append(req)
        self.running_batch.reqs = []

    def continue_generation(self, request: ContinueRequest) -> None:
        assert not request.torch_empty_cache
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool) -> bool:
        is_idle = not (self.running_batch.reqs or self.last_batch or self.result_queue or self.waiting_queue)
        self.tree_cache.num_resets += is_idle
        return is_idle

    def handle_rpc_request(self, recv_req: Any) -> str:
        return "SGLang's own"


class NewLoop(Loop):
    """The loop whose steps omit requests that the pending result ends."""

    new_req = NewReq

    def finishing(self) -> list[Req]:
        return self._reqs_finishing_inflight(self.running_batch)

    def _reqs_finishing_inflight(self, batch: Batch) -> list[Req]:
        queued = self.result_queue[0][0].reqs if self.result_queue else []
        return [req for req in batch.reqs if req in queued and len(req.output_ids) + 1 >= req.length]


class FusedModel(torch.nn.Module):
    """A decoder layer as SGLang stores it: fused projections, and an output head that shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.gate_up_proj = torch.nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.embed_tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = self.embed_tokens

    def load_weights(self, weights: Any) -> None:
        stacked = [("qkv_proj", name, n) for n, name in enumerate(("q_proj", "k_proj", "v_proj"))]
        stacked += [("gate_up_proj", name, n) for n, name in enumerate(("gate_proj", "up_proj"))]
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for fused, part, shard in stacked:
                if part in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)
                    break
            else:
                if name in parameters:  # a tied head may also be stored
                    parameters[name].data.copy_(tensor)


class Calls(SchedulerExtension):
    """The calls as `run_scheduler` makes them, before a loop, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.module = FusedModel().requires_grad_(False)
        config = SimpleNamespace(dtype=torch.float32)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.module, model_config=config))

    def ask(self, method: str, *arguments: Any) -> Any:
        output = self.handle_rpc_request(
            SimpleNamespace(method=CALL, parameters={"call": to_text(SchedulerCall(7, method, arguments))})
        )
        assert output.success
        answers = from_text(output.message, SchedulerAnswers)
        assert answers.call_id == 7
        if answers.errors != ("",):
            raise RuntimeError(answers.errors[0])
        return answers.answers[0]

    def counts(self, *, is_cleared: bool = False) -> RequestCounts:
        return codec.decode(self.ask("requests_pause", is_cleared), RequestCounts)


class Scheduler(Calls, Loop):  # type: ignore[misc]
    ps = RANKS


class NewScheduler(Calls, NewLoop):  # type: ignore[misc]
    pass


@pytest.fixture
def scheduler(version: str) -> Scheduler | NewScheduler:
    scheduler = Scheduler() if version == "0.5.17" else NewScheduler()
    scheduler.waiting_queue = [scheduler.new_req("a", 6), scheduler.new_req("b", 9)]
    return scheduler


def run(scheduler: Scheduler, num_steps: int) -> None:
    for _ in range(num_steps):
        scheduler.step()


def test_a_pause_takes_in_the_result_that_is_under_way_once(scheduler: Scheduler) -> None:
    first, second = scheduler.waiting_queue
    run(scheduler, 3)
    assert (len(first.output_ids), len(scheduler.result_queue)) == (2, 1)
    assert scheduler.counts().num_output_ids == {"a": 3, "b": 3}
    assert scheduler.counts().num_output_ids == {"a": 3, "b": 3}  # idempotent
    assert scheduler.cur_batch_for_debug is None  # otherwise SGLang's watchdog would end a long pause
    run(scheduler, 5)
    assert len(first.output_ids) == 3
    scheduler.ask("requests_resume")
    run(scheduler, 12)
    assert (first.output_ids, len(second.output_ids)) == ([1, 2, 3, 4, 5, 6], 9)
    assert not scheduler.tree_cache.holders


@pytest.mark.parametrize("num_steps", range(1, 11))
def test_no_request_loses_a_token_to_a_pause(scheduler: Scheduler, num_steps: int) -> None:
    reqs = list(scheduler.waiting_queue)
    run(scheduler, num_steps)
    scheduler.counts()
    scheduler.ask("requests_resume")
    run(scheduler, 12)
    assert [len(req.output_ids) for req in reqs] == [6, 9]
    assert not scheduler.tree_cache.holders


def test_a_resume_and_a_pause_without_a_step_between_count_the_same(scheduler: Scheduler) -> None:
    run(scheduler, 3)
    before = scheduler.counts()
    scheduler.ask("requests_resume")
    assert scheduler.counts() == before
    scheduler.ask("requests_resume")
    run(scheduler, 1)
    assert scheduler.counts().num_output_ids == {"a": 4, "b": 4}


def test_the_cache_is_cleared_although_requests_wait(scheduler: Scheduler) -> None:
    run(scheduler, 3)
    scheduler.waiting_queue.append(scheduler.new_req("late", 4))
    frozen = scheduler.counts()
    assert frozen.unbegun == ("late",)
    assert scheduler.counts(is_cleared=True).num_output_ids == frozen.num_output_ids
    assert (scheduler.tree_cache.num_resets, scheduler.tree_cache.holders) == (1, set())
    assert [req.rid for req in scheduler.waiting_queue] == ["late", "a", "b"]
    scheduler.ask("requests_resume")
    run(scheduler, 12)
    assert not scheduler.waiting_queue
    assert not scheduler.tree_cache.holders


@pytest.mark.parametrize("is_cleared", [False, True])
def test_requests_end_in_a_pause_with_what_they_have(scheduler: Scheduler, is_cleared: bool) -> None:
    first, second = scheduler.waiting_queue
    run(scheduler, 3)
    scheduler.waiting_queue.append(scheduler.new_req("late", 4))
    scheduler.counts(is_cleared=is_cleared)
    scheduler.ask("requests_end", codec.encode(("a", "late", "unknown")))
    assert sorted(str(getattr(sent, "rid", sent)) for sent in scheduler.sent) == ["a", "late"]
    assert (len(first.output_ids), first.finished_reason) == (3, "abort")
    assert scheduler.counts(is_cleared=is_cleared).num_output_ids == {"b": 3}
    scheduler.ask("requests_resume")
    run(scheduler, 12)
    assert (len(first.output_ids), len(second.output_ids)) == (3, 9)
    with pytest.raises(RuntimeError, match="requires a paused scheduler"):
        scheduler.ask("requests_end", codec.encode(("b",)))


@pytest.mark.parametrize("method", WorkerMethod)
def test_each_call_has_its_method(method: WorkerMethod) -> None:
    assert hasattr(SchedulerExtension, method) or hasattr(WeightWorker, method)


def test_what_is_no_call_and_what_fails_is_answered(scheduler: Scheduler) -> None:
    with pytest.raises(RuntimeError, match="unknown scheduler call '__init__'"):
        scheduler.ask("__init__")
    with pytest.raises(RuntimeError, match="AttributeError"):
        scheduler.ask("weights_poll", 1)  # before it is prepared
    assert not scheduler.handle_rpc_request(SimpleNamespace(method=CALL, parameters={})).success
    assert scheduler.handle_rpc_request(SimpleNamespace(method="save_remote_model")) == "SGLang's own"


# Weights


def checkpoint(folder: Path, seed: int, **changed: torch.Tensor) -> CheckedFolder:
    torch.manual_seed(seed)
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    tensors = {f"{name}.weight": torch.randn(HIDDEN, HIDDEN) for name in names}
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    tensors |= {f"{name}.weight": tensor for name, tensor in changed.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return CheckedFolder(
        str(folder), tuple(TensorInfo(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items())
    )


def stage(scheduler: Scheduler, number: int, folder: CheckedFolder) -> StageProgress:
    scheduler.ask("weights_stage", codec.encode(StageOrder(number, folder=folder)))
    deadline_at = time.monotonic() + 20.0
    while time.monotonic() < deadline_at:
        progress = codec.decode(scheduler.ask("weights_poll", number), StageProgress)
        if progress.state is not StageState.RECEIVING:
            return progress
        time.sleep(0.005)
    raise TimeoutError


def prepared(scheduler: Scheduler, folder: CheckedFolder | None) -> None:
    if folder is not None:
        scheduler.module.load_weights(load_file(Path(folder.directory) / "model.safetensors").items())
    scheduler.ask("weights_prepare", codec.encode(StagingSetup(folder, "auto", 20.0)))


@pytest.mark.parametrize("has_loaded", [False, True])
def test_fused_layers_are_staged_and_swapped(scheduler: Scheduler, tmp_path: Path, has_loaded: bool) -> None:
    prepared(scheduler, checkpoint(tmp_path / "v0", 0) if has_loaded else None)
    address = scheduler.module.qkv_proj.weight.data_ptr()
    for number in (1, 2):
        with torch.inference_mode():  # as SGLang's loop runs
            progress = stage(scheduler, number, checkpoint(tmp_path / f"v{number}", number))
            assert progress.report is not None
            scheduler.counts()
            report = codec.decode(scheduler.ask("weights_commit", number), CommitReport)
            scheduler.ask("requests_resume")
        assert report.num_verified == 3
        expected = checkpoint(tmp_path / f"again{number}", number)
        wanted = FusedModel()

        wanted.load_weights(load_file(Path(expected.directory) / "model.safetensors").items())
        for one, other in zip(scheduler.module.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(one, other)
    assert scheduler.module.qkv_proj.weight.data_ptr() == address


def test_nan_in_a_fused_part_or_a_tied_head_is_refused(scheduler: Scheduler, tmp_path: Path) -> None:
    prepared(scheduler, checkpoint(tmp_path / "v0", 0))
    before = {name: value.clone() for name, value in scheduler.module.named_parameters()}
    bad = torch.zeros(HIDDEN, HIDDEN)
    bad[3, 2] = float("nan")
    head = torch.zeros(VOCAB, HIDDEN)
    head[-1, -1] = float("inf")
    for number, (changed, named) in enumerate(
        (({"k_proj": bad}, "qkv_proj"), ({"embed_tokens": head}, "embed_tokens"))
    ):
        progress = stage(scheduler, number, checkpoint(tmp_path / f"bad{number}", 1, **changed))
        assert progress.state is StageState.FAILED
        assert f"{named}.weight has values that are not finite" in progress.error
    for name, value in scheduler.module.named_parameters():
        assert torch.equal(value, before[name])


class Fp8LinearMethod:
    """The method of a quantized layer."""


def test_quantised_layers_are_not_loaded_twice(scheduler: Scheduler, tmp_path: Path) -> None:
    scheduler.module.qkv_proj.quant_method = Fp8LinearMethod()
    prepared(scheduler, None)
    assert stage(scheduler, 1, checkpoint(tmp_path / "v1", 1)).state is StageState.HELD
    scheduler.counts()
    with pytest.raises(RuntimeError, match=r"layer qkv_proj is quantized \(Fp8LinearMethod\)"):
        scheduler.ask("weights_commit", 1)
