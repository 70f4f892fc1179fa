"""`agentloop check-logprobs`: compares recorded logprobs with those of the checkpoints that sampled the tokens.

Each token is recomputed under the version of its span. Trajectories with several versions are also recomputed
entirely under the oldest and the newest version, as in a trainer that assumes one version per trajectory.
The check also counts the trajectories whose ids change if they are decoded and encoded again. Tokens that a plain
softmax cannot reproduce are excluded and counted by reason (`docs/guides/logprobs.md`). The checkpoints run in
transformers, like in a trainer, or in a vLLM engine with the run's quantization.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, cast

import numpy as np
import numpy.typing as npt
import orjson
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve
from agentloop.storage.home import Home
from agentloop.storage.summary import MIXED, version_key
from agentloop.storage.trajectory_store import TrajectoryReader
from agentloop.types import FloatArray, IntArray, TokenPath, Trajectory, Turn, clip_spans
from agentloop.values import codec
from agentloop.values.mismatch import MAX_K3, Mismatch, mismatch
from agentloop.values.sampling import LogprobsMode, TurnSampling
from agentloop_servers.cli.terminal import clear_errors, store_of

REFERENCE = "agentloop_verify.transformers_reference:ReferenceModel"
ENGINE_REFERENCE = "agentloop_verify.engine_reference:EngineReference"
LINE_INTERVAL_S = 10.0  # between two lines of progress if stderr is not a terminal
MAX_VERSION_ROWS = 8  # rows of the retokenization table; more versions are counted together
_SEED = 0  # seed of the random choice of trajectories

_PLAIN = TurnSampling()

app = typer.Typer()


class Device(StrEnum):
    """Devices of `check-logprobs`; `auto` is CUDA if it is available."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """Data types of `check-logprobs`."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Reference(Protocol):
    """A checkpoint that computes logprobs: `ReferenceModel` or `EngineReference`."""

    def logprobs(
        self, token_ids: npt.ArrayLike, places: npt.ArrayLike, temperatures: npt.ArrayLike
    ) -> npt.NDArray[np.float32]:
        """Return the logprobs of the ids at the positions `places`."""


@dataclass(frozen=True, slots=True)
class References:
    """Loads references."""

    # Checkpoint, quantization, longest sequence.
    load: Callable[[Path, str, int], AbstractContextManager[Reference]]
    by_engine: bool = False  # supports only the softmax at temperature 1


@dataclass(frozen=True, slots=True)
class ComparedPath:
    """The tokens of one path that a plain softmax can reproduce. Arrays except `ids` have one entry per token."""

    ids: IntArray  # prompt and response
    places: IntArray  # positions in `ids`
    recorded: FloatArray  # recorded logprobs
    temperatures: FloatArray
    versions: npt.NDArray[np.int64]  # versions of the spans
    of_trajectory: tuple[int, ...]  # all versions of the trajectory, ascending


@dataclass(frozen=True, slots=True)
class MismatchRow:
    """One row of the table: the version under which tokens were recomputed, and the distance."""

    under: str
    distance: Mismatch


@dataclass(frozen=True, slots=True)
class RetokenizedRow:
    """The trajectories and turns of one version whose ids change if they are decoded and encoded again."""

    version: str
    num_trajectories: int
    num_changed: int
    num_turns: int
    num_turns_changed: int


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """The result of a check."""

    num_trajectories: int  # compared trajectories
    num_stored: int
    rows: tuple[MismatchRow, ...]
    left_out: Mapping[str, int]  # excluded tokens by reason
    retokenized: tuple[RetokenizedRow, ...]  # empty without a tokenizer

    @property
    def k3_by_span(self) -> float | None:
        """The k3-KL of all compared tokens under the versions of their spans; None if no token was compared."""
        return self.rows[0].distance.k3_kl if self.rows else None


def plain_references(device: str, dtype: str) -> References:
    """Return references that run in transformers. Raises InvalidRequest if torch or transformers are missing."""
    make = cast(Callable[..., Reference], resolve(REFERENCE, param="model"))
    return References(lambda folder, *_: nullcontext(make(folder, device=device, dtype=dtype)))


def engine_references(device: str, dtype: str) -> References:
    """Return references that run in vLLM engines. Raises InvalidRequest if vLLM's adapter is not installed."""
    make = cast(Callable[..., AbstractContextManager[Reference]], resolve(ENGINE_REFERENCE, param="engine"))
    return References(partial(make, device=device, dtype=dtype), by_engine=True)


