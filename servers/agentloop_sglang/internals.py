"""Differences between the two SGLang versions that are driven: first 0.5.17 in each function, then 0.5.23."""

from __future__ import annotations

import inspect
from typing import Any


def ranks(scheduler: Any) -> Any:
    """Return a scheduler's `tp_rank`, `tp_size`, `pp_size` and `dp_size`."""
    if hasattr(scheduler, "ps"):
        return scheduler.ps
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def holds_kv(req: Any) -> bool:
    """Tell if a scheduler's request has KV of its own."""
    return bool(req.req_pool_idx is not None if hasattr(req, "req_pool_idx") else req.kv.holds_kv)


def release_kv(req: Any, tree_cache: Any) -> None:
    """Give the KV of a finished request back, and leave it in the prefix cache."""
    from sglang.srt.mem_cache.common import release_kv_cache

    is_new = "checkpoint" in inspect.signature(release_kv_cache).parameters
    release_kv_cache(req, tree_cache, **({"checkpoint": True} if is_new else {}))


def is_abort_sent(state: Any) -> bool:
    """Tell if an abort of the tokenizer manager's request is on its way."""
    return bool(state.abort_requested if hasattr(state, "abort_requested") else state.abort_sent)
