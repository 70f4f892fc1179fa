from __future__ import annotations

import io
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
import structlog

from agentloop.observability.logs import close_logging, configure_logging

log = structlog.stdlib.get_logger("agentloop.tests")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_one_json_line_an_event_bound_to_what_it_is_about(tmp_path: Path) -> None:
    configure_logging(tmp_path / "service.log", console=io.StringIO())
    with structlog.contextvars.bound_contextvars(task="t-1", turn=0, replica="r-0", version=0):
        log.info("turn_done", num_tokens=5)
    log.info("after")
    first, second = lines_of(tmp_path / "service.log")
    expected = {"event": "turn_done", "task": "t-1", "turn": 0, "replica": "r-0", "version": 0, "num_tokens": 5}
    assert expected.items() <= first.items()
    assert first["level"] == "info"
    assert first["logger"] == "agentloop.tests"
    assert str(first["timestamp"]).endswith("Z")
    assert "task" not in second


def test_the_console_is_quiet_until_there_is_a_warning(tmp_path: Path) -> None:
    console = io.StringIO()
    configure_logging(tmp_path / "service.log", console=console)
    log.info("fine")
    assert console.getvalue() == ""
    log.warning("bad\nforged line", reason="x\x1b[31m\r\ny")
    assert console.getvalue().count("\n") == 1
    assert "\x1b" not in console.getvalue()


@pytest.mark.parametrize(
    "fields",
    [
        {"authorization": "Bearer sk-secret"},
        {"headers": {"Authorization": "sk-secret", "X-Api-Key": "sk-secret"}},
        {"admin_key": "sk-secret", "api_key": "sk-secret"},
        {"detail": "sent 'Authorization: Bearer sk-secret' twice"},
        {"parts": ["bearer sk-secret"]},
        {"run_secret": "sk-secret", "db_password": "sk-secret"},
    ],
)
def test_secrets_never_reach_the_file(tmp_path: Path, fields: dict[str, object]) -> None:
    configure_logging(tmp_path / "service.log", level="debug", console=io.StringIO())
    log.info("event", **fields)
    text = (tmp_path / "service.log").read_text()
    assert "sk-secret" not in text
    assert "redacted" in text


def test_prompts_and_tool_output_are_left_out_unless_debugging(tmp_path: Path) -> None:
    configure_logging(tmp_path / "a.log", console=io.StringIO())
    log.info("turn", prompt="private words", token_ids=[1, 2, 3], num_tokens=3)
    assert "private" not in (tmp_path / "a.log").read_text()
    assert lines_of(tmp_path / "a.log")[0]["token_ids"] == "[3 omitted]"
    configure_logging(tmp_path / "b.log", level="debug", console=io.StringIO())
    log.debug("turn", prompt="private words")
    assert "private words" in (tmp_path / "b.log").read_text()


def test_standard_library_loggers_take_the_same_way(tmp_path: Path) -> None:
    theirs = logging.getLogger("uvicorn.error")
    noise = io.StringIO()
    theirs.addHandler(logging.StreamHandler(noise))
    configure_logging(tmp_path / "service.log", console=io.StringIO())
    theirs.error("took %s", "Bearer sk-secret")
    [line] = lines_of(tmp_path / "service.log")
    assert line["event"] == "took Bearer [redacted]"
    assert line["level"] == "error"
    assert noise.getvalue() == ""


def test_a_traceback_stays_on_one_line(tmp_path: Path) -> None:
    configure_logging(tmp_path / "service.log", console=io.StringIO())
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        log.exception("failed")
    [line] = lines_of(tmp_path / "service.log")
    assert "ValueError: broken" in str(line["exception"])


def test_long_values_are_cut_with_a_mark(tmp_path: Path) -> None:
    configure_logging(tmp_path / "service.log", console=io.StringIO())
    log.info("event", detail="x" * 100_000)
    [line] = lines_of(tmp_path / "service.log")
    assert len(str(line["detail"])) < 2100
    assert "[100000 characters]" in str(line["detail"])


def test_setting_up_again_replaces_and_closing_lets_go(tmp_path: Path) -> None:
    configure_logging(tmp_path / "a.log", console=io.StringIO())
    configure_logging(tmp_path / "b.log", console=io.StringIO())
    log.info("once")
    assert (tmp_path / "a.log").read_bytes() == b""
    assert len(lines_of(tmp_path / "b.log")) == 1
    close_logging()
    log.info("nowhere")
    assert len(lines_of(tmp_path / "b.log")) == 1


WRITER = """
import itertools
import sys
from pathlib import Path
import structlog
from agentloop.observability.logs import configure_logging
configure_logging(Path(sys.argv[1]))
for number in itertools.count():
    if number >= 300 and not Path(sys.argv[3]).exists():
        break
    structlog.stdlib.get_logger().info("line", writer=sys.argv[2], number=number, padding="x" * 1500)
"""


def test_processes_lose_no_line_while_another_program_rotates_the_file(tmp_path: Path) -> None:
    logs, go_on = tmp_path / "logs", tmp_path / "go_on"
    path = logs / "service.log"
    logs.mkdir()
    go_on.touch()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, str(go_on)]) for name in "abc"]
    for number in range(10):
        while not path.exists() or path.stat().st_size < 50_000:
            assert all(writer.poll() is None for writer in writers)
            time.sleep(0.001)
        path.rename(logs / f"service.log.{number}")
    go_on.unlink()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    files = [*(logs / f"service.log.{number}" for number in range(10)), path]
    lines = [line for file in files for line in lines_of(file)]
    for name in "abc":
        numbers = [line["number"] for line in lines if line["writer"] == name]
        assert numbers == list(range(max(len(numbers), 300)))


def test_a_line_is_dropped_if_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    configure_logging(folder / "service.log")
    shutil.rmtree(folder)
    log.info("dropped")
    folder.mkdir()
    log.info("after")
    assert [line["event"] for line in lines_of(folder / "service.log")] == ["after"]


def test_a_file_that_somebody_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    configure_logging(path)
    log.info("before")
    path.rename(tmp_path / "mine")
    log.info("after")
    assert [line["event"] for line in lines_of(path)] == ["after"]
