"""Agents whose contexts are several times an engine's KV: the service on one GPU, `vllm serve` on the other.

    python -m tests.benchmarks.gpu_pressure --rows plain,streams,loops            # two GPUs; 5 minutes a row
    python -m tests.benchmarks.gpu_pressure --replicas 2 --in-turn --rows plain,plain   # two against two, two GPUs

Both sides get the same load at the same time, each on its own GPUs; with `--in-turn` both sides use all GPUs, and
the load runs on one side after the other. The load is a fixed number of concurrent agents with `--turns` turns, and
tools that take `--pause-s` on average; an agent that ends is replaced by another. `plain` and `streams` are agents
of the chat endpoint in sessions, `loops` are agent loops of the service. `fits` has twice as many plain agents with
a tenth of the context and three turns, which fit into the KV cache, and runs for a quarter of the time.

The agents of `vllm serve` have prompts of the same lengths. They send token ids to `/v1/completions`, so that it
finds every earlier context that is still cached: text would be tokenized again, and might not match. It has the
same engine arguments, and returns no logprobs. With several `vllm serve` processes, agents are assigned to them in
rotation, and each agent sends all its calls to the same one, so that it finds its own contexts.

Figures are of a window of `--window-s` that begins after `--warm-up-s`, and of each third of it. `hits`: cached
prompt tokens as a share of all prompt tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import orjson
import uvloop

from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import free_port, running_service
from tests.benchmarks import report
from tests.benchmarks.endpoint_load import Connection
from tests.benchmarks.gpu_load import ChatLoad, Turn, Window, Workload, chat_from_processes, sessions, turns_of
from tests.benchmarks.gpu_models import model_folder
from tests.benchmarks.gpu_throughput import let_workers_import_loop, quantile, run_loops
from tests.benchmarks.report import say
from tests.benchmarks.shapes import TOKENS_START

ROWS = ("plain", "streams", "loops", "fits")
START_S = 420.0
VOCAB_SIZE = 100_000
SERVICE_HITS = 'agentloop_turn_tokens_total{kind="cached"', 'agentloop_turn_tokens_total{kind="prompt"'
VLLM_HITS = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a trajectory's first prompt, and of each tool's answer, including the chat template's markup."""

    num_prompt: int
    num_observed: int


