"""The chat endpoint's cost in addition to the engine: sessions of many turns, a zero-latency engine, raw clients.

    make bench-endpoint                                         # the tables, in 20 minutes
    make bench-endpoint ARGS="--sessions 1 64 --repeat 5"       # in 2

`in process`: the engine is in the endpoint's event loop, and its simulated steps count as the endpoint's CPU. `over
HTTP`: the engine is behind its data-plane port in another process, as in a service. The endpoint is the app of
`app.py` on its direct port, with its SQLite store on disk, in a separate process; a third process generates the
load. Agents have no pauses: more than one of them saturates the endpoint, and a turn's latency is then mostly time
spent waiting for the other sessions' turns. In the case with the most sessions, one additional agent sends a
message of `--long-chars` in the middle.

`added`: a turn's latency at the client without the engine's own time. Per core: per second of CPU time of the
endpoint's process, including its store thread. `lag`: the delay of a 5 ms timer in its event loop. Figures are
medians over the repeats. Compare ratios within one run, because other load on the host takes its share.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path

from agentloop.concurrency.aio import tune_interpreter
from tests.benchmarks import report
from tests.benchmarks.endpoint_load import Load, open_sessions, talk
from tests.benchmarks.endpoint_processes import EndpointFigures, ask, process, run_endpoint, run_engine

NUM_TURNS = 50
NUM_ALONE = 20  # sessions, one after another, where one runs at a time: fifty turns are too few to time
WARM_UP_TURNS = 20
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    is_remote: bool  # the engine is remote
    num_sessions: int  # concurrent sessions
    num_turns: int
    long_chars: int

    @property
    def num_rounds(self) -> int:
        """Return the number of consecutive rounds for this number of sessions."""
        return NUM_ALONE if self.num_sessions == 1 else 1

    @property
    def name(self) -> str:
        engine = "over HTTP" if self.is_remote else "in process"
        long = f" + {self.long_chars // 1000} KB message" if self.long_chars else ""
        return f"{engine}, {self.num_sessions:,} x {self.num_turns}{long}"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's measurements, or the medians of several."""

    turn_p50_ms: float
    added_p50_ms: float
    added_p99_ms: float
    turns_per_s: float
    turns_per_core_s: float
    cpu_ms_per_turn: float
    lag_p99_ms: float
    lag_max_ms: float
    long_s: float | None
    rss_kib_per_session: float
    counted_kib_per_session: float


COLUMNS = {
    "turn p50 ms": "turn_p50_ms",
    "added p50 ms": "added_p50_ms",
    "added p99 ms": "added_p99_ms",
    "turns/s": "turns_per_s",
    "turns/s per core": "turns_per_core_s",
    "CPU ms/turn": "cpu_ms_per_turn",
    "lag p99 ms": "lag_p99_ms",
    "lag max ms": "lag_max_ms",
    "long message s": "long_s",
    "RSS KiB/session": "rss_kib_per_session",
    "counted KiB/session": "counted_kib_per_session",
}


def measure(case: Case, folder: Path) -> Figures:
    """Run a case once, in new processes."""
    with ExitStack() as closing:
        engine_pipe, engine_url = None, None
        if case.is_remote:
            engine_pipe, engine_url = closing.enter_context(process(run_engine))
        pipe, url = closing.enter_context(process(run_endpoint, folder, engine_url))
        load, found = asyncio.run(_run(url, pipe, case))
        engine_s = found.engine_s if engine_pipe is None else ask(engine_pipe, "read")
    return _figures(case, load, found, engine_s)


async def _run(url: str, pipe: Connection, case: Case) -> tuple[Load, EndpointFigures]:
    async with asyncio.timeout(TIMEOUT_S):
        await talk(await open_sessions(url, 1, "warm-up"), WARM_UP_TURNS, Load())
        ask(pipe, "mark")
        agents = await open_sessions(url, case.num_sessions * case.num_rounds, "agent")
        ask(pipe, "start")
        tune_interpreter()
        load = Load()
        for start in range(0, len(agents), case.num_sessions):
            await talk(agents[start : start + case.num_sessions], case.num_turns, load, case.long_chars)
        return load, ask(pipe, "read")


def _figures(case: Case, load: Load, found: EndpointFigures, engine_s: dict[str, float]) -> Figures:
    num_turns = len(load.turn_s)
    num_sessions = case.num_sessions * case.num_rounds
    assert num_turns == num_sessions * case.num_turns, "every agent takes all its turns"
    turns_ms = [seconds * 1000 for seconds in load.turn_s.values()]
    added_ms = [(seconds - engine_s[call_id]) * 1000 for call_id, seconds in load.turn_s.items()]
    return Figures(
        turn_p50_ms=_quantile(turns_ms, 0.5),
        added_p50_ms=_quantile(added_ms, 0.5),
        added_p99_ms=_quantile(added_ms, 0.99),
        turns_per_s=num_turns / load.wall_s,
        turns_per_core_s=num_turns / found.cpu_s,
        cpu_ms_per_turn=found.cpu_s * 1000 / num_turns,
        lag_p99_ms=_quantile(found.lags_ms, 0.99),
        lag_max_ms=max(found.lags_ms),
        long_s=load.long_s,
        rss_kib_per_session=found.rss_bytes / num_sessions / 1024,
        counted_kib_per_session=found.counted_bytes / found.num_sessions / 1024,
    )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _median(runs: list[Figures]) -> Figures:
    columns = ([getattr(run, field.name) for run in runs] for field in fields(Figures))
    return Figures(*(None if None in values else statistics.median(values) for values in columns))


def _cases(options: argparse.Namespace) -> list[Case]:
    cases = []
    for is_remote in (False, True):
        for num_sessions in options.sessions:
            long_chars = options.long_chars if num_sessions == max(options.sessions) else 0
            cases.append(Case(is_remote, num_sessions, options.turns, long_chars))
    return [case for case in cases if options.engine in ("both", "over-http" if case.is_remote else "in-process")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--engine", choices=("both", "in-process", "over-http"), default="both")
    parser.add_argument("--long-chars", type=int, default=900_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures of every run here, as JSON")
    options = parser.parse_args()
    runs: dict[str, list[Figures]] = {}
    for case in [case for case in _cases(options) for _ in range(options.repeat)]:
        with tempfile.TemporaryDirectory() as folder:  # on disk, where the store writes
            runs.setdefault(case.name, []).append(measure(case, Path(folder)))
    rows = [(name, *(getattr(_median(found), field) for field in COLUMNS.values())) for name, found in runs.items()]
    title = f"The chat endpoint beside the engine, median of {options.repeat}"
    report.finish(title, {"Sessions x turns": report.table(("", *COLUMNS), rows)}, runs, options.out)


if __name__ == "__main__":
    main()
