import gc
import tracemalloc
import uuid

from agentloop.sessions.calls import CallTable
from agentloop.trajectory.node import CallRecord, ModelCallState


def test_num_bytes_is_near_what_python_says():
    call_ids = [uuid.uuid4().hex for _ in range(150)]  # they belong to the turns and are counted there

    def build() -> CallTable:
        return CallTable(
            CallRecord(call_id, uuid.uuid4().bytes, 1_700_000_000 + at, ModelCallState.COMMITTED, "", at / 7)
            for at, call_id in enumerate(call_ids)
        )

    build()
    gc.collect()
    tracemalloc.start()
    try:
        table = build()
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 < table.num_bytes / measured < 1.2
