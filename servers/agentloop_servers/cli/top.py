"""`agentloop top`: the state of a running service on a terminal, refreshed every second.

`picture` is a pure function of the service's snapshot and the user's view. Only `_Terminal` writes to the terminal;
it writes the lines that changed.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import termios
import textwrap
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, TypeAlias

import orjson
import typer
from rich.cells import set_cell_size
from rich.console import Console
from rich.control import Control
from rich.segment import Segment, Segments
from rich.text import Text

from agentloop.api.coordinator import ServiceStatus
from agentloop.api.findings import Finding, about
from agentloop.api.flight import Doing, FlightPage, FlightRow
from agentloop.client.client import RolloutClient
from agentloop.errors import AgentLoopError
from agentloop.values import codec
from agentloop_servers.cli.remote import asked, described, in_thousands
from agentloop_servers.cli.terminal import DEFAULT_URL, AdminKey, Url

REFRESH_S = 1.0
NUM_ROWS = 200  # trajectories that are requested
_WIDE = 120  # columns: a wider terminal shows more facts

_KEY = re.compile(r"\x1b\[[A-D]|[\s\S]")
_STEPS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1}

Lines: TypeAlias = list[list[Segment]]

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of the service: the answers of `GET /status`, `/flight` and `/why`, as in `--json`."""

    status: ServiceStatus
    flight: FlightPage
    findings: tuple[Finding, ...]


class Order(StrEnum):
    """The field by which trajectories are sorted, the largest first."""

    AGE = "age_s"
    WAIT = "for_s"
    TURN = "turn"
    TOKENS = "num_tokens"