def parse_versions(named: Sequence[str]) -> dict[int, Path]:
    """Parse options of the form `N=DIR`. Raises InvalidRequest."""
    checkpoints: dict[int, Path] = {}
    for option in named:
        number, _, folder = option.partition("=")
        if not number.isdecimal() or not folder:
            raise InvalidRequest(
                f"invalid --model-version {option!r}: expected N=DIR, such as 7=/checkpoints/7",
                param="model_version",
            )
        checkpoints[int(number)] = Path(folder)
    return checkpoints


def versions_in(folder: Path) -> dict[int, Path]:
    """Return the subfolders whose names are version numbers. Raises InvalidRequest if the folder has none."""
    checkpoints = {int(path.name): path for path in folder.glob("*") if path.name.isdecimal()}
    if not checkpoints:
        raise InvalidRequest(f"{folder} has no subfolder whose name is a version number", param="versions")
    return checkpoints


def check_logprobs(
    store: Path | Home,
    model: Path,
    by_version: Mapping[int, Path],
    references: References,
    *,
    max_trajectories: int,
    on_progress: Callable[[str], None] = lambda line: None,
) -> LogprobCheck:
    """Compare a stored run with its checkpoints. `model` is used for the oldest version missing in `by_version`.

    One checkpoint is in memory at a time. If the run has more than `max_trajectories`, a random sample with a fixed
    seed is used. Raises InvalidRequest, CheckpointUnreadable, and the errors of `references.load`.
    """
    for folder in (model, *by_version.values()):
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is not a folder: give a checkpoint's folder", param="model")
    records, num_stored = _chosen(store, max_trajectories)
    unnamed = sorted({version for record in records for version in record.versions} - set(by_version))
    checkpoints = {**dict.fromkeys(unnamed[:1], model), **by_version}
    left_out: Counter[str] = Counter()
    by_engine = references.by_engine
    paths = [path for record in records for path in _compared(record, checkpoints, left_out, by_engine)]
    quantization = _quantization(records) if by_engine else ""
    recomputed: list[dict[int, npt.NDArray[np.float32]]] = [{} for _ in paths]
    for version in sorted({version for path in paths for version in path.of_trajectory}):
        indices = [index for index, path in enumerate(paths) if version in path.of_trajectory]
        num_tokens = max(len(paths[index].ids) for index in indices)
        with references.load(checkpoints[version], quantization, num_tokens) as reference:
            for number, index in enumerate(indices):
                on_progress(f"version {version}: {number} of {len(indices)} paths")
                path = paths[index]
                recomputed[index][version] = reference.logprobs(path.ids, path.places, path.temperatures)
        del reference  # free its memory before the next checkpoint is loaded
    return LogprobCheck(
        num_trajectories=len(records),
        num_stored=num_stored,
        rows=tuple(_rows(paths, recomputed)),
        left_out=dict(sorted((+left_out).items())),
        retokenized=retokenized(records, model),
    )


def _chosen(store: Path | Home, max_trajectories: int) -> tuple[list[Trajectory], int]:
    """Return a random sample of the trajectories with sampled tokens (reservoir sampling), and their number."""
    rng, chosen, num_seen = random.Random(_SEED), list[Trajectory](), 0
    reader = TrajectoryReader(store)
    try:
        for record in reader.trajectories():
            if not record.versions:
                continue
            num_seen += 1
            if len(chosen) < max_trajectories:
                chosen.append(record)
            elif (index := rng.randrange(num_seen)) < max_trajectories:
                chosen[index] = record
    finally:
        reader.close()
    return chosen, num_seen


def _quantization(records: Sequence[Trajectory]) -> str:
    """Return the quantization of the run's engines. Raises InvalidRequest if there are several."""
    quantizations = {turn.quantization for record in records for path in record.paths for turn in path.turns}
    if len(quantizations) > 1:
        raise InvalidRequest(f"the run has turns with several quantizations: {sorted(quantizations)}", param="run")
    return next(iter(quantizations), "")


