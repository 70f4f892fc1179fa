"""The log of open calls: the entries that a reader finds after a crash at any point, and refused files."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from agentloop.errors import InvariantBroken, ServiceUnavailable, StorageFull
from agentloop.trajectory.node import CallRecord, ModelCallState
from agentloop_servers.endpoint.open_calls_log import ROTATE_BYTES, OpenCall, OpenCallsLog, read_open_calls
from tests.support.records.turns import make_call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.open-calls"


@pytest.fixture
def log(path: Path) -> Iterator[OpenCallsLog]:
    made = OpenCallsLog(path)
    made.open()
    yield made
    made.close()
    made.close()


def numbers(path: Path) -> list[int]:
    return [opened.number for opened in read_open_calls(path)]


def test_what_has_begun_is_there_at_once_and_until_it_ends(path: Path, log: OpenCallsLog) -> None:
    assert read_open_calls(path) == []
    one, two = OpenCall(7, "s", make_call("one")), OpenCall(3, "other", make_call("two"))
    for opened in (one, two):
        log.add(opened.number, opened.session_id, opened.call)
    assert read_open_calls(path) == [two, one]
    assert log.of_call("s", "one") == one
    assert log.of_call("s", "two") is None
    assert log.of_session("other") == [two]
    log.remove("s", "one")
    log.remove("s", "one")
    log.remove("unknown", "one")
    assert read_open_calls(path) == [two]
    assert log.of_session("s") == []
    for number, call_id in enumerate("abc", 10):
        log.add(number, "s", make_call(call_id))
    assert [opened.number for opened in log.of_session("s")] == [10, 11, 12]
    log.remove_all("s")
    assert read_open_calls(path) == [two]
    assert [log.of_call("s", call_id) for call_id in "abc"] == [None] * 3


def test_a_process_that_lingers_does_not_write_into_the_next_ones_file(path: Path, log: OpenCallsLog) -> None:
    log.add(1, "s", make_call("a"))
    again = OpenCallsLog(path)
    again.open()
    log.add(2, "s", make_call("b"))
    assert read_open_calls(path) == []
    again.add(3, "s", make_call("c"))
    assert numbers(path) == [3]
    again.close()


def test_the_file_is_made_anew_when_most_of_its_calls_have_ended(path: Path, log: OpenCallsLog) -> None:
    random = Random(1)
    held: dict[int, tuple[str, CallRecord]] = {}
    sizes = [0]
    for number in range(10_000):
        if held and (len(held) == 300 or random.random() < 0.5):
            session_id, call = held.pop(random.choice(list(held)))
            log.remove(session_id, call.call_id)
        else:
            session_id = "s" * random.randint(1, 128)
            call = replace(make_call(f"{number}"), digest=random.randbytes(random.randint(0, 32)))
            held[number] = session_id, call
            log.add(number, session_id, call)
        if number % 100 == 0:
            assert read_open_calls(path) == [OpenCall(n, *held[n]) for n in sorted(held)]
            sizes.append(path.stat().st_size)
    assert any(later < earlier for earlier, later in itertools.pairwise(sizes))
    assert max(sizes) < 1.5 * ROTATE_BYTES
    assert list(path.parent.iterdir()) == [path]


def test_many_open_calls_stay_in_the_file(path: Path, log: OpenCallsLog) -> None:
    for number in range(10_000):
        log.add(number, f"s{number % 7}", make_call(f"c{number}"))
    assert numbers(path) == list(range(10_000))
    assert path.stat().st_size > 2 * ROTATE_BYTES
    for number in range(0, 10_000, 2):
        log.remove(f"s{number % 7}", f"c{number}")
    assert numbers(path) == list(range(1, 10_000, 2))


def test_a_file_that_cannot_be_made_anew_is_gone_on_with(
    path: Path, log: OpenCallsLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    inode = path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        for number in range(5000):
            log.add(number, "s", make_call(f"c{number}"))
            log.remove("s", f"c{number}")
        log.add(5000, "s", make_call("last"))
    assert path.stat().st_size > ROTATE_BYTES
    assert path.stat().st_ino == inode
    assert numbers(path) == [5000]
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_refuses_and_keeps_nothing(
    path: Path, log: OpenCallsLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def short(fd: int, data: bytes) -> int:
        return write(fd, data[:-10])

    for number in range(10):
        log.add(number, "s", make_call(f"c{number}"))
    for fails in (full, short):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fails)
            with pytest.raises(StorageFull, match="cannot be logged as open") as raised:
                log.add(1000, "late", make_call("late"))
            assert raised.value.retryable
            assert log.of_session("late") == []
            assert numbers(path) == list(range(10))
    log.add(1001, "late", make_call("late"))
    log.add(1002, "s", make_call("more"))
    assert numbers(path) == [*range(10), 1001, 1002]


def test_any_id_is_kept_and_none_twice(path: Path, log: OpenCallsLog) -> None:
    longest = CallRecord("c\n" * 64, b"\xff" * 32, 2**62, ModelCallState.OPEN)
    log.add(2**62, "\u2713 " * 128, longest)
    with pytest.raises(InvariantBroken):
        log.add(1, "\u2713 " * 128, longest)
    whole = [OpenCall(2**62, "\u2713 " * 128, longest)]
    assert read_open_calls(path) == whole
    assert log.of_session("\u2713 " * 128) == whole


def test_a_file_that_is_closed_or_cannot_be_made(path: Path, log: OpenCallsLog) -> None:
    log.add(1, "s", make_call("c"))
    log.close()
    with pytest.raises(ServiceUnavailable):
        log.add(2, "s", make_call("late"))
    log.remove("s", "c")
    assert numbers(path) == [1]
    with pytest.raises(ServiceUnavailable):
        OpenCallsLog(path / "no" / "folder").open()
    assert read_open_calls(path.with_name("none")) == []


def test_a_damaged_line_and_a_last_one_that_was_cut_off_are_passed_over(path: Path, log: OpenCallsLog) -> None:
    ends = [0]
    for number in range(3):
        log.add(number, "session", make_call(f"call {number}"))
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for at in range(ends[1], ends[2] - 1):
        torn = bytearray(whole)
        torn[at] ^= 0x40
        path.with_name("torn").write_bytes(torn)
        assert numbers(path.with_name("torn")) == [0, 2]
    for at in range(ends[2], ends[3]):
        path.with_name("torn").write_bytes(whole[:at])
        assert numbers(path.with_name("torn")) == [0, 1]


_WRITER = """
import os, sys
from pathlib import Path
from agentloop_servers.endpoint.open_calls_log import OpenCallsLog
from tests.support.records.turns import make_call

log = OpenCallsLog(Path(sys.argv[1]))
log.open()
for number in range(10_000_000):
    log.add(number, "s", make_call(f"call {number}"))
    if number >= 300:
        log.remove("s", f"call {number - 300}")
    if number % 100 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("kill_after", [0, 200, 1700, 5000])
def test_a_killed_process_leaves_whole_lines(path: Path, kill_after: int) -> None:
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
    # Ended calls are absent and no open call is missing; only the end of the last call may be missing.
    assert found == list(range(max(last - 299, 0), last + 1)) or found == list(range(last - 300, last + 1))
