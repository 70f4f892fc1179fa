"""Submission of a worker's records to the coordinator, with one call at a time.

A call contains all records that were added during the previous call, up to `MAX_HAND_IN` records and
`MAX_HAND_IN_BYTES`. So a busy coordinator receives fewer, larger calls, and an idle one receives each record
immediately. The queue holds at most one record per running trajectory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from agentloop.api.coordinator import MAX_HAND_IN, Refusal, WorkerPort
from agentloop.api.encoded_record import EncodedRecord
from agentloop.concurrency.aio import OwnedTasks

MAX_HAND_IN_BYTES = 4 << 20
"""Maximum total bytes of the records of one call; a call with a single record may be larger. Larger messages cost
the receiver more CPU per byte, because the allocator obtains their memory from the system and releases it each
time."""


class HandIns:
    """Submits the records of one worker."""

    def __init__(self, worker_id: str, coordinator: WorkerPort) -> None:
        self._worker_id = worker_id
        self._coordinator = coordinator
        self._waiting: deque[tuple[EncodedRecord, asyncio.Future[bool | Exception]]] = deque()
        self._tasks = OwnedTasks("hand-in")
        self._is_calling = False

    async def give(self, record: EncodedRecord) -> bool:
        """Submit a record. Returns or raises the coordinator's result for it (see `WorkerPort.finish`)."""
        outcome: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, outcome))
        if not self._is_calling:
            self._is_calling = True
            self._tasks.start(self._call())
        result = await outcome
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        """Cancel the running call. Idempotent."""
        await self._tasks.close(cancels=True)

    async def _call(self) -> None:
        try:
            while self._waiting:
                batch = self._next()
                answers: Sequence[bool | Refusal | Exception]
                try:
                    answers = await self._coordinator.finish(self._worker_id, tuple(record for record, _ in batch))
                except Exception as error:
                    answers = [error] * len(batch)
                for (_, outcome), answer in zip(batch, answers, strict=True):
                    if not outcome.done():  # its caller was not cancelled
                        outcome.set_result(answer.raised() if isinstance(answer, Refusal) else answer)
        finally:
            self._is_calling = False

    def _next(self) -> list[tuple[EncodedRecord, asyncio.Future[bool | Exception]]]:
        batch, num_bytes = [self._waiting.popleft()], 0
        while self._waiting and len(batch) < MAX_HAND_IN:
            num_bytes += len(batch[-1][0].data)
            if num_bytes + len(self._waiting[0][0].data) > MAX_HAND_IN_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch
