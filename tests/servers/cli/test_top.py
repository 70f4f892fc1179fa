"""`agentloop top`: its picture at two sizes, its keys, and the restored terminal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter
from rich.cells import cell_len

from agentloop.api.coordinator import (
    QueueStatus,
    ReplicaStatus,
    RolloutStatus,
    ServiceStatus,
    StartingReplica,
    UpdateProgress,
)
from agentloop.api.findings import findings
from agentloop.api.flight import Doing, Flight, FlightPage, FlightRow, doing_of
from agentloop.client.client import RolloutClient
from agentloop.types import Limits, Load, Message, RolloutTask
from agentloop_servers.cli.top import Order, Snapshot, View, picture, pressed
from tests.servers.ingress.test_seeing import Waits
from tests.support.service.whole_service import simulated_config, whole_service

COMMAND = (sys.executable, "-m", "agentloop_servers.cli", "top")
SIZES = ((80, 24), (200, 50))
LOOP = f"{Waits.__module__}:Waits"


def snapshot(num_replicas: int = 2, num_flights: int = 60) -> Snapshot:
    replicas = [
        ReplicaStatus(f"vllm-{n:08}", "ready", "vllm", 7, Load(11, 3, 20_000), 14, 0.1, kv_limit_tokens=90_000)
        for n in range(num_replicas)
    ]
    replicas[-1] = replace(replicas[-1], state="quarantined", error="no answer")
    rollout = RolloutStatus("r-0123456789abcdef", 200, 20, num_flights, 120, num_held=5)
    rows = []
    for n in range(num_flights):
        doing, what = ((Doing.DECODE, ""), (Doing.TOOL, "search"), (Doing.REWARD, ""))[n % 3]
        flight = Flight(doing, for_s=n, age_s=300 - n, what=what, turn=n % 7, num_tokens=100 * n, left_s=60.0)
        name = f"r-0123456789abcdef/r-0123456789abcdef-{n:06}/0"
        rows.append(FlightRow(name, flight, "host-1-worker-3", replicas[0].replica_id))
    slow = sorted((row for row in rows if row.flight.doing is not Doing.DECODE), key=lambda row: -row.flight.for_s)
    status = ServiceStatus(
        True,
        False,
        7,
        tuple(replicas),
        4,
        (rollout,),
        (),
        starting=(StartingReplica("vllm-new", 12.0, ""),),
        update=UpdateProgress(8, "staging", 2, age_s=3.0),
        queue=QueueStatus(120, 2, 150_000, 180_000, "no replica has room", 5.0, 4.0),
    )
    page = FlightPage(tuple(rows), (), doing_of(row.flight for row in rows), 9, longest_tools=tuple(slow))
    return Snapshot(status, page, findings(status, page))


def lines_of(seen: Snapshot, size: tuple[int, int], view: View | None) -> list[str]:
    lines = picture(seen, *size, view).plain.split("\n")
    assert all(cell_len(line) <= size[0] for line in lines)
    return lines


@pytest.mark.parametrize("size", SIZES)
def test_every_part_is_seen(size: tuple[int, int]) -> None:
    lines = lines_of(snapshot(), size, View())
    assert len(lines) == size[1]
    text = " ".join("\n".join(lines).split())  # a finding may wrap over several lines
    for part in (
        "ready, weight version 7, 4 worker(s), 9 places free, update to 8 staging 3 s",
        "60 running, 120 queued (5 held), 2 calls wait up to 5 s, KV 150k of 180k, no replica has room 20 decode",
        "20 decode, 20 tool search, 20 reward",
        "20k / 90k",
        "vllm-new starting 12 s",
        "-000000/0 decode",
        "tool search 20 58 s",
        "has waited for its tool search for 58 s",
        "q end s sort",
    ):
        assert part in text
    assert ("host-1-worker-3" in lines[12]) is (size[0] == 200)
    assert len(lines_of(snapshot(), size, None)) <= size[1]


def test_a_long_fleet_leaves_room_and_shows_trouble_first() -> None:
    lines = lines_of(snapshot(40), SIZES[0], View())
    assert [line.split()[:2] for line in lines[5:9]] == [
        ["vllm-new", "starting"],
        ["vllm-00000039", "quarantined"],
        ["vllm-00000000", "ready"],
        ["…", "38"],
    ]
    assert sum("r-0123456789abcdef"[-8:] in line for line in lines) >= 3
    empty = lines_of(snapshot(1, 0), SIZES[0], View())
    assert len(empty) == 24


def test_keys_sort_select_and_open() -> None:
    seen, view = snapshot(), View()
    names = [row.id for row in seen.flight.oldest]
    for key, selected in (("j", names[0]), ("\x1b[B", names[1]), ("k", names[0]), ("\x1b[A", names[0])):
        view = pressed(key, view, seen.flight)
        assert view.selected == selected
    view = pressed("s", view, seen.flight)
    assert view.order is Order.WAIT
    shown = [line for line in lines_of(seen, SIZES[1], View(view.order)) if "0123456789abcdef-" in line]
    assert "-000059/0" in shown[0]
    assert any(line.startswith("> ") and "-000000/0" in line for line in lines_of(seen, SIZES[0], view)), "scrolled"
    opened = pressed("\n", view, seen.flight)
    text = "\n".join(lines_of(seen, SIZES[1], opened))
    assert f"{names[0]}: decode for 0 s on vllm-00000000, turn 0, 0 tokens" in text
    assert pressed("\n", opened, seen.flight) == view
    gone = replace(seen, flight=FlightPage((), (), (), 9))
    assert "has ended" in "\n".join(lines_of(gone, SIZES[1], opened))
    assert "no answer: away" in lines_of(gone, SIZES[0], replace(view, trouble="away"))[0]


@asynccontextmanager
async def waiting_service(run_dir: Path) -> AsyncIterator[tuple[str, str]]:
    """A service with a trajectory that waits in its loop: its URL, and the trajectory's id."""
    task = RolloutTask("t", (Message("user", "Hi"),), loop=LOOP, limits=Limits(timeout_s=100))
    async with whole_service(simulated_config(), run_dir) as url, RolloutClient(url) as client:
        rollout = await client.submit([task])
        async with asyncio.timeout(30):
            while not (page := await client.flight()).oldest or page.oldest[0].flight.doing is not Doing.LOOP:
                await asyncio.sleep(0.1)
        yield url, page.oldest[0].id
        await client.cancel(rollout.rollout_ids[0])


