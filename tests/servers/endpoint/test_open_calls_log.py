"""The file of open calls: what a reader of it finds after whatever moment, and what it refuses."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agentloop.errors import InvariantBroken, ServiceUnavailable
from agentloop.trajectory.node import CallRecord, ModelCallState
from agentloop_servers.endpoint.open_calls_log import NUM_CHUNK_SLOTS, SLOT_BYTES, Intent, Intents, read_intents
from tests.support.turns import make_call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.intents"


@pytest.fixture
def intents(path: Path) -> Iterator[Intents]:
    made = Intents(path)
    made.open()
    yield made
    made.close()
    made.close()


def numbers(path: Path) -> list[int]:
    """Of what a reader finds, all of it undamaged."""
    found, num_damaged = read_intents(path)
    assert num_damaged == 0
    return [intent.number for intent in found]


def test_what_has_begun_is_there_at_once_and_until_it_ends(path: Path, intents: Intents) -> None:
    assert read_intents(path) == ([], 0)
    one, two = Intent(7, "s", make_call("one")), Intent(3, "other", make_call("two"))
    for intent in (one, two):
        intents.begin(intent.number, intent.session_id, intent.call)
    assert read_intents(path) == ([two, one], 0)
    assert intents.of_call("s", "one") == one
    assert intents.of_call("s", "two") is None
    assert intents.of_session("other") == [two]
    intents.end("s", "one")
    intents.end("s", "one")
    intents.end("unknown", "one")
    assert read_intents(path) == ([two], 0)
    assert intents.of_session("s") == []
    for number, call_id in enumerate("abc", 10):
        intents.begin(number, "s", make_call(call_id))
    assert [intent.number for intent in intents.of_session("s")] == [10, 11, 12]
    intents.end_all("s")
    assert read_intents(path) == ([two], 0)
    assert [intents.of_call("s", call_id) for call_id in "abc"] == [None] * 3


def test_opening_clears_what_another_process_left(path: Path, intents: Intents) -> None:
    for number in range(NUM_CHUNK_SLOTS + 1):
        intents.begin(number, "s", make_call(f"c{number}"))
    intents.close()
    assert len(numbers(path)) == NUM_CHUNK_SLOTS + 1
    again = Intents(path)
    again.open()
    assert read_intents(path) == ([], 0)
    assert path.stat().st_size == NUM_CHUNK_SLOTS * SLOT_BYTES
    again.close()


def test_a_process_that_lingers_does_not_write_into_the_next_ones_file(path: Path, intents: Intents) -> None:
    intents.begin(1, "s", make_call("a"))
    again = Intents(path)
    again.open()
    intents.begin(2, "s", make_call("b"))
    assert read_intents(path) == ([], 0)
    again.begin(3, "s", make_call("c"))
    assert numbers(path) == [3]
    again.close()


def test_slots_are_used_again(path: Path, intents: Intents) -> None:
    random = Random(1)
    held: dict[int, tuple[str, CallRecord]] = {}
    for number in range(5000):
        if held and (len(held) == NUM_CHUNK_SLOTS or random.random() < 0.5):
            session_id, call = held.pop(random.choice(list(held)))
            intents.end(session_id, call.call_id)
        else:
            session_id = "s" * random.randint(1, 128)
            call = replace(make_call(f"{number}"), digest=random.randbytes(random.randint(0, 32)))
            held[number] = session_id, call
            intents.begin(number, session_id, call)
        if number % 100 == 0:
            assert read_intents(path) == ([Intent(n, *held[n]) for n in sorted(held)], 0)
    assert path.stat().st_size == NUM_CHUNK_SLOTS * SLOT_BYTES


def test_the_file_grows_and_has_all_of_its_blocks(path: Path, intents: Intents) -> None:
    num_calls = 3 * NUM_CHUNK_SLOTS + 1
    for number in range(num_calls):
        intents.begin(number, f"s{number % 7}", make_call(f"c{number}"))
    assert numbers(path) == list(range(num_calls))
    status = path.stat()
    assert status.st_size == 4 * NUM_CHUNK_SLOTS * SLOT_BYTES
    assert status.st_blocks * 512 >= status.st_size  # a hole would be a SIGBUS on a full disk
    for number in range(0, num_calls, 2):
        intents.end(f"s{number % 7}", f"c{number}")
    assert numbers(path) == list(range(1, num_calls, 2))


def test_a_full_disk_refuses_and_keeps_nothing(
    path: Path, intents: Intents, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in range(NUM_CHUNK_SLOTS):
        intents.begin(number, "s", make_call(f"c{number}"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ServiceUnavailable, match="No space left") as raised:
            intents.begin(1000, "late", make_call("late"))
        assert raised.value.retryable
        assert intents.of_session("late") == []
        assert numbers(path) == list(range(NUM_CHUNK_SLOTS))
        intents.end("s", "c5")
        intents.begin(1001, "late", make_call("late"))
    intents.begin(1002, "s", make_call("more"))
    assert numbers(path)[-2:] == [1001, 1002]


def test_what_cannot_be_kept_is_refused(path: Path, intents: Intents) -> None:
    longest = CallRecord("c" * 64, b"\xff" * 32, 2**62, ModelCallState.OPEN)
    intents.begin(2**62, "s" * 128, longest)
    whole = [Intent(2**62, "s" * 128, longest)]
    for session_id, call in (
        ("s" * 129, make_call("c")),
        ("\u2713" * 43, make_call("c")),
        ("s", make_call("c" * 65)),
        ("s", replace(make_call("c"), digest=b"d" * 33)),
        ("s" * 128, longest),  # twice
    ):
        with pytest.raises(InvariantBroken):
            intents.begin(1, session_id, call)
    assert read_intents(path) == (whole, 0)
    assert intents.of_session("s" * 128) == whole
    assert intents.of_session("s") == []


def test_a_file_that_is_closed_or_cannot_be_made(path: Path, intents: Intents) -> None:
    intents.begin(1, "s", make_call("c"))
    intents.close()
    with pytest.raises(ServiceUnavailable):
        intents.begin(2, "s", make_call("late"))
    intents.end("s", "c")
    assert numbers(path) == [1]
    with pytest.raises(ServiceUnavailable):
        Intents(path / "no" / "folder").open()
    assert read_intents(path.with_name("none")) == ([], 0)


def test_a_slot_without_its_mark_is_empty_and_a_damaged_one_is_counted(path: Path, intents: Intents) -> None:
    for number in range(3):
        intents.begin(number, "session", make_call(f"call {number}"))
    whole = path.read_bytes()
    num_written = len(whole[SLOT_BYTES : 2 * SLOT_BYTES - 1].rstrip(b"\0"))
    assert num_written > 40
    for at in range(num_written):
        torn = bytearray(whole)
        torn[SLOT_BYTES + at] ^= 0x40
        path.with_name("torn").write_bytes(torn)
        found, num_damaged = read_intents(path.with_name("torn"))
        assert ([intent.number for intent in found], num_damaged) == ([0, 2], 1)
        torn[2 * SLOT_BYTES - 1] = 0
        path.with_name("torn").write_bytes(torn)
        assert numbers(path.with_name("torn")) == [0, 2]
    path.with_name("torn").write_bytes(whole[: 2 * SLOT_BYTES + 100])  # not a whole number of slots
    assert numbers(path.with_name("torn")) == [0, 1]


_WRITER = """
import os, sys
from pathlib import Path
from agentloop_servers.endpoint.open_calls_log import Intents
from tests.support.turns import make_call

intents = Intents(Path(sys.argv[1]))
intents.open()
for number in range(10_000_000):
    intents.begin(number, "s", make_call(f"call {number}"))
    if number >= 300:
        intents.end("s", f"call {number - 300}")
    if number % 100 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("kill_after", [0, 200, 1700, 5000])
def test_a_killed_process_leaves_whole_slots(path: Path, kill_after: int) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert writer.stdout is not None
    told = -1
    for line in writer.stdout:
        told = int(line)
        if told >= kill_after:
            writer.send_signal(signal.SIGKILL)
            break
    told = max([told, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait(30)
    writer.stdout.close()
    found = numbers(path)
    last = found[-1]
    assert last >= told
    # Those that had ended are gone, and of the others none is missing: the last one's end may not have come.
    assert found == list(range(max(last - 299, 0), last + 1)) or found == list(range(last - 300, last + 1))
