"""Differences between the two supported SGLang versions. Each function handles 0.5.17 first, then 0.5.23."""

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
    """Return True if a scheduler's request holds KV."""
    return bool(req.req_pool_idx is not None if hasattr(req, "req_pool_idx") else req.kv.holds_kv)


def release_kv(req: Any, tree_cache: Any) -> None:
    """Release the KV of a finished request to the prefix cache."""
    from sglang.srt.mem_cache.common import release_kv_cache

    is_new = "checkpoint" in inspect.signature(release_kv_cache).parameters
    release_kv_cache(req, tree_cache, **({"checkpoint": True} if is_new else {}))


def is_abort_sent(state: Any) -> bool:
    """Return True if the tokenizer manager has sent an abort of the request."""
    return bool(state.abort_requested if hasattr(state, "abort_requested") else state.abort_sent)