async def test_one_document_or_one_picture(tmp_path: Path) -> None:
    async with waiting_service(tmp_path) as (url, name):
        outputs = []
        for option in ("--json", "--once"):
            process = await asyncio.create_subprocess_exec(
                *COMMAND, option, "--url", url, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
            )
            outputs.append((await process.communicate())[0].decode())
            assert process.returncode == 0
    document = json.loads(outputs[0])
    jsonschema.validate(document, TypeAdapter(Snapshot).json_schema(mode="serialization"))
    assert document["flight"]["oldest"][0]["id"] == name
    assert name[-9:] in outputs[1]
    assert "\x1b" not in outputs[1]


async def test_a_terminal_is_taken_and_given_back(tmp_path: Path) -> None:
    async with waiting_service(tmp_path) as (url, name):
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        before, output = termios.tcgetattr(theirs), bytearray()
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, lambda: output.extend(os.read(ours, 65536)))

        async def seen(part: str) -> None:
            async with asyncio.timeout(60):
                while part.encode() not in output:
                    await asyncio.sleep(0.05)

        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--url", url, env={**os.environ, "TERM": "xterm"}, preexec_fn=lambda: os.login_tty(theirs)
        )
        try:
            await seen("q end   s sort")
            assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO)
            os.write(ours, b"s")
            await seen("for▾")
            os.write(ours, b"j\r")
            await seen(f"{name}: loop for")
            num_drawn = output.count(b"findings")
            await asyncio.sleep(2.5)
            assert output.count(b"findings") == num_drawn, "a line that stays is not written again"
            os.write(ours, b"\x03")
            async with asyncio.timeout(30):
                assert await process.wait() == 130
            await seen("interrupted")
        finally:
            if process.returncode is None:
                process.kill()
            loop.remove_reader(ours)
        assert termios.tcgetattr(theirs) == before
        os.close(ours)
        os.close(theirs)
    taken, shown, given_back = (output.rfind(code) for code in (b"\x1b[?1049h", b"\x1b[?25h", b"\x1b[?1049l"))
    assert 0 <= taken < given_back
    assert output.rfind(b"\x1b[?25l") < shown
