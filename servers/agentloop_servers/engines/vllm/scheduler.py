"""The part of the adapter that runs in vLLM's engine process (0.32 and 0.33).

`make_scheduler` is vLLM's `scheduler_cls`. It runs in the engine process before the first request, so it also makes
that process exit with its parent and adds the method `COMMIT_AND_RESUME` to it. The scheduler has a reserved
sequence slot and reserved KV blocks for the canary check.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from agentloop.engine.canary import CANARY_PREFIX
from agentloop_servers.engines.vllm.step_logprobs import StepLogprobs
from agentloop_servers.weight_transfer.worker_calls import CALL, WorkerMethod

SCHEDULER = f"{__name__}.make_scheduler"
COMMIT_AND_RESUME = "agentloop_commit_and_resume"
"""The engine core's method `commit_and_resume`."""


def make_scheduler(**arguments: Any) -> Any:
    """Construct vLLM's scheduler for this configuration, with the mixins `CanaryFirst` and `StepLogprobs`."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    end_with_parent()
    setattr(EngineCore, COMMIT_AND_RESUME, commit_and_resume)
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    bases = (CanaryFirst, StepLogprobs, AsyncScheduler if is_async else Scheduler)
    return type("CanaryScheduler", bases, {})(**arguments)


def commit_and_resume(core: Any, number: int, version: str) -> list[tuple[Any, str]]:
    """Commit a staged update in all workers of the paused engine. If all succeed, set the version label and
    resume."""
    # One call instead of three: a front end with hundreds of requests needs tens of milliseconds for each round
    # trip.
    answers: list[tuple[Any, str]] = core.collective_rpc(CALL, None, (WorkerMethod.COMMIT, number))
    if not any(error for _, error in answers):
        core.set_weight_version(version)
        core.resume_scheduler()
    return answers


def end_with_parent() -> None:
    """Kill this process when its parent process exits: vLLM's engine would keep its memory otherwise."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)  # the workers detect this by their own pipes and exit

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class CanaryFirst:
    """A mixin for vLLM's `Scheduler`: a canary request runs in the first step after a resume.

    A full batch, a full KV cache, requests that must recompute their KV, and the scheduling policy cannot delay it.
    It is scheduled first, and the other requests share the same step with the remaining tokens: a separate step
    would remove all other requests from the workers' batch and add them again one by one. `max_num_seqs` has one
    more slot than `max_num_active_seqs` for it.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        scheduler: Any = self  # typed as Any for the attributes of vLLM's class
        self._canary: Any = None  # the canary request until it is scheduled
        self._scheduled: Any = None  # the canary request while it uses the reserved blocks
        self._pool = scheduler.kv_cache_manager.block_pool
        self._num_reserved = len(scheduler.kv_cache_config.kv_cache_groups)  # one block per group
        self._reserve()
        # The engine reports this number as its capacity.
        scheduler.cache_config.num_gpu_blocks -= self._num_reserved

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.request_id.startswith(CANARY_PREFIX):
            self._canary = request

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        schedule = super().schedule  # type: ignore[misc]
        if self._canary is None or self._is_paused:  # the case of almost every step
            return schedule(*arguments, **options)
        scheduler: Any = self
        canary, self._canary = self._canary, None
        if canary.request_id not in scheduler.requests:  # aborted
            return schedule(*arguments, **options)
        before = set(scheduler.prev_step_scheduled_req_ids)
        first = self._schedule_alone(canary, lambda: schedule(*arguments, **options))
        scheduler.prev_step_scheduled_req_ids = before
        with self._fewer_tokens(first.total_num_scheduled_tokens):
            others = schedule(*arguments, **options)
        running = scheduler.running
        # Put the canary first: under KV pressure vLLM preempts from the end, or by priority.
        canary.priority = min([canary.priority, *(request.priority - 1 for request in running)])
        scheduler.running = [canary, *running]
        return _one_step(first, others)

    def has_finished_requests(self) -> bool:
        # A paused engine would run an empty step to notify the workers, which would then add all requests again one
        # by one.
        return not self._is_paused and super().has_finished_requests()  # type: ignore[misc]

    @property
    def _is_paused(self) -> bool:
        from vllm.v1.core.sched.interface import PauseState

        scheduler: Any = self
        return bool(scheduler._pause_state != PauseState.UNPAUSED)

    def _schedule_alone(self, canary: Any, schedule: Callable[[], Any]) -> Any:
        """Schedule only the canary, and leave the queues of the other requests unchanged."""
        from vllm.v1.core.sched.request_queue import create_request_queue

        # Hide all other requests: vLLM first schedules running requests and waiting ones that hold KV, and it
        # admits no waiting request in a step with a preemption.
        scheduler: Any = self
        waiting, holding, running = scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running
        waiting.remove_request(canary)
        scheduler.waiting, scheduler.kv_holding_waiting = (create_request_queue(scheduler.policy) for _ in range(2))
        scheduler.waiting.add_request(canary)
        scheduler.running = []
        self._pool.num_gpu_blocks += self._num_reserved
        self._pool.free_blocks(self._reserved)
        self._scheduled = canary
        try:
            return schedule()
        finally:
            scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running = waiting, holding, running

    @contextlib.contextmanager
    def _fewer_tokens(self, num_tokens: int) -> Iterator[None]:
        """Reduce the token budget of a step by `num_tokens`, and by the drafts of one request."""
        scheduler: Any = self
        config, speculative = scheduler.scheduler_config, scheduler.vllm_config.speculative_config
        num_drafts = 0 if speculative is None else speculative.max_num_new_slots_for_drafting
        scheduled, batched = scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens
        scheduler.max_num_scheduled_tokens = scheduled - num_tokens
        config.max_num_batched_tokens = batched - num_tokens - num_drafts
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens, config.max_num_batched_tokens = scheduled, batched

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        if request is self._scheduled:
            # Reserve the blocks that the canary has just freed before another request allocates them.
            self._scheduled = None
            self._reserve()

    def _reserve(self) -> None:
        # Shrink the pool's size by the reserved blocks, so that its usage and its reset do not count them.
        self._reserved = self._pool.get_new_blocks(self._num_reserved)
        self._pool.num_gpu_blocks -= self._num_reserved


def _one_step(first: Any, others: Any) -> Any:
    """Merge two of vLLM's SchedulerOutputs. `first` has new requests only."""

    def joined(name: str) -> list[Any] | None:
        return [*(getattr(first, name) or ()), *(getattr(others, name) or ())] or None

    return replace(
        others,
        scheduled_new_reqs=first.scheduled_new_reqs + others.scheduled_new_reqs,
        num_scheduled_tokens=first.num_scheduled_tokens | others.num_scheduled_tokens,
        total_num_scheduled_tokens=first.total_num_scheduled_tokens + others.total_num_scheduled_tokens,
        finished_req_ids=first.finished_req_ids | others.finished_req_ids,
        free_encoder_mm_hashes=first.free_encoder_mm_hashes + others.free_encoder_mm_hashes,
        new_block_ids_to_zero=joined("new_block_ids_to_zero"),
        kv_cache_block_copies=joined("kv_cache_block_copies"),
    )
