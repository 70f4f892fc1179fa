"""The vLLM process behind an engine: AsyncLLM, its event feed and its statistics, started and ended as one.

KV-cache events are read from vLLM's publisher socket and handed to subscribers as our own. Wire: multipart
`[topic, sequence (8 bytes big-endian), msgpack [timestamp, [event, ...], rank]]`, one for each step with events; an
event is a map tagged by `type`. One task reads. A gap in a rank's sequence is filled from its replay socket, which
answers a first sequence with all that it still has, up to sequence -1; what cannot be had any more counts as
`AllBlocksCleared`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import structlog

from agentloop.engine import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineInfo,
    KVEvent,
    KVEventPublisher,
)
from agentloop.errors import AgentLoopError, EngineError
from agentloop.sampling import LogprobsMode
from agentloop_servers.engines.vllm.config import (
    VllmConfig,
    engine_arguments,
    kv_endpoint,
    kv_endpoints,
    prepare_environment,
    replay_endpoint,
)
from agentloop_servers.engines.vllm.convert import one_line, translate

_log = structlog.stdlib.get_logger(__name__)


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None  # of the data-parallel engine


REPLAY_TIMEOUT_S = 10.0  # vLLM looks for such requests between two batches, and at least ten times a second

_WHOLE_CONTEXT = ("full_attention", "mla_attention", "sink_full_attention")
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KVEventFeed:
    """Owner of the subscriber socket and the task that reads it.

    Data-parallel ranks are one cache to its readers: what one of them clears counts as cleared. Of a model whose
    layers are cached in several groups, the first is told that keeps whole contexts; the others share its blocks'
    hashes, and keep less.
    """

    def __init__(self) -> None:
        self.events = KVEventPublisher()
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._next_sequence: dict[int, int] = {}  # by rank
        self._replays: Sequence[str] = ()  # endpoints, by rank
        self._group: int | None = None  # the one that is told
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoints: Sequence[str], replays: Sequence[str]) -> None:
        """Connect to every rank's publisher and start reading, before the first request: nothing is missed.

        `replays` are the ranks' replay sockets.
        """
        self._replays = replays
        self._task = asyncio.create_task(self._read(endpoints), name="vllm-kv-events")

    def clear(self) -> None:
        """Announce that the cache was cleared: vLLM publishes that with its next step only, and once more."""
        self.events.publish(AllBlocksCleared())

    async def close(self) -> None:
        """Stop reading; subscriptions end. Idempotent. Raises what ended the reading before, if something did."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _read(self, endpoints: Sequence[str]) -> None:
        import zmq.asyncio

        try:
            with zmq.asyncio.Context() as context:
                await self._receive(context, endpoints)
        finally:
            self.events.close()

    async def _receive(self, context: Any, endpoints: Sequence[str]) -> None:
        import zmq

        with _socket(context, zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            for endpoint in endpoints:
                socket.connect(endpoint)
            while True:
                _, number, payload = await socket.recv_multipart()
                batch, sequence = self._decoder.decode(payload), int.from_bytes(number, "big")
                rank = batch.rank or 0
                expected = self._next_sequence.get(rank, 0)
                if sequence < expected:
                    continue  # it came with a replay
                if sequence > expected:
                    await self._replay(context, rank, expected, sequence)
                self._tell(batch)
                self._next_sequence[rank] = sequence + 1
                await asyncio.sleep(0)  # subscribers read before the next batch, which may be here already

    async def _replay(self, context: Any, rank: int, expected: int, end: int) -> None:
        """Tell the batches `[expected, end)` of a rank that did not arrive, or that they are lost."""
        import zmq

        missed: list[_Batch] = []
        with contextlib.suppress(TimeoutError), _socket(context, zmq.DEALER) as socket:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                socket.connect(self._replays[rank])
                await socket.send_multipart([b"", expected.to_bytes(8, "big")])
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if number == _END_OF_REPLAY or int.from_bytes(number, "big") != expected + len(missed):
                        break
                    missed.append(self._decoder.decode(payload))
        if expected + len(missed) < end:
            _log.warning("kv_events_lost", rank=rank, num_batches=end - expected)
            self.events.publish(AllBlocksCleared())
            return
        for batch in missed[: end - expected]:
            self._tell(batch)

    def _tell(self, batch: _Batch) -> None:
        for event in self._translate(batch):
            self.events.publish(event)

    def _translate(self, batch: _Batch) -> Iterator[KVEvent]:
        removed: list[int] = []  # one event of ours for many of vLLM's, which have a block each
        for event in batch.events:
            if not isinstance(event, _Cleared) and not self._is_told(event):
                continue
            if isinstance(event, _Removed):
                removed += event.block_hashes
                continue
            if removed:
                yield BlocksRemoved(tuple(removed))
                removed = []
            if isinstance(event, _Cleared):
                yield AllBlocksCleared()
            elif (stored := _stored(event)) is not None:
                yield stored
        if removed:
            yield BlocksRemoved(tuple(removed))

    def _is_told(self, event: _Stored | _Removed) -> bool:
        if event.medium not in (None, "GPU"):
            return False  # a slower tier; "GPU" is the device's own cache, on CPU too
        if self._group is None and isinstance(event, _Stored) and event.kv_cache_spec_kind in _WHOLE_CONTEXT:
            self._group = event.group_idx
        return event.group_idx == self._group


def _socket(context: Any, kind: int) -> Any:
    import zmq

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)  # the sender's own bound applies
    return socket


