"""`agentloop show`: one record of a run. Commands find and write records of runs here. Needs no service."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import MAX_LISTED, FactsQuery, ListOrder
from agentloop.errors import InvalidRequest
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import STORE_NAME, TrajectoryReader, TrajectoryStore
from agentloop.types import Message, Trajectory, Turn
from agentloop.values import codec
from agentloop_servers.cli.terminal import clear_errors, store_of
from agentloop_servers.config.service import new_run_dir

MAX_NAMED = 10  # shown if a name matches several trajectories
LIST_WIDTH = 116  # lines wrap in a narrower terminal: a narrower table would cut the ids for `show`

app = typer.Typer()


@app.command()
def show(
    trajectory: Annotated[str, typer.Argument(help="A task or group id, GROUP/SAMPLE, or ROLLOUT/GROUP/SAMPLE.")],
    run: Annotated[str, typer.Option(help="A run directory, a run's id, or a store file.")] = "latest",
) -> None:
    """Show one trajectory of a run: its conversation, versions and rewards."""
    with clear_errors():
        found = find_record(store_of(run), trajectory)
    console = Console()
    for line in record_lines(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for message in found.messages:
        show_message(console, message)
    for place, path in enumerate(found.paths):
        name = f"path {place + 1} of {len(found.paths)}"
        console.rule(name if path.split_reason is None else f"{name}, split: {path.split_reason}")
        table = Table("turn", "tokens", "versions", "ended by", "reward", "replica", box=None)
        for number, turn in enumerate(path.turns, start=1):
            spans = [span for span in path.weight_versions if span.start < turn.end and span.end > turn.start]
            versions = ", ".join(f"v{span.version}" for span in spans)
            table.add_row(str(number), *_of_turn(turn, versions))
        console.print(table)


@app.command("list")
def list_records(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")] = "latest",
    order: Annotated[ListOrder, typer.Option(help="The order of the list.")] = ListOrder.NEWEST,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed trajectories.")] = False,
    task: Annotated[str, typer.Option(help="Only trajectories of this task id.")] = "",
    text: Annotated[
        str, typer.Option(help="Only trajectories with this text in the first line of the task or the answer.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED)] = 20,
    cursor: Annotated[str, typer.Option(help="The cursor at the end of the previous page.")] = "",
) -> None:
    """List a run's trajectories: newest, slowest, failed, by reward, task or text."""
    with clear_errors():
        reader = TrajectoryReader(store_of(run))
        try:
            page = reader.list_records(FactsQuery(order, failed, task, text, limit, cursor))
        finally:
            reader.close()
    console, name = Console(), Column("trajectory", no_wrap=True)
    console.width = max(console.width, LIST_WIDTH)
    table = Table("began", name, "seconds", "reward", "turns", "tokens", "end", "answer", box=None)
    for one in page.records:
        began = "-" if one.began_at is None else f"{datetime.fromtimestamp(one.began_at):%m-%d %H:%M:%S}"
        place = f"{one.group_id}/{one.sample_index}"
        if not place.startswith(one.rollout_id):  # several rollouts may have a group with this name
            place = f"{one.rollout_id}/{place}"
        numbers = (f"{one.total_s:.1f}", "-" if one.reward is None else f"{one.reward:g}", str(one.num_turns))
        end = one.stop_reason if one.failure is None else f"{one.stop_reason} ({one.failure})"
        table.add_row(began, place, *numbers, f"{one.num_sampled_tokens:,}", end, Text(one.answer))
    console.print(table)
    if page.totals:
        console.print(f"{sum(total.num_records for total in page.totals):,} records so far", highlight=False)
    if page.cursor:
        console.print(f"more: --cursor {shlex.quote(page.cursor)}", highlight=False, markup=False, soft_wrap=True)


def _of_turn(turn: Turn, versions: str) -> tuple[str, ...]:
    reward = "-" if turn.reward is None else f"{turn.reward:g}"
    return f"{turn.end - turn.start:,}", versions, str(turn.finish_reason), reward, turn.replica_id


def record_names(trajectory: Trajectory) -> Iterator[str]:
    """Yield the names of a trajectory, its unique one first."""
    place = f"{trajectory.group_id}/{trajectory.sample_index}"
    yield f"{trajectory.rollout_id}/{place}"
    yield from (place, f"{trajectory.task_id}/{trajectory.sample_index}", trajectory.group_id, trajectory.task_id)


def find_record(store: Path | Home, name: str) -> Trajectory:
    """Return the trajectory with a name. Raises InvalidRequest for no or several matches."""
    reader, found, others = TrajectoryReader(store), list[Trajectory](), list[str]()
    try:
        for one in reader.trajectories():
            full, *_ = names = tuple(record_names(one))
            if name in names and len(found) < MAX_NAMED:
                found.append(one)
            elif len(others) < MAX_NAMED:
                others.append(full)
    finally:
        reader.close()
    if len(found) == 1:
        return found[0]
    meant = (
        ", ".join(next(record_names(one)) for one in found)
        or f"none; there are {', '.join(others) or 'none at all'}"
    )
    raise InvalidRequest(f"{name!r} means {meant}", param="trajectory")


async def write_run(records: Sequence[Trajectory], out: Path) -> Path:
    """Write records into a new run directory under `out`, and return it. Raises InvalidRequest."""
    run_dir = new_run_dir(out)
    store = TrajectoryStore(run_dir / STORE_NAME)
    try:
        for record in records:
            await store.record(EncodedRecord.of(record))
    finally:
        await store.close()
    return run_dir


def record_lines(trajectory: Trajectory) -> Iterator[str]:
    """Yield the facts of a record as lines."""
    yield f"{next(record_names(trajectory))}, task {trajectory.task_id}"
    versions = ", ".join(f"v{version}" for version in trajectory.versions) or "none"
    whole = "complete" if trajectory.is_complete else "not complete"
    num_tokens = f"{trajectory.num_sampled_tokens:,} tokens sampled"
    yield f"{trajectory.stop_reason}, {whole}, weight versions {versions}, {num_tokens}"
    parts = {**trajectory.components, **trajectory.metrics}
    named = "".join(f", {name} {value:g}" for name, value in parts.items())
    yield f"reward {'none' if trajectory.reward is None else f'{trajectory.reward:g}'}{named}"
    if trajectory.end_reason:
        yield f"the episode ended: {trajectory.end_reason}"
    for trouble in filter(None, (trajectory.error, trajectory.reward_error)):
        yield f"error: {trouble}"


def show_message(console: Console, message: Message) -> None:
    """Print a message under its role."""
    console.rule(" ".join(filter(None, (message.role, message.name))), align="left")
    if message.reasoning:
        console.print(Text(message.reasoning, style="dim italic"), soft_wrap=True)
    if message.content:
        console.print(Text(message.content), soft_wrap=True)
    for call in message.tool_calls:
        arguments = orjson.dumps(codec.to_builtins(call.arguments)).decode()
        console.print(Text(f"{call.name}({arguments}){f'  {call.error}' if call.error else ''}"), soft_wrap=True)