async def complete(urls: str, workload: Workload, sizes: Sizes, numbers: range, num_at_once: int) -> ChatLoad:
    """Run agents for these trajectories as completions of token ids, at most `num_at_once` concurrently."""
    load, seats = ChatLoad(), asyncio.Semaphore(num_at_once)

    async def turn(url: str, number: int, ids: list[int], length: int) -> list[int]:
        where = urlsplit(url)
        address = where.hostname or "", where.port or 0
        body = {
            "model": "default",
            "prompt": ids,
            "max_tokens": length,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        data = orjson.dumps(body | {"temperature": 1.0})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json"
        began_at = time.perf_counter()
        connection = Connection()  # one per call: uvicorn closes a connection that is idle for 5 seconds
        await asyncio.get_running_loop().create_connection(lambda: connection, *address)
        status, answer = await connection.ask(f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        if not status.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"a call was refused: {answer[:500]!r}")
        connection.close()
        found: list[int] = orjson.loads(answer)["choices"][0]["token_ids"]
        load.turns.append(Turn(began_at, time.perf_counter(), len(found), number=number))
        return found

    async def one(number: int, url: str) -> None:
        choose = random.Random(number)
        async with seats:
            ids = choose.choices(range(TOKENS_START, VOCAB_SIZE), k=sizes.num_prompt)
            turns = zip(workload.lengths(number), workload.tools(number), strict=True)
            for index, (length, (pause_s, _)) in enumerate(turns):
                if time.perf_counter() >= workload.until:
                    break
                ids += await turn(url, index, ids, length)
                ids += choose.choices(range(TOKENS_START, VOCAB_SIZE), k=sizes.num_observed)
                await asyncio.sleep(pause_s)
            else:
                load.finished_at.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for number, url in zip(numbers, itertools.cycle(urls.split()), strict=False):
            group.create_task(one(number, url))
    return load


def completions(sizes: Sizes, urls: str, workload: Workload, numbers: range, num_at_once: int) -> ChatLoad:
    """Run `complete` in a separate process."""
    return uvloop.run(complete(urls, workload, sizes, numbers, num_at_once))


@contextmanager
def vllm_server(options: argparse.Namespace, model: Path, log: Path, gpu: int) -> Iterator[str]:
    """Run `vllm serve` on this GPU; yields its URL at once, before it is ready."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "default", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(options.context), "--max-num-seqs", str(options.seats)]
    command += ["--kv-cache-memory-bytes", str(options.kv_mib << 20), "--block-size", "16"]
    command += [
        "--gpu-memory-utilization",
        str(memory_share(options)),
        "--enable-prefix-caching",
        "--generation-config",
        "vllm",
        "--disable-uvicorn-access-log",
    ]
    with log.open("w") as out:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def memory_share(options: argparse.Namespace) -> float:
    """Return the share of a GPU's memory that an engine may use."""
    return 0.43 if options.in_turn else 0.9


async def wait_until_up(url: str, log: Path) -> None:
    """Wait until the server answers. Raises TimeoutError, and prints the log first."""
    async with httpx.AsyncClient() as client:
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        if (await client.get(f"{url}/health")).status_code == 200:
                            return
                    except httpx.TransportError:
                        await asyncio.sleep(1.0)
        except TimeoutError:
            say(await asyncio.to_thread(log.read_text))
            raise


async def counter(urls: str, name: str) -> float:
    """Return the sum of a counter of these servers' /metrics over its labels."""
    async with httpx.AsyncClient() as client:
        pages = [(await client.get(f"{url}/metrics")).text for url in urls.split()]
    lines = itertools.chain.from_iterable(page.splitlines() for page in pages)
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def hits_within(urls: str, window: Window, names: tuple[str, str]) -> float | None:
    """Return the ratio of two counters' growth within a window: cached prompt tokens to all prompt tokens."""
    seen = []
    for at in (window.begins_at, window.ends_at):
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        seen.append([await counter(urls, name) for name in names])
    hits, queries = (after - before for before, after in zip(*seen, strict=True))
    return hits / queries if queries else None


@dataclass(frozen=True, slots=True)
class Side:
    """Figures of one side in a row's window."""

    row: str
    tokens_per_s: float
    thirds: tuple[float, ...]  # tokens per second in each third of the window
    turn_p50_s: float
    turn_p99_s: float
    first_p50_s: float  # first turns of trajectories, including the wait
    finished_per_min: float
    hits: float | None
    num_refused: int


def side_of(row: str, window: Window, load: ChatLoad, hits: float | None) -> Side:
    """Return the figures of a side's window."""
    within = window.ended_within(load.turns)
    turn_s = [turn.ended_at - turn.began_at for turn in within]
    edges = [window.begins_at + window.seconds * third / 3 for third in range(4)]
    parts = [Window(begin, end) for begin, end in itertools.pairwise(edges)]
    return Side(
        row,
        window.num_tokens(load.turns) / window.seconds,
        tuple(part.num_tokens(load.turns) / part.seconds for part in parts),
        statistics.median(turn_s),
        quantile(turn_s, 0.99),
        statistics.median([turn.ended_at - turn.began_at for turn in within if turn.number == 0] or [0.0]),
        60 * sum(window.begins_at <= at < window.ends_at for at in load.finished_at) / window.seconds,
        hits,
        load.num_refused,
    )


class Bench:
    """The service and the `vllm serve` processes, and the rows that run on both."""

    def __init__(self, options: argparse.Namespace, url: str, vllm_urls: str) -> None:
        self._options = options
        self._url = url
        self._vllm_urls = vllm_urls

    async def run(self, row: str) -> tuple[Side, Side]:
        """Run a row on both sides."""
        options, scale = self._options, 10 if row == "fits" else 1
        load = Workload(
            num_trajectories=60 * options.agents * options.replicas,
            num_at_once=options.agents * options.replicas * (1 if scale == 1 else 2),
            num_turns=options.turns if scale == 1 else 3,
            num_sampled=options.sampled,
            spread=0.37,
            prompt_words=options.prompt_words // scale,
            has_tools=False,
            answer_words=options.answer_words // scale,
            mean_pause_s=options.pause_s,
        )
        sizes = await self._sizes_of(load)
        part = 1 if scale == 1 else 4

        def timed() -> tuple[Workload, Window]:
            begins_at = time.perf_counter() + options.warm_up_s / part
            window = Window(begins_at, begins_at + options.window_s / part)
            return replace(load, until=window.ends_at), window

        if options.in_turn:
            return await self._ours(row, *timed()), await self._theirs(row, *timed(), sizes)
        load, window = timed()
        return await asyncio.gather(self._ours(row, load, window), self._theirs(row, load, window, sizes))

    async def _sizes_of(self, load: Workload) -> Sizes:
        """Return the prompt lengths in the service, so that the other side's prompts have the same lengths."""
        until = time.perf_counter() + 60.0
        small = replace(load, num_trajectories=2, num_at_once=2, num_turns=2, mean_pause_s=0.0, until=until)
        records, _ = await run_loops(self._url, small)
        path = records[0].path
        sizes = Sizes(len(path.prompt_ids), path.turns[1].start - path.turns[0].end)
        say(f"{sizes}")
        return sizes

    async def _ours(self, row: str, load: Workload, window: Window) -> Side:
        hits = asyncio.create_task(hits_within(self._url, window, SERVICE_HITS))
        if row == "loops":
            records, _ = await run_loops(self._url, load)
            turns = [turn for record in records for turn in turns_of(record)]
            ends = [turn.ended_at for turn in turns if turn.number == load.num_turns - 1]
            seen = ChatLoad(turns=turns, finished_at=ends)
        else:
            talk = partial(sessions, is_streamed=row == "streams")
            seen = await chat_from_processes(self._url, self._options.load_processes, talk, lambda: load)
        return side_of(f"{row}, service", window, seen, await hits)

    async def _theirs(self, row: str, load: Workload, window: Window, sizes: Sizes) -> Side:
        hits = asyncio.create_task(hits_within(self._vllm_urls, window, VLLM_HITS))
        talk = partial(completions, sizes)
        seen = await chat_from_processes(self._vllm_urls, self._options.load_processes, talk, lambda: load)
        return side_of(f"{row}, vllm serve", window, seen, await hits)


def tables(found: Sequence[tuple[Side, Side]]) -> dict[str, str]:
    """Return the table of all rows."""
    columns = ["row", "tok/s", "times", "by thirds", "turn p50 s", "p99 s", "first turn p50 s", "finished/min"]
    columns += ["hits %", "503"]
    rows = []
    for ours, theirs in found:
        for side in (ours, theirs):
            ratio = ours.tokens_per_s / theirs.tokens_per_s if side is ours else None
            thirds = ", ".join(f"{value:,.0f}" for value in side.thirds)
            hits = None if side.hits is None else 100 * side.hits
            waits = side.turn_p50_s, side.turn_p99_s, side.first_p50_s
            rows.append(
                (side.row, side.tokens_per_s, ratio, thirds, *waits, side.finished_per_min, hits, side.num_refused)
            )
    return {"": report.table(columns, rows)}


async def measure(options: argparse.Namespace, found: list[tuple[Side, Side]]) -> None:
    """Start both sides, and run the rows."""
    model = model_folder(options.shape, "cuda")
    engine = {
        "kind": "vllm",
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running": options.seats,
        "block_size": 16,
        "max_context_tokens": options.context,
        "kv_cache_mib": options.kv_mib,
        "gpu_memory_utilization": memory_share(options),
    }
    fields = {"model": str(model), "mode": "debug", "port": 0, "engine": engine, "workers": {"capacity": 1024}}
    fields["replicas"] = options.replicas
    config = ServiceConfig.model_validate(fields)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        gpus = range(options.replicas)
        log_folder = options.out.parent if options.out else Path(folder)
        log_folder.mkdir(parents=True, exist_ok=True)
        logs = [log_folder / f"pressure.vllm-{gpu}.log" for gpu in gpus]
        vllm_gpus = gpus if options.in_turn else range(options.replicas, 2 * options.replicas)
        starts = zip(logs, vllm_gpus, strict=True)
        vllm_urls = [servers.enter_context(vllm_server(options, model, log, gpu)) for log, gpu in starts]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        async with running_service(config, Path(folder) / "run") as url:
            for vllm_url, log in zip(vllm_urls, logs, strict=True):
                await wait_until_up(vllm_url, log)
            say("both are up")
            bench = Bench(options, url, " ".join(vllm_urls))
            for row in options.rows:
                found.append(await bench.run(row))
                say(report.table(["side"], [(str(side),) for side in found[-1]]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--rows", default="plain", help=f"of {', '.join(ROWS)}; one may come several times")
    parser.add_argument("--replicas", type=int, default=1, help="engines of each side, each with a GPU")
    parser.add_argument("--in-turn", action="store_true", help="both sides on the same GPUs, one after the other")
    parser.add_argument("--agents", type=int, default=256, help="at once, for each engine of a side")
    parser.add_argument("--seats", type=int, default=512, help="requests that an engine runs at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--sampled", type=int, default=190, help="tokens a turn, in the mean")
    parser.add_argument("--prompt-words", type=int, default=350, help="of a trajectory's first message")
    parser.add_argument("--answer-words", type=int, default=45, help="of a tool's answer")
    parser.add_argument("--pause-s", type=float, default=1.5, help="of a tool, in the mean")
    parser.add_argument("--context", type=int, default=12288)
    parser.add_argument("--kv-mib", type=int, default=46000, help="of each engine's KV cache")
    parser.add_argument("--warm-up-s", type=float, default=120.0)
    parser.add_argument("--window-s", type=float, default=180.0)
    parser.add_argument("--load-processes", type=int, default=3, help="on each side")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Print the table; after a failure, print the rows measured before it."""
    options = parse()
    let_workers_import_loop()
    found: list[tuple[Side, Side]] = []
    try:
        asyncio.run(measure(options, found))
    finally:
        report.finish(f"KV pressure, {options.shape}", tables(found), found, options.out)


if __name__ == "__main__":
    main()
