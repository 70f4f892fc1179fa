"""Calls one after another, from a host; prints the median of their seconds.

python -m tests.hosts.calls URL NUM
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from agentloop.client.client import RolloutClient
from tests.hosts.cluster import KEY


async def main(url: str, num: int) -> None:
    seconds = []
    async with RolloutClient(url, api_key=KEY) as client:
        for _ in range(num):
            began_at = time.monotonic()
            await client.generate([1, 2, 3], max_tokens=8)
            seconds.append(time.monotonic() - began_at)
    print(statistics.median(seconds))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
