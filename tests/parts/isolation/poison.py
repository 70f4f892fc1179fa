"""Loops, tools and rewards that damage their process. They are imported in isolated processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from agentloop.api.coordinator import JournalPart
from agentloop.rollout.tool import tool
from agentloop.types import Message


class Dies:
    """Ends its process in the way that its task's reference names."""

    async def run(self, task, ctx):
        with suppress(Exception):  # a limit, which would end the trajectory first
            await ctx.sample()
        match task.reference:
            case "exit":
                os._exit(7)
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), 9)
            case "exit in a task":
                asyncio.get_running_loop().call_soon(sys.exit, 3)
                await asyncio.sleep(60)


class Blocks:
    """Blocks its event loop for ever, with a child process running."""

    async def run(self, task, ctx):
        sleeper = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - a user's
        _write(task.reference, f"{os.getpid()} {sleeper.pid}")
        while True:
            time.sleep(1.0)  # noqa: ASYNC251 - this is what it is for


def _write(path, text):
    Path(path).write_text(text)


class Leaves:
    """Leaves an asyncio task running."""

    kept: set = set()  # noqa: RUF012

    async def run(self, task, ctx):
        self.kept.add(asyncio.get_running_loop().create_task(asyncio.sleep(600)))
        await ctx.sample()


class Pries:
    """Reports the secrets that it finds, and sends requests about another trajectory."""

    async def run(self, task, ctx):
        found = [value for name, value in os.environ.items() if "KEY" in name.upper()]
        ctx.observe(Message("user", f"environment: {found}"))
        engine = vars(ctx)["_engine"]
        for call in (
            engine.connect("").abort("other/0@0:0"),
            engine.connect("").generate(ctx_request(ctx, "other/0@0:0")),
            engine.connect("").keep_turns((JournalPart("other/0", "run", 0, b"x"),), ()),
            engine.connect("").keep_turns((), (("other/0", ""),)),
            engine.connect("").kept_turns("other/0"),
        ):
            try:
                await call
            except Exception as error:
                ctx.observe(Message("user", f"{type(error).__name__}: {error}"))
        ctx.observe(Message("user", f"lease: {vars(engine)['_holder'].lease.url!r}"))
        await ctx.sample()


def ctx_request(ctx, request_id):
    """Return a request with another trajectory's name."""
    from agentloop.types import GenerateRequest, SamplingParams  # noqa: PLC0415

    return GenerateRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=1))


def where(task, messages):
    """Return the id of the process as the score."""
    return float(os.getpid())


@tool
def dies() -> str:
    """End the process."""
    os._exit(9)