def _stored(event: _Stored) -> BlocksStored | None:
    """Return our event for vLLM's, without its blocks from the first one on that shows an image; None: all do.

    A block's keys are the adapter's name, a pair for each image, and the salt: our KV version, in the keys of a
    context's first block only.
    """
    keys, num_told = event.extra_keys or [], len(event.block_hashes)
    for index, of_block in enumerate(keys):
        if of_block and any(not isinstance(key, str) for key in of_block):
            num_told = index
            break
    if num_told == 0:
        return None
    version: int | None = None
    if event.parent_block_hash is None and keys and keys[0]:
        version = int(keys[0][-1])
    hashes, token_ids = event.block_hashes, event.token_ids
    if num_told < len(hashes):
        hashes, token_ids = hashes[:num_told], token_ids[: num_told * event.block_size]
    return BlocksStored(tuple(hashes), event.parent_block_hash, tuple(token_ids), version)


RAW_LOGPROBS = "agentloop_servers.engines.vllm.raw_logprobs:install"

_IMPORT_LOCK = threading.Lock()

EXIT_TIMEOUT_S = 15.0  # then it is killed; an interpreter with torch loaded takes seconds to leave on busy cores


class SchedulerStats:
    """vLLM's stat-logger interface, reduced to the latest figures. They freeze while vLLM is idle or paused."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.kv_cache_usage = 0.0  # share of the blocks that requests hold
        self.num_steps = 0  # that sampled, or prefilled a chunk
        self.num_sampled_tokens = 0  # so far, as the following
        self.num_preemptions = 0  # each known with the next token of its request

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self.num_sampled_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.num_steps += 1
            self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...


@contextlib.asynccontextmanager
async def vllm_call(action: str, timeout_s: float | None = None) -> AsyncIterator[None]:
    """Make a call to vLLM, under a deadline; what it raises becomes ours."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise EngineError(f"vLLM did not answer a {action} in time") from error
    except Exception as error:
        raise translate(error) from error


