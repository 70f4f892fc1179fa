import gc
import tracemalloc

from agentloop.chat.known import KnownMessages
from agentloop.types import Message


def test_the_bound_is_near_what_python_says():
    """Also for short messages: orjson's bytes have 4 KiB allocated, however few they say they are."""
    max_bytes = 1 << 20
    gc.collect()
    tracemalloc.start()
    try:
        known = KnownMessages(max_bytes)
        for at in range(10_000):
            content = f"answer {at}"
            known.add(known.name_of({"role": "tool", "content": content}), Message("tool", content))
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(known) < 10_000
    assert max_bytes / 3 < measured < 1.1 * max_bytes
