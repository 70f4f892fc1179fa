"""Defaults of a config follow from its GPUs and the host, and stay the same for the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest
from agentloop_servers.cluster.host import THREADS, prepare_engine_process, usable_cpus
from agentloop_servers.config.service import ServiceConfig, keep_config
from agentloop_servers.processes.settings import processes_for, sized

AS_NOBODY = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); "


def a_config(**fields: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": "m", **fields})


def test_a_service_without_gpus_has_one_of_each(tmp_path: Path) -> None:
    found = sized(a_config(engine={"kind": "simulated"}), tmp_path, num_cpus=64)
    assert (found.num_ingress, found.workers.replicas, found.workers.capacity) == (1, 1, 256)
    assert found.engine.num_seats == 256


@pytest.mark.parametrize(
    ("num_engines", "num_cpus", "num_each"),
    [(1, 16, 4), (1, 8, 1), (2, 32, 8), (8, 32, 4), (8, 128, 16), (8, 16, 1), (1, 2, 1)],
)
def test_more_engines_have_more_processes_as_far_as_there_are_cpus(num_engines, num_cpus, num_each):
    assert processes_for(num_engines, num_cpus) == num_each


def test_seats_and_places_on_gpus(tmp_path: Path) -> None:
    found = sized(a_config(replicas=4), tmp_path, num_cpus=64)
    assert found.engine.num_seats == 512
    assert (found.workers.replicas, found.workers.capacity) == (16, 256)  # twice the slots of four engines
    assert sized(found, tmp_path, num_cpus=2) == found


def test_what_a_config_says_stands(tmp_path: Path) -> None:
    asked = a_config(
        ingress_replicas=3, workers={"replicas": 5, "capacity": 7}, engine={"max_running": 64}, replicas=2
    )
    assert sized(asked, tmp_path, num_cpus=64) == asked


def test_a_run_keeps_its_number_of_ingress_processes(tmp_path: Path) -> None:
    first = sized(a_config(replicas=8), tmp_path, num_cpus=128)
    keep_config(first, tmp_path)
    again = sized(a_config(replicas=2), tmp_path, num_cpus=16)
    assert again.num_ingress == first.num_ingress == 16
    keep_config(again, tmp_path)
    with pytest.raises(InvalidRequest, match="partitioned over 16 ingress processes, not 2"):
        keep_config(a_config(ingress_replicas=2), tmp_path)


def test_the_cpus_of_this_process() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


def prepared(before: str, num_threads: int | None) -> str:
    """Return the settings of a process after its preparation, started at nice 15 like Ray's actors."""
    code = (
        "from agentloop_servers.cluster.host import prepare_engine_process\n"
        f"import os, threading; os.setpriority(os.PRIO_PROCESS, 0, 15); os.environ[{THREADS!r}] = '1'; {before}"
        "threading.Thread(target=lambda: threading.Event().wait(60), daemon=True).start()\n"
        f"prepare_engine_process({num_threads})\n"
        "nice = {os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')}\n"
        f"print(*sorted(nice), os.environ.get({THREADS!r}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take a higher priority")
def test_a_privileged_engine_process_gets_the_usual_priority_in_all_its_threads() -> None:
    assert prepared("", None).splitlines()[-1] == "0 None"
    assert prepared("", 4).splitlines()[-1] == "0 1"  # the config's number came with the environment


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_one_says_that_it_cannot() -> None:
    said = prepared(AS_NOBODY, None)
    assert "engine_has_low_priority" in said
    assert "RAY_worker_niceness=0" in said
    assert said.splitlines()[-1] == "15 None"


def test_one_that_has_it_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "3")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    prepare_engine_process(num_threads=3)
    assert os.environ[THREADS] == "3"
    assert os.getpriority(os.PRIO_PROCESS, 0) <= before
