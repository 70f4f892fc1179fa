"""Hand-ins: a worker's records on their way to the coordinator, one call at a time.

A call carries all that ended while the one before was under way, up to its bounds: a busy coordinator is called
seldom, an idle one at once. What waits is one record for each trajectory that has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from agentloop.api.coordinator import MAX_HAND_IN, Refusal, WorkerPort
from agentloop.api.encoded_record import EncodedRecord
from agentloop.concurrency.aio import OwnedTasks

MAX_HAND_IN_BYTES = 4 << 20
"""Bytes of the records of one call, unless it carries one alone. Larger ones cost their receiver more a byte: their
memory is fetched from the system and given back each time."""


class HandIns:
    """The hand-ins of one worker. `give` records, and `close` in the end."""

    def __init__(self, worker_id: str, coordinator: WorkerPort) -> None:
        self._worker_id = worker_id
        self._coordinator = coordinator
        self._waiting: deque[tuple[EncodedRecord, asyncio.Future[bool | Exception]]] = deque()
        self._tasks = OwnedTasks("hand-in")
        self._is_calling = False

    async def give(self, record: EncodedRecord) -> bool:
        """Hand in a record. Returns, or raises, what the coordinator says of it (`WorkerPort.finish`)."""
        outcome: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, outcome))
        if not self._is_calling:
            self._is_calling = True
            self._tasks.start(self._call())
        found = await outcome
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        """Cut the call that is under way. Idempotent."""
        await self._tasks.close(cancels=True)

    async def _call(self) -> None:
        """Call until nothing waits."""
        try:
            while self._waiting:
                batch = self._next()
                answers: Sequence[bool | Refusal | Exception]
                try:
                    answers = await self._coordinator.finish(self._worker_id, tuple(one for one, _ in batch))
                except Exception as error:
                    answers = [error] * len(batch)
                for (_, outcome), answer in zip(batch, answers, strict=True):
                    if not outcome.done():  # its caller waits still
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
