"""Good and bad agents as users write them. They have a base URL and a key, and no access to the service."""

from __future__ import annotations

import asyncio
import threading
import time

import openai

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]

loops_seen: set[int] = set()
threads_seen: set[int] = set()


async def ask(task, base_url, api_key):
    loops_seen.add(id(asyncio.get_running_loop()))
    threads_seen.add(threading.get_ident())
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="default", messages=QUESTION)


def ask_plainly(task, base_url, api_key):
    threads_seen.add(threading.get_ident())
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        completion = client.chat.completions.create(model="default", messages=QUESTION)
    return 0.25 if "5" in completion.choices[0].message.content else 0.0


async def ask_blocking(task, base_url, api_key):
    """Block the event loop during all its calls."""
    return ask_plainly(task, base_url, api_key)


class Asker:
    """A callable object."""

    async def __call__(self, task, base_url, api_key):
        await ask(task, base_url, api_key)
        return 0.75


asker = Asker()


async def by_number(task, base_url, api_key):
    """Behave as the task's id says: half of the tasks fail."""
    number = int(task.task_id.removeprefix("t"))
    await ask(task, base_url, api_key)
    match number % 6:
        case 0:
            raise ValueError(f"number {number}\nand more")
        case 1:
            raise SystemExit(1)
        case 2:
            return "a string"
    return number


async def cancels_itself(task, base_url, api_key):
    raise asyncio.CancelledError


async def never_ends(task, base_url, api_key):
    await asyncio.Event().wait()


async def ignores_cancellation(task, base_url, api_key):
    await ask(task, base_url, api_key)
    deadline_at = time.monotonic() + 10
    while time.monotonic() < deadline_at:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            time.sleep(0.05)  # noqa: ASYNC251 - it is a bad one


def hangs(task, base_url, api_key):
    time.sleep(10)


def takes_too_little(task):
    return None


NOT_A_FUNCTION = 5
