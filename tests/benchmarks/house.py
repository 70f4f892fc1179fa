"""The size of the code: lines of each package against its budget, grain, and the files on each path.

    make house                      # all of it: about a minute
    make house ARGS="--lines"       # without running the service

Lines are non-blank. Grain is lines per function and per class, and explanatory comments per 100 lines: own-line
comments inside a function. For the paths, the whole service (simulated engines, two replicas) runs in this process
under a profiler. A path's own stack has our functions that have the path's first function among their callers, also
in tasks that it starts; for an update it has the functions that an idle service does not run. `everything` also
counts functions that run at the same time, in the background. `--list PATH` prints the functions of a path.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

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

# Budgets in non-blank lines, by package, from `agentloop` (library) to the service and the parts.
LIBRARY = {
    "agentloop/values": 3300,  # includes the modules at the top of `agentloop`
    "agentloop/api": 1150,
    "agentloop/client": 1100,
    "agentloop/agents": 450,
    "agentloop/testing": 450,
    "agentloop/rollout": 2800,
    "agentloop/sessions": 1000,
    "agentloop/chat": 2400,
    "agentloop/generation": 1700,
    "agentloop/trajectory": 1250,
    "agentloop/rendering": 1350,
    "agentloop/parsers": 1400,
    "agentloop/scheduling": 2000,
    "agentloop/fleet": 1650,
    "agentloop/storage": 1700,
    "agentloop/simulation": 1100,
}
SERVICE = {
    "servers/agentloop_servers": 1950,  # includes the processes and metrics
    "servers/agentloop_servers/config": 600,
    "servers/agentloop_servers/cli": 1180,
    "servers/agentloop_servers/cluster": 950,
    "servers/agentloop_servers/ingress": 700,
    "servers/agentloop_servers/http": 1100,
    "servers/agentloop_servers/endpoint": 2300,
    "servers/agentloop_servers/coordinator": 1500,
    "servers/agentloop_servers/replica": 650,
    "servers/agentloop_servers/private_http": 450,
    "servers/agentloop_servers/engines": 3000,
    "servers/agentloop_servers/weight_transfer": 4280,
    "servers/agentloop_servers/chat_format": 180,
}
PARTS_BUDGETS = {
    "agentloop_contracts": 1400,
    "agentloop_environments": 620,
    "agentloop_eval": 470,
    "agentloop_isolation": 620,
    "agentloop_models": 540,
    "agentloop_postgres": 400,
    "agentloop_renderers": 300,
    "agentloop_sglang": 1500,
    "agentloop_store": 930,
    "agentloop_tools": 1900,
    "agentloop_traces": 400,
    "agentloop_trainers": 1200,
    "agentloop_verify": 470,
    "agentloop_view": 1200,
}
# Packages that are counted with another.
COUNTED_WITH = {
    "agentloop": "agentloop/values",
    "agentloop/engine": "agentloop/values",
    "agentloop/concurrency": "agentloop/values",
    "agentloop/observability": "agentloop/values",
}
MAX_LINES_PER_FUNCTION, MIN_COMMENTS = 15, 2.5

# The first function of each path, by file and qualified name.
PATHS = {
    "turn in worker": ("agentloop/rollout/context.py", "LoopContext.sample"),
    "turn in replica": ("servers/agentloop_servers/replica/server.py", "DataPlaneServer._generate"),
    "chat call": ("servers/agentloop_servers/http/guard.py", "HttpGuard.__call__"),
}
PATH_GOALS = {
    "turn in worker": (21, 130),
    "turn in replica": (12, 60),
    "chat call": (44, 260),
    "update": (36, 280),
    "idle": (36, 150),
}
IDLE_S = 5.0


def num_lines(file: Path) -> int:
    """Count the non-blank lines of a file."""
    return sum(bool(line.strip()) for line in file.read_text().splitlines())


def production() -> list[Path]:
    """Return every shipped file, by its path in the repository."""
    return sorted(path.relative_to(ROOT) for root in ROOTS for path in (ROOT / root).rglob("*.py"))


def package_of(file: Path) -> str:
    """Return the package, of the library, the service or the parts, that a file is counted in."""
    root, *folders = file.parts[:-1]
    if root == "agentloop":
        package = "/".join([root, *folders[:1]])
        return COUNTED_WITH.get(package, package)
    if folders[0] != "agentloop_servers":
        return folders[0]
    package = "/".join([root, *folders[:2]])
    return package if package in SERVICE else "servers/agentloop_servers"


def print_lines(console: Console) -> None:
    """Print each package's lines and budget, and each ring's."""
    lines: dict[str, int] = {}
    for file in production():
        package = package_of(file)
        lines[package] = lines.get(package, 0) + num_lines(ROOT / file)
    table = Table("package", "lines", "budget", "over")
    for ring, budgets in (("library", LIBRARY), ("service", SERVICE), ("parts", PARTS_BUDGETS)):
        for package, budget in budgets.items():
            _add_row(table, package, lines.get(package, 0), budget)
        packages = budgets if ring != "parts" else set(lines) - set(LIBRARY) - set(SERVICE)
        _add_row(table, ring, sum(lines.get(package, 0) for package in packages), sum(budgets.values()))
        table.add_section()
    table.add_row("all", str(sum(lines.values())), "", "")
    console.print(table)


def _add_row(table: Table, name: str, lines: int, budget: int) -> None:
    over = lines - budget
    table.add_row(name, str(lines), str(budget), f"+{over}" if over > 0 else "")


def print_grain(console: Console) -> None:
    """Print lines per function and class, comments inside functions, the sizes of files, and the tests' lines."""
    texts = {file: (ROOT / file).read_text() for file in production()}
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    num_functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    num_protocols = sum(any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes)
    lengths = sorted(num_lines(ROOT / file) for file in texts)
    total = sum(lengths)
    num_comments = sum(len(re.findall(r"^ +# ", text, flags=re.MULTILINE)) for text in texts.values())
    tests = sorted((ROOT / "tests").rglob("*.py"))
    counted_apart = ("tests/benchmarks", "tests/gpu")
    of_tests = sum(num_lines(file) for file in tests if not str(file.relative_to(ROOT)).startswith(counted_apart))
    console.print(
        f"{total / num_functions:.1f} lines per function (goal {MAX_LINES_PER_FUNCTION}), "
        f"{total / len(classes):.0f} per class (goal 80), "
        f"{100 * num_comments / total:.1f} comments per 100 lines (goal {MIN_COMMENTS})"
    )
    console.print(f"{len(classes)} classes, {num_protocols} of them Protocols; {num_functions} functions")
    quarters = [lengths[len(lengths) * part // 4] for part in (1, 2, 3)]
    console.print(f"{len(lengths)} files: quartiles {quarters} lines, longest {lengths[-1]}")
    console.print(f"tests without benchmarks and GPU programs: {of_tests} lines (goal 51,000)")


Functions = set[tuple[str, str]]  # by file and qualified name


def _sizes(functions: Functions) -> tuple[int, int]:
    return len({file for file, _ in functions}), len(functions)


class Profile:
    """Our functions that were entered since `begin`, in all threads: all, and those of one path's own stack."""

    def __init__(self) -> None:
        self._roots = tuple(str(ROOT / root) for root in ROOTS)
        self._first: tuple[str, str] | None = None
        self._all: set[CodeType] = set()
        self._own: set[CodeType] = set()
        self._own_tasks = WeakSet[asyncio.Task[Any]]()
        asyncio.get_running_loop().set_task_factory(self._start_task)

    def _start_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **options)
        if self._is_own(inspect.currentframe()):
            self._own_tasks.add(task)
        return task

    def _is_own(self, frame: FrameType | None) -> bool:
        # A resumed coroutine enters its awaiting callers again, so these are among its frame's callers.
        while frame is not None:
            if (frame.f_code.co_filename, frame.f_code.co_qualname) == self._first:
                return True
            frame = frame.f_back
        try:
            return asyncio.current_task() in self._own_tasks
        except RuntimeError:  # in a thread without an event loop
            return False

    def begin(self, path: str) -> None:
        """Start counting."""
        file, name = PATHS.get(path, ("", ""))
        self._first, self._all, self._own = (str(ROOT / file), name), set(), set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> tuple[Functions, Functions]:
        """Return the functions of the path's own stack, and all functions."""
        sys.setprofile(None)
        threading.setprofile(None)
        own, everything = (
            {(code.co_filename, code.co_qualname) for code in codes} for codes in (self._own, self._all)
        )
        return own, everything

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._roots) or code.co_name == "<module>":
            return
        self._all.add(code)
        if self._is_own(frame):
            self._own.add(code)


