"""What an open page of the viewer costs a live service: its CPU without one and with each, in turns.

    python -m tests.benchmarks.viewer [--rounds 5] [--window-s 45]

The service of `tests/viewer/viewed_service.py` has a process of its own and does nothing else. The page is in
headless Chromium, and asks for what it does at a user's. Its first reading is before the window.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.benchmarks import report
from tests.viewer.test_browser import Browser, browser_at

PAGES = ("overview", "weights", "live")
SETTLE_S = 5.0


async def cores(service: psutil.Process, window_s: float) -> float:
    """The CPU that the service takes in a window, in cores."""
    before = service.cpu_times()
    await asyncio.sleep(window_s)
    after = service.cpu_times()
    return (after.user + after.system - before.user - before.system) / window_s


async def measured(
    browser: Browser, service: psutil.Process, rounds: int, window_s: float
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("none", *PAGES)}
    for _ in range(rounds):
        for name, shares in found.items():
            await browser.page.goto("about:blank")
            if name != "none":
                await browser.open(name, "main")
            await asyncio.sleep(SETTLE_S)
            shares.append(await cores(service, window_s))
    return found


async def main() -> None:
    """Print the table: medians and spreads, and what each page adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=45.0)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.viewer.viewed_service", folder, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            while not (line := (await process.stdout.readline()).decode()).startswith("http"):
                assert line, "the service did not start"
            async with browser_at(line.strip().removesuffix("/ui/"), Path(folder)) as browser:
                service = psutil.Process(process.pid)
                found = await measured(browser, service, options.rounds, options.window_s)
        finally:
            process.kill()
            await process.wait()
    none = statistics.median(found["none"])
    rows = [
        [name, f"{100 * statistics.median(shares):.2f}", f"{100 * min(shares):.2f} to {100 * max(shares):.2f}",
         f"{100 * (statistics.median(shares) - none):.2f}"]
        for name, shares in found.items()
    ]  # fmt: skip
    columns = ("page", "CPU of the service, % of a core", "spread", "more than without")
    report.finish("An open page of the viewer (CPU)", {"": report.table(columns, rows)}, found, None)


if __name__ == "__main__":
    asyncio.run(main())
