"""The timer of a request on the event loop of the service's processes, which rounds times to milliseconds."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from agentloop.engine.interface import Progress
from agentloop.engine.lifecycle import EngineLifecycle
from agentloop.engine.request_watch import ReportPace, RequestWatch
from agentloop.errors import DeadlineExceeded
from agentloop.types import GenerateRequest, SamplingParams


def test_times_between_two_milliseconds_are_kept_on_uvloop() -> None:
    told: list[Progress] = []

    async def main() -> None:
        request = GenerateRequest("r", (1,), SamplingParams(max_tokens=1), timeout_s=0.0504)
        lifecycle = EngineLifecycle(lambda: True)
        with RequestWatch(request, lifecycle, ReportPace(interval_s=0.0054), told.append) as watch:
            async with asyncio.timeout(60.0):
                with pytest.raises(DeadlineExceeded):
                    await watch.in_time(asyncio.sleep(120.0))

    uvloop.run(main())
    assert told
