"""The load of `gpu_throughput`: trajectories of given lengths, as a loop of the service or agents of its endpoint.

Each trajectory has a unique prompt and samples a given number of tokens in each turn. Between two turns a tool
answers at once (`Turns`), or the agent does (`ChatAgent`, over raw keep-alive connections, in separate processes).
Times are `time.perf_counter()`, which all processes of a host share on Linux. A load stops automatically: no turn
starts after its window.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson
import uvloop

from agentloop.client.client import RolloutClient
from agentloop.client.session import AgentSession
from agentloop.concurrency.aio import tune_interpreter
from agentloop.rollout.context import LoopContext
from agentloop.types import Limits, Message, RolloutTask, ToolCall, Trajectory
from agentloop_tools.calculator import calculator
from tests.benchmarks.endpoint_load import Connection

LOOP = "tests.benchmarks.gpu_load:Turns"
ROOM_TOKENS = 1 << 20  # no task limit cuts a turn: the loop does
ANSWER = "The tool says 413."
_CALL = ToolCall("call_0", "calculator", {"expression": "12 * 34 + 5"})
_WORDS = ("river", "stone", "window", "seven", "garden", "paper", "morning", "bridge", "copper", "winter", "letter")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a load. `outside_s`: its seconds outside the engine, including the tool; None: unknown."""

    began_at: float
    ended_at: float
    num_tokens: int
    outside_s: float | None = None
    number: int = 0  # index in its trajectory


@dataclass(frozen=True, slots=True)
class Window:
    """The measured, steady part of a load."""

    begins_at: float
    ends_at: float

    @property
    def seconds(self) -> float:
        return self.ends_at - self.begins_at

    def share(self, turn: Turn) -> float:
        """Return the share of the turn's time inside the window."""
        within = min(turn.ended_at, self.ends_at) - max(turn.began_at, self.begins_at)
        return max(within, 0.0) / (turn.ended_at - turn.began_at)

    def num_tokens(self, turns: Sequence[Turn]) -> float:
        """Return the tokens sampled inside the window.

        The tokens of a turn that crosses an edge are spread evenly over the turn.
        """
        return sum(turn.num_tokens * self.share(turn) for turn in turns)

    def ended_within(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns that ended in the window."""
        return [turn for turn in turns if self.begins_at <= turn.ended_at < self.ends_at]


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_trajectories`, of which `num_at_once` are in flight, with turns of about `num_sampled` tokens.

    With a `spread` of 0.5, a turn's length is drawn from 0.5 to 1.5 times `num_sampled`.
    """

    num_trajectories: int
    num_at_once: int
    until: float = math.inf  # no turn starts later
    num_turns: int = 3
    num_sampled: int = 160
    spread: float = 0.0
    prompt_words: int = 16
    has_tools: bool = True
    answer_words: int = 0  # length of each tool's answer; 0: ANSWER
    mean_pause_s: float = 0.0  # a tool's run time, exponentially distributed

    def text(self, number: int) -> str:
        """Return a trajectory's first message; no two begin alike."""
        choose = random.Random(number)
        return f"{number}: " + " ".join(choose.choices(_WORDS, k=self.prompt_words))

    def lengths(self, number: int) -> list[int]:
        """Return the number of tokens of each of its turns."""
        choose = random.Random(-number - 1)
        most = 1.0 + self.spread
        return [round(self.num_sampled * choose.uniform(2 - most, most)) for _ in range(self.num_turns)]

    def tools(self, number: int) -> list[tuple[float, str]]:
        """Return the seconds and the answer of the tool after each of its turns."""
        choose = random.Random(f"tools of {number}")
        answer = " ".join(choose.choices(_WORDS, k=self.answer_words)) or ANSWER
        rate = 1 / self.mean_pause_s if self.mean_pause_s else math.inf
        return [(choose.expovariate(rate), answer) for _ in range(self.num_turns)]

    def tasks(self) -> list[RolloutTask]:
        """Return all trajectories, as tasks of the loop `Turns`."""
        limits = Limits(
            max_turns=self.num_turns + 1,
            max_tokens_per_turn=ROOM_TOKENS,
            max_sampled_tokens=ROOM_TOKENS,
            timeout_s=900.0,
        )
        return [
            RolloutTask(
                f"t{number}",
                (Message("user", self.text(number)),),
                tools=("calculator",) if self.has_tools else (),
                loop=LOOP,
                reference={
                    "lengths": self.lengths(number),
                    "tools": [list(one) for one in self.tools(number)],
                    "until": min(self.until, 1e12),
                },
                limits=limits,
            )
            for number in range(self.num_trajectories)
        ]


class Turns:
    """A loop with turns of given lengths, whose tool answers at once. It records its times as metrics.

    A turn's time outside the engine is from its start to the start of the next turn, without the engine's time.
    """

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        assert isinstance(task.reference, dict)
        lengths, until = task.reference["lengths"], task.reference["until"]
        times: dict[str, float] = {}
        for number, length in enumerate(lengths):
            began_at, before_s = time.perf_counter(), ctx.engine_s
            if began_at >= until:
                break
            reply = await ctx.sample(max_tokens=length)
            pause_s, answer = task.reference["tools"][number]
            if number < len(lengths) - 1 and task.tools:
                await ctx.run_tools(reply.calls or [_CALL])
            elif number < len(lengths) - 1:
                ctx.observe(Message("user", answer))
            took_s = time.perf_counter() - began_at
            times |= {f"began_at.{number}": began_at, f"turn_s.{number}": took_s}
            times[f"outside_s.{number}"] = took_s - (ctx.engine_s - before_s)
            if pause_s:
                await asyncio.sleep(pause_s)
        ctx.set_metrics(**times)


def turns_of(record: Trajectory) -> list[Turn]:
    """Return the turns that `Turns` recorded."""
    metrics, found = record.metrics, []
    for number, turn in enumerate(record.path.turns if "began_at.0" in metrics else ()):
        began_at = metrics[f"began_at.{number}"]
        ended_at = began_at + metrics[f"turn_s.{number}"]
        found.append(Turn(began_at, ended_at, turn.end - turn.start, metrics[f"outside_s.{number}"], number))
    return found


@dataclass(slots=True)
class ChatLoad:
    """Measurements of the endpoint's agents."""

    turns: list[Turn] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)  # until a stream's first piece
    open_s: list[float] = field(default_factory=list)
    finish_s: list[float] = field(default_factory=list)
    finished_at: list[float] = field(default_factory=list)  # end times of agents that ran all their turns
    num_chunks: int = 0
    num_refused: int = 0  # calls that were repeated after a 503

    def add(self, other: ChatLoad) -> None:
        """Add the measurements of another process."""
        for name in ("turns", "first_s", "open_s", "finish_s", "finished_at"):
            getattr(self, name).extend(getattr(other, name))
        self.num_chunks += other.num_chunks
        self.num_refused += other.num_refused


class ChatAgent:
    """One session, its conversation, and its connection to the process that owns the session."""

    def __init__(self, session: AgentSession, load: ChatLoad, *, is_streamed: bool, has_tools: bool) -> None:
        where = urlsplit(session.base_url)
        assert where.hostname is not None
        assert where.port is not None
        self._address = where.hostname, where.port
        self._head = "\r\n".join(
            (
                f"POST {where.path}/chat/completions HTTP/1.1",
                f"host: {where.netloc}",
                "content-type: application/json",
                f"authorization: Bearer {session.api_key}",
            )
        )
        self._load = load
        self._is_streamed = is_streamed
        self._tools = [calculator.spec.definition()] if has_tools else None
        self._connection = Connection()
        self._messages: list[dict[str, object]] = []

    async def talk(self, workload: Workload, number: int) -> None:
        """Run the conversation of a trajectory. No turn starts after the load's end."""
        await asyncio.get_running_loop().create_connection(lambda: self._connection, *self._address)
        lengths, tools, said = workload.lengths(number), workload.tools(number), workload.text(number)
        try:
            for length, (pause_s, answer) in zip(lengths, tools, strict=True):
                if time.perf_counter() >= workload.until:
                    return
                self._messages.append({"role": "user", "content": said})
                self._messages.append({"role": "assistant", "content": await self._turn(length)})
                said = answer
                if pause_s:
                    await asyncio.sleep(pause_s)
            self._load.finished_at.append(time.perf_counter())
        finally:
            self._connection.close()

    async def _turn(self, length: int) -> str:
        body: dict[str, object] = {"model": "default", "messages": self._messages, "max_tokens": length}
        body |= {"ignore_eos": True}
        if self._tools:
            body["tools"] = self._tools
        if self._is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = orjson.dumps(body)
        began_at = time.perf_counter()
        request = f"{self._head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        head, answer = await self._connection.ask(request)
        while head.startswith(b"HTTP/1.1 503 "):  # no capacity before the deadline: the SDKs retry too
            self._load.num_refused += 1
            await asyncio.sleep(1.0)
            head, answer = await self._connection.ask(request)
        ended_at = time.perf_counter()
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"a call was refused: {answer[:500]!r}")
        if self._is_streamed:
            self._load.first_s.append(self._connection.first_body_at - began_at)
            text, num_tokens = self._read_stream(answer)
        else:
            document = orjson.loads(answer)
            num_tokens = document["usage"]["completion_tokens"]
            text = document["choices"][0]["message"]["content"] or ""
        self._load.turns.append(Turn(began_at, ended_at, num_tokens, number=len(self._messages) // 2))
        return text

    def _read_stream(self, answer: bytes) -> tuple[str, int]:
        pieces: list[str] = []
        num_tokens = 0
        for line in answer.split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            document = orjson.loads(line[6:])
            if "error" in document:
                raise RuntimeError(f"a stream failed: {line[:500]!r}")
            self._load.num_chunks += 1
            num_tokens += (document.get("usage") or {}).get("completion_tokens", 0)
            pieces += (choice["delta"].get("content") or "" for choice in document["choices"])
        return "".join(pieces), num_tokens


async def chat(url: str, workload: Workload, numbers: range, num_at_once: int, *, is_streamed: bool) -> ChatLoad:
    """Run agents for these trajectories, each in its own session, at most `num_at_once` concurrently."""
    load, seats = ChatLoad(), asyncio.Semaphore(num_at_once)
    async with RolloutClient(url) as client:

        async def one(number: int) -> None:
            async with seats:
                begun_at = time.perf_counter()
                if begun_at >= workload.until:
                    return
                session = client.session(session_id=f"chat-{is_streamed:d}-{time.time_ns():x}-{number}")
                async with session:
                    load.open_s.append(time.perf_counter() - begun_at)
                    agent = ChatAgent(session, load, is_streamed=is_streamed, has_tools=workload.has_tools)
                    await agent.talk(workload, number)
                    begun_at = time.perf_counter()
                    await session.finish()
                    load.finish_s.append(time.perf_counter() - begun_at)

        tune_interpreter()
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))
    return load


