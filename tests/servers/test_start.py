"""Start of a service: signals during the start, a failing or slow Ray, and missing cluster resources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import yaml

from agentloop.errors import InvalidRequest
from agentloop_servers.config.service import ServiceConfig
from agentloop_servers.local import start_ray, stop_ray
from agentloop_servers.processes.checks import check_resources

ROOT = Path(__file__).parents[2]
SIMULATED = ROOT / "servers" / "simulated.yaml"
MARK = "AGENTLOOP_TEST_START"


def processes_of(mark: str) -> dict[int, str]:
    """Return the living processes that have the mark in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # the process has ended
    return found


class Start:
    """`agentloop serve` in a separate process."""

    def __init__(self, folder: Path, **engine: object) -> None:
        document = yaml.safe_load(SIMULATED.read_text())
        document["applications"][0]["args"] |= {"port": 0, "replicas": 1}
        document["applications"][0]["args"]["engine"] |= engine
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        self.mark, self.lines = uuid.uuid4().hex, list[str]()
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "servers", ROOT / "tools")))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentloop_servers.cli", "serve", "--config", str(config), "--out", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, MARK: self.mark},
        )

    def wait_for(self, text: str) -> None:
        """Read output up to a line that contains the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"no line has {text!r}: {''.join(self.lines)}")

    def end(self) -> tuple[int, str]:
        """Return the exit status and all output."""
        output, _ = self.process.communicate(timeout=240)
        self.lines.append(output)
        return self.process.returncode, "".join(self.lines)

    def find(self, program: str) -> int:
        """Wait for the process of the start that runs a program: a binary, or a Python script."""
        deadline_at = time.monotonic() + 60
        while time.monotonic() < deadline_at:
            for pid, line in processes_of(self.mark).items():
                if any(word.endswith(program) for word in line.split()[:3]):
                    return pid
        pytest.fail(f"no process of {program}")

    def assert_nothing_is_left(self) -> None:
        for _ in range(300):
            if not processes_of(self.mark):
                return
            time.sleep(0.1)
        pytest.fail(f"left: {processes_of(self.mark)}")


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    made: list[Start] = []

    def start(**engine: object) -> Start:
        made.append(Start(tmp_path, **engine))
        return made[-1]

    yield start
    for one in made:
        for pid in processes_of(one.mark):
            os.kill(pid, signal.SIGKILL)
        one.process.wait()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line", "later_s", "status", "said"),
    [
        pytest.param(
            *(signal.SIGTERM, "starting Ray", 0.5, 143, "received SIGTERM; all started processes are stopped"),
            marks=pytest.mark.long,
        ),
        (signal.SIGINT, "starting Ray", 0.5, 130, "interrupted; all started processes are stopped"),
        (signal.SIGTERM, "starting the service's", 3.0, 143, "received SIGTERM; all started processes are stopped"),
    ],
)
def test_a_signal_within_a_start_ends_in_our_own_words_with_nothing_left(
    starting: Callable[..., Start], number: int, line: str, later_s: float, status: int, said: str
) -> None:
    start = starting()
    start.wait_for(line)
    time.sleep(later_s)
    start.process.send_signal(number)
    found, output = start.end()
    assert (found, output.strip().splitlines()[-1]) == (status, said)
    assert "Traceback" not in output
    assert "received at time" not in output  # the message of Ray's C++ handlers
    start.assert_nothing_is_left()


@pytest.mark.ray
@pytest.mark.long
def test_a_ray_that_fails_is_started_once_more_in_a_fresh_session(starting: Callable[..., Start]) -> None:
    start = starting()
    start.wait_for("starting Ray")
    os.kill(start.find("/raylet/raylet"), signal.SIGKILL)  # before its node is registered
    start.wait_for("retrying once")
    assert "its raylet exited with status -9" in start.lines[-1]
    start.wait_for("Ingress: 1 starting")  # the status of each process is printed
    start.process.send_signal(signal.SIGTERM)
    status, output = start.end()
    assert status == 143
    assert "Traceback" not in output
    start.assert_nothing_is_left()


@pytest.mark.ray
@pytest.mark.long
def test_agents_of_ray_that_are_slow_do_not_end_a_start(starting: Callable[..., Start]) -> None:
    """They are paused for longer than the 30 s that Ray allows."""
    start = starting()
    start.wait_for("starting Ray")
    agents = [start.find("/runtime_env/agent/main.py"), start.find("/dashboard/agent.py")]
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(45)
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    start.wait_for("ready at")
    start.process.send_signal(signal.SIGTERM)
    status, output = start.end()
    assert (status, "retrying once" in output) == (0, False)


@pytest.mark.ray
@pytest.mark.slow
def test_rays_idle_workers_end_and_no_monitor_scales_the_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pid_of_worker() -> int:  # a local function, so that Ray pickles it by value
        return os.getpid()

    monkeypatch.setenv("RAY_idle_worker_killing_time_threshold_ms", "500")
    start_ray(tmp_path)
    try:
        worker = psutil.Process(ray.get(ray.remote(pid_of_worker).remote()))
        deadline_at = time.monotonic() + 60
        while worker.is_running() and time.monotonic() < deadline_at:
            time.sleep(0.1)
        assert not worker.is_running()
        of_ray = [" ".join(one.cmdline()) for one in psutil.Process().children()]
        assert not [line for line in of_ray if "monitor.py" in line]
    finally:
        stop_ray(is_deployed=False)


@pytest.mark.ray
@pytest.mark.slow
def test_what_the_host_does_not_have_is_refused_before_anything_waits_for_it(
    starting: Callable[..., Start],
) -> None:
    start = starting(num_cpus=1000)
    status, output = start.end()
    assert status == 1
    assert "error: the replicas require 1000 CPUs (simulated 1 x 1000), but the Ray cluster has" in output
    assert "starting the service's processes" not in output
    start.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replicas": 3}, r"require 3 GPUs \(vllm 3 x 1\), but the Ray cluster has 2"),
        ({"engine": {"tensor_parallel_size": 4}}, r"require 4 GPUs \(vllm 1 x 4\), but the Ray cluster has 2"),
        ({"replicas": 2, "engine": {"num_cpus": 6}}, r"require 12 CPUs \(vllm 2 x 6\), but the Ray cluster has 8"),
    ],
)
def test_replicas_that_ask_for_more_than_there_is_are_named(args: dict[str, object], message: str) -> None:
    there = {"CPU": 8.0, "GPU": 2.0}
    config = ServiceConfig.model_validate({"model": "examples/tiny_policy/v0"} | args)
    with pytest.raises(InvalidRequest, match=message):
        check_resources(config, there)
    check_resources(ServiceConfig.model_validate({"model": "examples/tiny_policy/v0", "replicas": 2}), there)
    with pytest.raises(InvalidRequest, match="but the Ray cluster has 0"):
        check_resources(ServiceConfig.model_validate({"model": "examples/tiny_policy/v0"}), {"CPU": 8.0})