async def print_paths(console: Console, listed: str | None) -> None:
    """Run the service in this process, and print the sizes of the paths, and the functions of the path `listed`."""
    profile = Profile()
    idle: Functions = set()
    table = Table("path", "files", "goal", "functions", "goal", "everything: files", "functions")

    async def count(path: str, walk: Callable[[], Awaitable[object]]) -> None:
        await walk()  # the first walk loads modules and fills caches
        await asyncio.sleep(1.0)
        profile.begin(path)
        await walk()
        own, everything = profile.end()
        if path == "idle":
            idle.update(own := everything)
        elif path == "update":
            own = everything - idle
        (files, goal_files), (functions, goal) = zip(_sizes(own), PATH_GOALS[path], strict=True)
        table.add_row(path, *map(str, (files, goal_files, functions, goal, *_sizes(everything))))
        if path == listed:
            for file, name in sorted(own):
                console.print(f"{Path(file).relative_to(ROOT)} {name}", soft_wrap=True)

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
                await sdk.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=16
                )

            version = 0

            async def update() -> None:
                nonlocal version
                version += 1
                await client.update_weights([("w", torch.zeros(1024))], version=version)

            cpu_s = time.process_time()
            await asyncio.sleep(IDLE_S)
            idle_cpu = (time.process_time() - cpu_s) / IDLE_S
            await count("idle", lambda: asyncio.sleep(IDLE_S))
            await count("turn in worker", rollout)
            await count("turn in replica", rollout)
            async with client.session() as session, AsyncOpenAI(base_url=session.base_url, api_key="-") as sdk:
                await count("chat call", chat)
            await count("update", update)
    console.print(table)
    console.print(f"idle service in one process: {1000 * idle_cpu:.0f} ms of CPU per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="do not run the service")
    parser.add_argument("--list", metavar="PATH", choices=PATH_GOALS, help="print the functions of this path")
    options = parser.parse_args()
    console = Console(width=110)
    commit = subprocess.run(("git", "log", "-1", "--format=%h %s"), cwd=ROOT, capture_output=True, text=True)
    console.print(commit.stdout.strip())
    print_lines(console)
    print_grain(console)
    if not options.lines:
        configure_logging(None, level="error", console_level="error")
        asyncio.run(print_paths(console, options.list))


if __name__ == "__main__":
    main()