def sessions(url: str, workload: Workload, numbers: range, num_at_once: int, *, is_streamed: bool) -> ChatLoad:
    """Run `chat` in a separate process."""
    return uvloop.run(chat(url, workload, numbers, num_at_once, is_streamed=is_streamed))


async def chat_from_processes(
    url: str,
    num_processes: int,
    talk: Callable[[str, Workload, range, int], ChatLoad],
    on_ready: Callable[[], Workload],
) -> ChatLoad:
    """Run `talk` in `num_processes` processes, each with its share of the trajectories and of the concurrency.

    `on_ready` is called before the first call, when all processes are up, and returns the load to run.
    """
    whole, loop = ChatLoad(), asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=num_processes, mp_context=spawn) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, time.sleep, 0.5) for _ in range(num_processes)))
        workload = on_ready()
        shares = [range(start, workload.num_trajectories, num_processes) for start in range(num_processes)]
        num_at_once = -(-workload.num_at_once // num_processes)
        calls = (loop.run_in_executor(pool, talk, url, workload, numbers, num_at_once) for numbers in shares)
        for load in await asyncio.gather(*calls):
            whole.add(load)
    return whole


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """Tokens of the service's prompts: the common prefix, a trajectory's own part, and a tool's answer."""

    num_shared: int
    num_own: int
    num_observed: int

    @classmethod
    def of(cls, records: Sequence[Trajectory]) -> PromptSizes:
        """Return the sizes in the given records (two or more)."""
        one, other = (record.path for record in records[:2])
        pairs = zip(one.prompt_ids.tolist(), other.prompt_ids.tolist(), strict=False)
        num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        observed = [later.start - turn.end for turn, later in itertools.pairwise(one.turns)]
        num_observed = round(statistics.mean(observed)) if observed else 0
        return cls(num_shared, len(one.prompt_ids) - num_shared, num_observed)