@dataclass(frozen=True, slots=True)
class View:
    """The user's choices, and the error since the snapshot, if any."""

    order: Order = Order.AGE
    selected: str = ""  # a trajectory's id
    is_open: bool = False  # show the `why` of the selected trajectory instead of the list
    trouble: str = ""


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the state once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state once, as JSON.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Watch a running service: replicas, queue, oldest trajectories, tools and problems."""
    console = Console()
    if not (once or as_json) and console.is_terminal and sys.stdin.isatty():
        asked(url, lambda client: _watch(client, console), admin_key=admin_key, retry_timeout_s=2.0)
        return
    seen = asked(url, _look, admin_key=admin_key, retry_timeout_s=2.0)
    if as_json:
        typer.echo(orjson.dumps(codec.to_builtins(seen)))
    else:
        console.print(picture(seen, console.width, console.height), soft_wrap=True)


def picture(seen: Snapshot, width: int, height: int, view: View | None = None) -> Text:
    """Return the service in at most `height` lines, which are `height` lines with keys if there is a view.

    From 80 columns and 24 lines on it has every part.
    """
    flights, shown = seen.flight, view or View()
    above = [*_service(seen.status, flights, width), *_replicas(seen.status, width, max(2, height // 6))]
    if shown.trouble:
        above.insert(0, Text(f"no answer: {shown.trouble}", "bold red"))
    found = [line for one in seen.findings for line in _sentence(f"{one.text} → {one.action}", width)]
    if len(found) > (most := max(4, height // 4)):
        found[most - 1 :] = [Text("… more: agentloop why")]
    below = [Text("findings".ljust(width), "reverse"), *found]
    left = height - len(above) - len(below) - (view is not None)
    if shown.is_open:
        its = about(shown.selected, flights)
        gone = f"{shown.selected} has ended, or is none of the {NUM_ROWS} oldest any more"
        text = gone if its is None else f"{its.text} → {its.action or 'wait'}"
        middle = [Text("why".ljust(width), "reverse"), *_sentence(text, width)]
    else:
        tools = _tools(flights, width, max(2, height // 8))
        middle = [*_trajectories(flights, shown, width, left - len(tools)), *tools]
    lines = [*above, *middle, *below]
    if view is not None:
        keys = f"q end   s sort   ↑ ↓ select   enter {'back' if view.is_open else 'why it waits'}"
        padding = [Text()] * (height - 1 - len(lines))
        lines = [*lines[: height - 1], *padding, Text(keys, "dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def pressed(key: str, view: View, flights: FlightPage) -> View:
    """Return the view after a key."""
    if key == "s":
        orders = list(Order)
        return replace(view, order=orders[(orders.index(view.order) + 1) % len(orders)])
    names = [row.id for row in _sorted(flights, view.order)]
    if key in _STEPS and names and not view.is_open:
        place = names.index(view.selected) + _STEPS[key] if view.selected in names else 0
        return replace(view, selected=names[min(max(place, 0), len(names) - 1)])
    if key in ("\r", "\n") and (selected := view.selected or "".join(names[:1])):
        return replace(view, selected=selected, is_open=not view.is_open)
    return view


def _service(status: ServiceStatus, flights: FlightPage, width: int) -> Iterator[Text]:
    parts = [described(status), f"{status.num_workers} worker(s), {flights.num_free} places free"]
    if (update := status.update) is not None:
        parts.append(f"update to {update.version} {update.state} {_time(update.age_s)}")
    yield from (Text(line.plain, "bold") for line in _sentence(", ".join(parts), width)[:2])
    queue, rollouts = status.queue, status.rollouts
    held, running = (sum(getattr(one, name) for one in rollouts) for name in ("num_held", "num_running"))
    kv = f"{in_thousands(queue.kv_predicted_tokens)} of {in_thousands(queue.kv_limit_tokens)}"
    longest = f" up to {_time(queue.longest_wait_s)}" if queue.num_waiting else ""
    waiting = f"{queue.num_queued} queued ({held} held), {queue.num_waiting} calls wait{longest}"
    counts = filter(None, (f"{running} running", waiting, f"KV {kv}", queue.reason))
    yield from _sentence(", ".join(counts), width)[:2]
    yield Text(", ".join(f"{num} {name}" for name, num in flights.doing))


def _replicas(status: ServiceStatus, width: int, most: int) -> list[Text]:
    columns = [("replica", 20), ("state", 14), ("version", -7), ("running", -7), ("waiting", -7)]
    rows: list[tuple[str, ...]]
    rows = [(one.replica_id, f"starting {_time(one.waiting_s)}") for one in status.starting]
    for one in sorted(status.replicas, key=lambda one: one.state == "ready"):
        load, version = one.load, "none" if one.weight_version is None else str(one.weight_version)
        kv = f"{in_thousands(load.kv_used_tokens)} / {in_thousands(one.kv_limit_tokens)}"
        hits = "-" if one.kv_hit_rate is None else f"{one.kv_hit_rate:.0%}"
        rows.append((one.replica_id, one.state, version, str(load.num_running), str(load.num_waiting), kv, hits))
    return _table([*columns, ("KV used / limit", -15), ("hits", -4)], rows, width, most)


def _sorted(flights: FlightPage, order: Order) -> list[FlightRow]:
    rows = {row.id: row for row in (*flights.oldest, *flights.longest_tools, *flights.sessions)}
    return sorted(rows.values(), key=lambda row: getattr(row.flight, order), reverse=True)


def _trajectories(flights: FlightPage, view: View, width: int, height: int) -> list[Text]:
    found = _sorted(flights, view.order)
    place = next((place for place, row in enumerate(found) if row.id == view.selected), 0)
    rows = []
    for row in found[max(0, place - height + 2) :][: max(0, height - 1)]:
        flight, mark = row.flight, ">" if row.id == view.selected else ""
        left = "-" if flight.left_s is None else _time(flight.left_s)
        times = (_time(flight.age_s), _time(flight.for_s))
        numbers = (str(flight.turn), in_thousands(flight.num_tokens))
        rows.append((mark, row.id, row.flight.name, *times, *numbers, row.replica, left, row.worker))
    widths = zip(("age", "for", "turn", "tokens"), Order, (-7, -7, -5, -7), strict=True)
    sorted_by = [(f"{name}▾" if by is view.order else name, num) for name, by, num in widths]
    columns = [("", 1), ("trajectory", 0), ("waits for", 15), *sorted_by, ("replica", 20 if width >= _WIDE else 9)]
    wide = [("left", -7), ("worker", 24)] if width >= _WIDE else []
    return _table([*columns, *wide], rows, width, len(rows))


def _tools(flights: FlightPage, width: int, most: int) -> list[Text]:
    """Show how many calls of each tool, of rewards and of loops run, and the oldest of each."""
    longest = {row.flight.name: row for row in reversed(flights.longest_tools)}
    rows = []
    for name, num in flights.doing:
        if name.split()[0] in (Doing.TOOL, Doing.REWARD, Doing.LOOP):
            row = longest.get(name)
            rows.append((name, str(num), *(("", "") if row is None else (_time(row.flight.for_s), row.id))))
    return _table([("tool", 20), ("run", -5), ("longest", -7), ("of", 0)], rows, width, most) if rows else []


def _table(columns: list[tuple[str, int]], rows: Sequence[tuple[str, ...]], width: int, most: int) -> list[Text]:
    """Return a header and as many rows as fit; cells beyond the columns are dropped.

    A column has a title and a width. A negative width aligns to the right; 0 takes the remaining width.
    """
    rest = width - sum(abs(num) + 1 for _, num in columns if num) - 1

    def line(cells: Sequence[str]) -> str:
        return " ".join(_fitted(cell, num or rest) for cell, (_, num) in zip(cells, columns, strict=False))

    shown = rows if len(rows) <= most else rows[: most - 1]
    more = [] if shown is rows else [Text(f"… {len(rows) - len(shown)} more")]
    header = Text(line([name for name, _ in columns]).ljust(width), "reverse")
    return [header, *(Text(line(row)) for row in shown), *more]


def _fitted(cell: str, num: int) -> str:
    if len(cell) > abs(num):
        cell = f"…{cell[1 - abs(num) :]}"  # the end of an id identifies it
    return set_cell_size(cell.rjust(-num) if num < 0 else cell, abs(num))


def _sentence(text: str, width: int) -> list[Text]:
    return [Text(line) for line in textwrap.wrap(text, width)]


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


async def _look(client: RolloutClient) -> Snapshot:
    return Snapshot(await client.status(), await client.flight(NUM_ROWS), await client.why())


@contextmanager
def _taken(console: Console) -> Iterator[asyncio.Queue[str]]:
    """Switch the terminal to full screen, and restore it; yields a queue of pressed keys."""
    before, loop = termios.tcgetattr(sys.stdin), asyncio.get_running_loop()
    keys = asyncio.Queue[str]()  # keys arrive slowly: no bound

    def read() -> None:
        pressed = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
        for key in _KEY.findall(pressed) or ["q"]:  # end of input: the terminal was closed
            keys.put_nowait(key)

    try:
        tty.setcbreak(sys.stdin)
        loop.add_reader(sys.stdin, read)
        with console.screen():
            yield keys
    finally:
        loop.remove_reader(sys.stdin)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _draw(console: Console, seen: Snapshot, view: View, drawn: Lines) -> Lines:
    """Write the lines that differ from the earlier picture, in one write."""
    size = console.size
    lines = console.render_lines(picture(seen, *size, view), console.options.update_dimensions(*size))
    with console:
        # The first picture, or another size.
        if [*map(Segment.get_line_length, drawn)] != [size.width] * size.height:
            drawn = []
            console.control(Control.clear())
        for y, line in enumerate(lines):
            if drawn[y : y + 1] != [line]:
                console.control(Control.move_to(0, y))
                console.print(Segments(line), end="")
    return lines


async def _watch(client: RolloutClient, console: Console) -> None:
    """Show the service until `q` or a signal."""
    seen, view = await _look(client), View()  # an error of the first request ends the command
    with _taken(console) as keys:

        async def follow() -> None:
            nonlocal seen, view
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    seen, trouble = await _look(client), ""
                except AgentLoopError as error:
                    trouble = str(error)
                view = replace(view, trouble=trouble)
                keys.put_nowait("")

        async with asyncio.TaskGroup() as group:
            following, key, drawn = group.create_task(follow()), "", Lines()
            while key != "q":
                view = pressed(key, view, seen.flight)
                drawn = _draw(console, seen, view, drawn)
                key = await keys.get()
            following.cancel()