def _compared(
    record: Trajectory, checkpoints: Mapping[int, Path], left_out: Counter[str], by_engine: bool
) -> Iterator[ComparedPath]:
    """Yield a trajectory's comparable tokens by path, and count all others in `left_out`."""
    missing = [version for version in record.versions if version not in checkpoints]
    reason = (
        "images" if any(path.images for path in record.paths) else "no checkpoint of a version" if missing else ""
    )
    if reason:
        left_out[reason] += record.num_sampled_tokens
        return
    for path in record.paths:
        first_own = max(path.num_shared - len(path.prompt_ids), 0)
        pieces = [piece for turn in path.own_turns for piece in _pieces(path, turn, first_own, left_out, by_engine)]
        if pieces:
            places, recorded, temperatures, versions = (
                np.concatenate(column) for column in zip(*pieces, strict=True)
            )
            ids = np.concatenate([path.prompt_ids, path.response_ids])
            yield ComparedPath(ids, places, recorded, temperatures, versions, record.versions)


def _pieces(
    path: TokenPath, turn: Turn, first_own: int, left_out: Counter[str], by_engine: bool
) -> Iterator[tuple[npt.NDArray[np.generic], ...]]:
    """Yield positions, logprobs, temperatures and versions of the comparable tokens of one turn, span by span."""
    sampling = turn.sampling or _PLAIN
    logprobs, temperature, start = path.logprobs, 1.0, max(turn.start, first_own)
    if sampling.logprobs_mode is LogprobsMode.BOTH and path.raw_logprobs is not None:
        logprobs = path.raw_logprobs
    elif sampling.logprobs_mode is LogprobsMode.SAMPLED:
        if reason := _bent(sampling):
            left_out[reason] += turn.end - start
            return
        temperature = sampling.temperature or 1.0  # greedy sampling records the logprob of the softmax at 1
        if by_engine and temperature != 1:
            left_out["temperature, by an engine"] += turn.end - start
            return
        num_constrained = max(turn.start + sampling.num_constrained(turn.end - turn.start) - start, 0)
        left_out["constrained"] += num_constrained
        start += num_constrained
    for span in clip_spans(path.weight_versions, start, turn.end):
        at = np.arange(start + span.start, start + span.end)
        yield (
            at + len(path.prompt_ids),
            logprobs[at],
            np.full(len(at), temperature, np.float32),
            np.full(len(at), span.version, np.int64),
        )


def _bent(sampling: TurnSampling) -> str:
    """Return the reason why a turn's distribution is not the softmax at its temperature; empty if it is."""
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if cuts and sampling.temperature > 0:
        return "truncated (top_p, top_k, min_p)"
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1)
    return "penalties" if any(penalties) else ""


def _rows(
    paths: Sequence[ComparedPath], recomputed: Sequence[Mapping[int, npt.NDArray[np.float32]]]
) -> Iterator[MismatchRow]:
    """Yield the rows of the table: all tokens by span, then those of mixed trajectories in three ways."""
    mixed = [index for index, path in enumerate(paths) if len(path.of_trajectory) > 1]
    lines: list[tuple[str, Sequence[int], Callable[[ComparedPath], npt.NDArray[np.int64]]]] = [
        ("span, all", range(len(paths)), lambda path: path.versions)
    ]
    if mixed:
        lines += [
            ("span, mixed", mixed, lambda path: path.versions),
            (
                "first, mixed",
                mixed,
                lambda path: np.full_like(path.versions, path.of_trajectory[0]),
            ),
            (
                "last, mixed",
                mixed,
                lambda path: np.full_like(path.versions, path.of_trajectory[-1]),
            ),
        ]
    for under, chosen, version_of in lines:
        recorded = [paths[index].recorded for index in chosen]
        reference = [_under(version_of(paths[index]), recomputed[index]) for index in chosen]
        if recorded:
            yield MismatchRow(under, mismatch(np.concatenate(recorded), np.concatenate(reference)))


def _under(
    versions: npt.NDArray[np.int64], recomputed: Mapping[int, npt.NDArray[np.float32]]
) -> npt.NDArray[np.float32]:
    """Return each token's logprob under its version in `versions`."""
    result = np.empty(len(versions), np.float32)
    for version, logprobs in recomputed.items():
        np.copyto(result, logprobs, where=versions == version)
    return result


