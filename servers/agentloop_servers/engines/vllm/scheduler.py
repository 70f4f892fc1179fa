"""vLLM's scheduler (0.32 and 0.33) with a reserved sequence slot and reserved KV blocks for the canary check.

`make_scheduler` is vLLM's `scheduler_cls`. It runs in the engine's process, before the first request, so it also
makes that process end with its parent.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from typing import Any

from agentloop.canary import CANARY_PREFIX

SCHEDULER = f"{__name__}.make_scheduler"


def make_scheduler(**arguments: Any) -> Any:
    """Construct vLLM's scheduler for this configuration, with `CanaryFirst` in front of it."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    end_with_parent()
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    return type("CanaryScheduler", (CanaryFirst, AsyncScheduler if is_async else Scheduler), {})(**arguments)


def end_with_parent() -> None:
    """Kill this process once the process that spawned it has ended: vLLM's engine would keep its memory."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)  # its workers end by pipes of their own

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class CanaryFirst:
    """A mixin for vLLM's `Scheduler`: a canary request runs alone in the first step after a resume.

    Neither a full batch, a full KV cache, the requests that must recompute their KV nor the scheduling policy can
    delay it. The slot is the one that `max_num_seqs` has beyond `max_num_active_seqs`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        scheduler: Any = self  # the attributes are those of vLLM's class
        self._canary: Any = None  # vLLM's request, until it is scheduled
        self._scheduled: Any = None  # vLLM's request, while it uses the reserved blocks
        self._pool = scheduler.kv_cache_manager.block_pool
        self._num_reserved = len(scheduler.kv_cache_config.kv_cache_groups)  # a block of each group
        self._reserve()
        # The engine reports this as its capacity.
        scheduler.cache_config.num_gpu_blocks -= self._num_reserved

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.request_id.startswith(CANARY_PREFIX):
            self._canary = request

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        schedule = super().schedule  # type: ignore[misc]
        if self._canary is None:  # almost every step
            return schedule(*arguments, **options)
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.core.sched.request_queue import create_request_queue

        scheduler: Any = self
        if scheduler._pause_state != PauseState.UNPAUSED:
            return schedule(*arguments, **options)
        canary, self._canary = self._canary, None
        if canary.request_id not in scheduler.requests:  # aborted
            return schedule(*arguments, **options)
        # Hide all other requests for this step: vLLM schedules running requests and those that hold KV first, and
        # no waiting request in a step that preempts one.
        waiting, holding, running = scheduler.waiting, scheduler.kv_holding_waiting, scheduler.running
        waiting.remove_request(canary)
        scheduler.waiting, scheduler.kv_holding_waiting = (create_request_queue(scheduler.policy) for _ in range(2))
        scheduler.waiting.add_request(canary)
        scheduler.running = []
        self._pool.num_gpu_blocks += self._num_reserved
        self._pool.free_blocks(self._reserved)
        self._scheduled = canary
        try:
            return schedule(*arguments, **options)
        finally:
            scheduler.waiting, scheduler.kv_holding_waiting = waiting, holding
            # In front: under KV pressure vLLM preempts from the end, or by priority.
            canary.priority = min([canary.priority, *(request.priority - 1 for request in running)])
            scheduler.running = [canary, *running]

    def _free_blocks(self, request: Any) -> None:
        super()._free_blocks(request)  # type: ignore[misc]
        if request is self._scheduled:
            # Reserve the blocks that the canary has just freed, before another request can take them.
            self._scheduled = None
            self._reserve()

    def _reserve(self) -> None:
        # The pool counts as smaller by the reserved blocks: its use and its reset count them as absent.
        self._reserved = self._pool.get_new_blocks(self._num_reserved)
        self._pool.num_gpu_blocks -= self._num_reserved
