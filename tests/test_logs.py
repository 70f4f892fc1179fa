from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import structlog

from agentloop.observability.logs import LogRotation, close_logging, configure_logging

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
    assert lines_of(tmp_path / "a.log")[0]["token_ids"] == "[3 left out]"
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
import sys
from pathlib import Path
import structlog
from agentloop.observability.logs import LogRotation, configure_logging
configure_logging(Path(sys.argv[1]), rotation=LogRotation(int(sys.argv[3]), 40))
for number in range(300):
    structlog.stdlib.get_logger().info("line", writer=sys.argv[2], number=number, padding="x" * 1500)
"""


def test_several_processes_share_the_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "100000000"]) for name in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    lines = lines_of(path)
    for name in ("a", "b"):
        assert [line["number"] for line in lines if line["writer"] == name] == list(range(300))


def test_several_processes_rotate_one_file_without_losing_a_line(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "50000"]) for name in "abc"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    files = list(tmp_path.iterdir())
    assert 5 <= len(files) <= 41  # the others go on in the old file while one of them renames
    lines = [line for file in files for line in lines_of(file)]
    for name in "abc":
        assert sorted(line["number"] for line in lines if line["writer"] == name) == list(range(300))


def test_the_oldest_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    configure_logging(path, rotation=LogRotation(max_bytes=1000, num_older=2))
    for number in range(50):
        log.info("line", number=number, padding="x" * 300)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["service.log", "service.log.1", "service.log.2"]
    kept = [line["number"] for age in (".2", ".1", "") for line in lines_of(Path(f"{path}{age}"))]
    assert kept == list(range(kept[0], 50))
    configure_logging(path, rotation=LogRotation(max_bytes=1000, num_older=0))
    for number in range(50):
        log.info("line", number=number, padding="x" * 300)
    assert lines_of(path)[-1]["number"] == 49
    assert path.stat().st_size <= 1000


def test_a_file_that_somebody_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    configure_logging(path)
    log.info("before")
    path.rename(tmp_path / "mine")
    log.info("after")
    assert [line["event"] for line in lines_of(path)] == ["after"]
