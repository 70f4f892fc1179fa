"""The house in figures: lines of each package against its budget, classes, tests, and what each way executes.

    make house                      # all of it: about a minute
    make house ARGS="--lines"       # without running the service

Lines are non-blank. A way is executed, not documented: the whole service (simulated engines, two replicas) runs in
this process, a profiler counts the files and functions of our own that a rollout, a chat call and a pushed update
enter, background included, and those that an idle service enters in as long a time.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import torch
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from agentloop.client.client import RolloutClient
from agentloop.observability.logs import configure_logging
from agentloop.types import Message, RolloutTask
from tests.support.service.whole_service import simulated_config, whole_service

ROOT = Path(__file__).parents[2]
ROOTS = ("agentloop", "servers", "tools")

# Non-blank lines that a package may have: a later issue's own "Worth about N lines" alone raises one.
BUDGETS = {
    "agentloop": 2600,
    "agentloop/agents": 400,
    "agentloop/api": 950,
    "agentloop/chat": 2250,
    "agentloop/client": 800,
    "agentloop/fleet": 1100,
    "agentloop/generation": 1600,
    "agentloop/parsers": 1000,
    "agentloop/rendering": 1150,
    "agentloop/rollout": 1900,
    "agentloop/scheduling": 1900,
    "agentloop/sessions": 900,
    "agentloop/simulation": 900,
    "agentloop/storage": 950,
    "agentloop/trajectory": 1150,
    "servers/agentloop_servers": 2050,
    "servers/agentloop_servers/chat_format": 300,
    "servers/agentloop_servers/cli": 1400,
    "servers/agentloop_servers/coordinator": 950,
    "servers/agentloop_servers/endpoint": 1550,
    "servers/agentloop_servers/engines": 1650,
    "servers/agentloop_servers/http": 750,
    "servers/agentloop_servers/ingress": 400,
    "servers/agentloop_servers/private_http": 300,
    "servers/agentloop_servers/replica": 780,
    "servers/agentloop_servers/weight_transfer": 3850,
}
OPTIONAL = {
    "tools/agentloop_trainers": "trainers",
    "servers/agentloop_verify": "check of logprobs",
    "servers/agentloop_view": "viewer, reports, exports",
    "servers/agentloop_traces": "traces",
    "servers/agentloop_isolation": "isolation",
    "servers/agentloop_postgres": "PostgreSQL",
    "servers/agentloop_renderers": "renderers",
    "servers/agentloop_store": "published versions",
    "servers/agentloop_sglang": "SGLang",
    "tools/agentloop_tools": "tools",
}
WAY_GOALS = {"rollout": (62, 560), "chat call": (62, 560), "update": (50, 390), "idle": (30, None)}
IDLE_S = 5.0


def num_lines(file: Path) -> int:
    """Count the non-blank lines of a file."""
    return sum(bool(line.strip()) for line in file.read_text().splitlines())


def production() -> list[Path]:
    """Return every file that is shipped, by its path in the repository."""
    return sorted(path.relative_to(ROOT) for root in ROOTS for path in (ROOT / root).rglob("*.py"))


def room_of(file: Path) -> str:
    """Return the package, or the optional part, that a file is counted in."""
    for prefix in OPTIONAL:
        if file.is_relative_to(prefix):
            return prefix
    folder = str(file.parent)
    while folder not in BUDGETS:
        folder = str(Path(folder).parent)
    return folder


def print_lines(console: Console) -> None:
    """Print each package's lines and budget, and the whole."""
    rooms: dict[str, int] = {}
    for file in production():
        rooms[room_of(file)] = rooms.get(room_of(file), 0) + num_lines(ROOT / file)
    table = Table("package", "lines", "budget", "over")
    for room, budget in BUDGETS.items():
        over = rooms.get(room, 0) - budget
        table.add_row(room, str(rooms.get(room, 0)), str(budget), f"+{over}" if over > 0 else "")
    core = sum(lines for room, lines in rooms.items() if room in BUDGETS)
    table.add_row("core", str(core), str(sum(BUDGETS.values())), "")
    for room, name in OPTIONAL.items():
        table.add_row(f"{room} ({name})", str(rooms.get(room, 0)), "", "")
    table.add_row("with optional parts", str(sum(rooms.values())), "", "")
    console.print(table)
    trees = [ast.parse((ROOT / file).read_text()) for file in production()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    num_protocols = sum(any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes)
    lengths = sorted(num_lines(ROOT / file) for file in production())
    tests = sorted((ROOT / "tests").rglob("*.py"))
    counted_apart = ("tests/benchmarks", "tests/gpu")
    of_tests = sum(num_lines(file) for file in tests if not str(file.relative_to(ROOT)).startswith(counted_apart))
    console.print(f"{len(classes)} classes (goal 620), {num_protocols} of them Protocols (goal 32)")
    quarters = [lengths[len(lengths) * part // 4] for part in (1, 2, 3)]
    console.print(f"{len(lengths)} files: quartiles {quarters} lines, longest {lengths[-1]}")
    console.print(f"tests without benchmarks and GPU programs: {of_tests} lines (goal 40,000)")


class Entered:
    """The functions of ours that were entered since `begin`, in all threads."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    def begin(self) -> None:
        """Count from now on."""
        self._codes = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> tuple[int, int]:
        """Return the files and functions entered."""
        sys.setprofile(None)
        threading.setprofile(None)
        roots = tuple(str(ROOT / root) for root in ROOTS)
        ours = {(code.co_filename, code.co_qualname) for code in self._codes if code.co_filename.startswith(roots)}
        functions = {one for one in ours if one[1] != "<module>"}
        return len({file for file, _ in functions}), len(functions)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)


async def print_ways(console: Console) -> None:
    """Run the service in this process, and print what each way enters."""
    entered = Entered()
    table = Table("way", "files", "goal", "functions", "goal")

    async def count(way: str, walk: Callable[[], Awaitable[object]]) -> None:
        await walk()  # what is loaded at the first time is not of the way
        await asyncio.sleep(1.0)
        entered.begin()
        await walk()
        files, functions = entered.end()
        goals = WAY_GOALS[way]
        table.add_row(way, str(files), str(goals[0]), str(functions), str(goals[1] or ""))

    engine = {"weight_staging": "host"}
    with TemporaryDirectory() as folder:
        config = simulated_config(mode="standalone", engine=engine)
        async with whole_service(config, Path(folder)) as url, RolloutClient(url) as client:
            asked = (Message("user", "What is 2 + 3?"),)
            tasks = [RolloutTask(f"t{n}", asked, tools=("calculator",)) for n in range(2)]

            async def rollout() -> None:
                handle = await client.submit(tasks)
                async for _ in handle:
                    pass

            async def chat() -> None:
                async with client.session() as session, AsyncOpenAI(base_url=session.base_url, api_key="-") as sdk:
                    await sdk.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=16
                    )

            version = 0

            async def update() -> None:
                nonlocal version
                version += 1
                await client.update_weights([("w", torch.zeros(1024))], version=version)

            await count("rollout", rollout)
            await count("chat call", chat)
            await count("update", update)
            cpu_s = time.process_time()
            await asyncio.sleep(IDLE_S)
            idle_cpu = (time.process_time() - cpu_s) / IDLE_S
            await count("idle", lambda: asyncio.sleep(IDLE_S))
    console.print(table)
    console.print(f"idle service in one process: {1000 * idle_cpu:.0f} ms of CPU a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="do not run the service")
    options = parser.parse_args()
    console = Console(width=110)
    commit = subprocess.run(("git", "log", "-1", "--format=%h %s"), cwd=ROOT, capture_output=True, text=True)
    console.print(commit.stdout.strip())
    print_lines(console)
    if not options.lines:
        configure_logging(None, level="error", console_level="error")
        asyncio.run(print_ways(console))


if __name__ == "__main__":
    main()