def retokenized(records: Sequence[Trajectory], model: Path) -> tuple[RetokenizedRow, ...]:
    """Count, by version, the trajectories and turns whose ids change if each turn is decoded and encoded again.

    Control tokens are included in the text. Returns an empty tuple if the folder has no tokenizer.json.
    """
    file = model / "tokenizer.json"
    if not file.is_file():
        return ()
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def is_changed(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return bool(tokenizer.encode(text, add_special_tokens=False).ids != ids)

    rows: dict[str, RetokenizedRow] = {}
    is_many = len({version_key(record) for record in records}) > MAX_VERSION_ROWS
    for record in records:
        turns = [path.response_ids[turn.start : turn.end] for path in record.paths for turn in path.own_turns]
        num_changed = sum(is_changed(ids.tolist()) for ids in turns)
        key = version_key(record)
        for name in ("all", "one version" if is_many and key != MIXED else key):
            row = rows.get(name, RetokenizedRow(name, 0, 0, 0, 0))
            rows[name] = replace(
                row,
                num_trajectories=row.num_trajectories + 1,
                num_changed=row.num_changed + (num_changed > 0),
                num_turns=row.num_turns + len(turns),
                num_turns_changed=row.num_turns_changed + num_changed,
            )
    return tuple(rows[name] for name in sorted(rows, key=lambda name: (name == "all", not name.isdigit(), name)))


def tables(check: LogprobCheck) -> Iterator[Table]:
    """Yield the result as tables for a terminal."""
    names = ("tokens", "mean |diff|", "max", "k3-KL", "ESS", "<0.5", "clipped")
    distances = Table(box=None, pad_edge=False)
    for name in ("version of", *names):
        distances.add_column(name, no_wrap=True)
    for row in check.rows:
        d = row.distance
        numbers = (f"{d.num_tokens:,}", f"{d.mean_abs_diff:.6f}", f"{d.max_abs_diff:.4f}", f"{d.k3_kl:.6f}")
        shares = (f"{d.ess:.4f}", f"{d.share_below_half:.2%}", f"{d.share_outside:.2%}")
        distances.add_row(row.under, *numbers, *shares)
    yield distances
    if check.retokenized:
        changed = Table("decode and encode change ids of", "trajectories", "turns", box=None)
        for line in check.retokenized:
            name = f"version {line.version}" if line.version.isdigit() else line.version
            changed.add_row(
                name,
                _part(line.num_changed, line.num_trajectories),
                _part(line.num_turns_changed, line.num_turns),
            )
        yield changed


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / max(whole, 1):.1%})"


@contextmanager
def _progress(console: Console, now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress: in place on a terminal, else as a line every `LINE_INTERVAL_S`."""
    if console.is_terminal:
        with console.status("loading") as status:
            yield status.update
        return
    shown_at = -math.inf

    def show(line: str) -> None:
        nonlocal shown_at
        if now() - shown_at >= LINE_INTERVAL_S:
            shown_at = now()
            console.print(line, highlight=False)

    yield show


@app.command("check-logprobs")
def command(
    run: Annotated[str, typer.Argument(help="Run directory, run id, or store file.")],
    model: Annotated[
        Path, typer.Option(help="Checkpoint of the run's oldest version that no other option provides.")
    ],
    model_version: Annotated[
        list[str] | None, typer.Option(help="Checkpoint of version N, as N=DIR; may be repeated.")
    ] = None,
    versions: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints whose names are their version numbers.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Device of the computation.")] = Device.AUTO,
    dtype: Annotated[
        Precision, typer.Option(help="Data type of the computation: use your trainer's.")
    ] = Precision.FLOAT32,
    by_engine: Annotated[
        bool, typer.Option("--by-engine", help="Compute with vLLM and the quantization of the run's engine.")
    ] = False,
    trajectories: Annotated[
        int, typer.Option(min=1, help="Maximum number of trajectories, chosen at random.")
    ] = 1000,
    max_k3: Annotated[
        float, typer.Option(min=0.0, help="Exit with status 1 if the k3-KL by span exceeds this value.")
    ] = MAX_K3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Compare a run's recorded logprobs with those of the checkpoints that sampled the tokens."""
    with clear_errors(), _progress(Console(stderr=True)) as show:
        store, named = store_of(run), parse_versions(model_version or [])
        if versions is not None:
            named = {**versions_in(versions), **named}
        references = (engine_references if by_engine else plain_references)(device.value, dtype.value)
        check = check_logprobs(store, model, named, references, max_trajectories=trajectories, on_progress=show)
    if as_json:
        typer.echo(orjson.dumps(codec.to_builtins(check)))
    else:
        console = Console()
        for table in tables(check):
            console.print(table)
        for reason, num_tokens in check.left_out.items():
            console.print(f"left out: {num_tokens:,} tokens, {reason}", highlight=False)
        line = f"{check.num_trajectories:,} of {check.num_stored:,} trajectories, {dtype.value}"
        console.print(line, highlight=False)
    if check.k3_by_span is None or check.k3_by_span > max_k3:
        raise typer.Exit(1)