class VllmProcess:
    """One AsyncLLM (`llm`, valid after `start`), which is its engine process's only client."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._socket_dir: str | None = None
        self.llm: Any = None
        self.stats = SchedulerStats()
        self.feed = KVEventFeed()

    async def start(self) -> None:
        """Raises EngineError if vLLM does not come up; nothing is left behind then, or if it is cancelled."""
        # A socket file: no port, and only this user can read it.
        self._socket_dir = tempfile.mkdtemp(prefix="agentloop-")
        endpoint = kv_endpoint(self._socket_dir)
        # In a thread, so that the loop (health checks, other tasks) goes on meanwhile.
        construction = asyncio.create_task(asyncio.to_thread(self._construct, endpoint))
        try:
            self.llm = await asyncio.shield(construction)
            num_ranks = self._config.data_parallel_size
            self.feed.start(kv_endpoints(endpoint, num_ranks), kv_endpoints(replay_endpoint(endpoint), num_ranks))
            await self.llm.get_supported_tasks()  # cached by vLLM: later requests enter without waiting
            if self._config.logprobs_mode is not LogprobsMode.SAMPLED:
                await self.on_workers("extend_runner", RAW_LOGPROBS, self._config.logprobs_mode.value)
        except BaseException as error:
            if self.llm is None:
                # The thread cannot be stopped, and what it starts must not outlive us.
                with contextlib.suppress(Exception):
                    self.llm = await construction
            await self.close()
            if isinstance(error, Exception) and not isinstance(error, AgentLoopError):
                raise EngineError(f"vLLM did not start: {one_line(error)}") from error
            raise

    async def close(self) -> None:
        """End the processes and free everything. Idempotent."""
        llm, self.llm = self.llm, None
        if llm is not None:
            if llm.output_handler is not None:
                # Before its sockets go, or it reports a dead engine.
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler])
            await asyncio.to_thread(llm.shutdown, EXIT_TIMEOUT_S)
            await asyncio.sleep(0)  # the shutdown closes its sockets from a callback of this loop
            llm.engine_core.resources.ctx.destroy(linger=0)  # which it leaves open
            # Its destructor shuts it down once more, and fails where the interpreter has ended by then.
            llm.shutdown = lambda *_: None
        if self._socket_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._socket_dir, ignore_errors=True)
        await self.feed.close()

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension in every worker; results in the order of their ranks.

        Arguments and results are strings, numbers and codec bytes. Raises our error for what a worker
        or vLLM raised.
        """
        async with vllm_call(method):
            call = self.llm.engine_core.call_utility_all_async
            engines = await call("collective_rpc", method, None, arguments, None)
        return [result for engine in engines for result in engine]

    @property
    def is_up(self) -> bool:
        """True from the end of `start` until `close`."""
        return self.llm is not None

    async def label(self, version: int) -> None:
        """Stamp every token that is sampled from now on with this weight version."""
        await self.llm.update_weight_version(str(version))

    async def pause(self, *, is_cache_cleared: bool) -> None:
        """Freeze vLLM between two tokens; returns once no step is under way.

        vLLM's `pause_generation` does the same and sleeps 20 ms for the order of events, which labels do not need:
        they are put on each step's outputs by the engine process.
        """
        await self.llm.engine_core.pause_scheduler_async("keep", is_cache_cleared)
        if is_cache_cleared:
            self.feed.clear()

    async def clear_cache(self) -> None:
        """Drop all KV, that of frozen requests too: they are prefilled again. Raises EngineError."""
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not clear its prefix cache")
        if self._config.has_vision:
            await self.llm.reset_encoder_cache()
        self.feed.clear()

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prompts that vLLM knows and has given out no token of."""
        return 0 if self.llm is None else int(self.llm.output_processor.get_num_queued_tokens())

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id."""
        eos_token_id: int | None = self.llm.renderer.get_eos_token_id()
        return eos_token_id

    def describe(self) -> EngineInfo:
        """Return the engine's fixed facts."""
        config = self.llm.vllm_config
        block_size, num_ranks = config.cache_config.block_size, self._config.data_parallel_size
        return EngineInfo(
            name="vllm",
            max_context_tokens=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=block_size,
            # vLLM counts one rank's, and keeps a block of each for itself.
            kv_capacity_tokens=(config.cache_config.num_gpu_blocks - 1) * block_size * num_ranks,
            max_running=config.scheduler_config.max_num_seqs * num_ranks,
            num_workers=self._config.num_workers,
            weight_dtype=str(config.model_config.dtype).removeprefix("torch."),
            can_sleep=self._config.can_sleep,
            can_constrain=self._config.can_constrain,
            logprobs_mode=self._config.logprobs_mode,
        )

    def _construct(self, endpoint: str) -> Any:
        prepare_environment(self._config)
        # What vLLM and torch say of their own imports. The filters are the process's, so one thread at a time.
        with _IMPORT_LOCK, warnings.catch_warnings(action="ignore"):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if self._config.can_constrain:
                importlib.import_module("xgrammar")  # here, because the first constraint's trial has a deadline
            arguments = AsyncEngineArgs(**engine_arguments(self._config, endpoint))
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: self.stats])
