"""The Slurm script, with `scontrol` and `srun` replaced by scripts that record their arguments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "servers" / "slurm.sh"
SCONTROL = """#!/bin/bash
[[ $* == "show hostnames node[1-3]" ]] && printf 'node1\\nnode2\\nnode3\\n'
"""
SRUN = """#!/bin/bash
printf '%s\\n' "$RAY_AUTH_MODE/${#RAY_AUTH_TOKEN} ${*//$'\\n'/;}" >> "$SAID"
case "$*" in
  *"ray start"*) exec sleep 60 ;;
  *"python -c"*) exit "$WAITED" ;;
esac
trap 'echo ended >> "$SAID"; exit 7' TERM
echo serving >> "$SAID"
while :; do sleep 0.05; done
"""
KEYS = {"AGENTLOOP_KEY": "user", "AGENTLOOP_ADMIN_KEY": "admin"}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of three nodes."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    said.touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_NODELIST": "node[1-3]", "SAID": str(said), "WAITED": "0", **KEYS}


def said(job: dict[str, str]) -> list[str]:
    return Path(job["SAID"]).read_text().splitlines()


def run(job: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    with Path(f"{job['SAID']}.stderr").open("w") as stderr:
        return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=job, stderr=stderr)


def until_it_serves(job: dict[str, str]) -> list[str]:
    deadline_at = time.monotonic() + 30
    while "serving" not in (lines := said(job)) or sum("ray start" in line for line in lines) < 3:
        assert time.monotonic() < deadline_at, lines
        time.sleep(0.02)
    return lines


def test_it_starts_ray_on_each_node_and_the_service_on_the_first(job):
    script = run(job, "--config", "my.yaml")
    lines = until_it_serves(job)
    script.send_signal(signal.SIGTERM)
    assert script.wait(30) == 7  # the exit status of the service, which received the signal
    assert said(job)[-1] == "ended"
    step = "token/64 --overlap --nodes=1 --ntasks=1 --nodelist="
    no_keys = "env -u AGENTLOOP_KEY -u AGENTLOOP_ADMIN_KEY"
    started = sorted(line for line in lines if "ray start" in line)
    assert started == [
        f"{step}node1 {no_keys} ray start --block --head --port=6379 --include-dashboard=false",
        f"{step}node2 {no_keys} ray start --block --address=node1:6379",
        f"{step}node3 {no_keys} ray start --block --address=node1:6379",
    ]
    waits = next(line for line in lines if "python -c" in line)
    assert waits.startswith(f"{step}node1 python -c ;import time, ray;")
    assert ">= 3:" in waits
    assert f"{step}node1 agentloop serve --address auto --out /tmp/agentloop-runs --config my.yaml" in lines


def test_without_arguments_it_takes_the_shipped_config_and_a_folder_of_the_operators(job):
    script = run({**job, "RUNS": "/local/runs", "RAY_PORT": "7000"})
    lines = until_it_serves(job)
    script.send_signal(signal.SIGTERM)
    script.wait(30)
    served = next(line for line in lines if "agentloop serve" in line)
    assert served.endswith(" agentloop serve --address auto --out /local/runs --config servers/cluster.yaml")
    assert (SCRIPT.parents[1] / "servers" / "cluster.yaml").is_file()
    assert any(line.endswith("--address=node1:7000") for line in lines)


def test_it_ends_ray_where_a_node_does_not_join(job):
    script = run({**job, "WAITED": "1"})
    assert script.wait(30) == 1
    assert not any("agentloop serve" in line for line in said(job))


@pytest.mark.parametrize("missing", sorted(KEYS))
def test_it_asks_for_keys_before_it_starts_anything(job, missing):
    script = run({name: value for name, value in job.items() if name != missing})
    assert script.wait(30) != 0
    assert missing in Path(f"{job['SAID']}.stderr").read_text()
    assert said(job) == []


def test_shellcheck_finds_nothing():
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("needs shellcheck (apt: shellcheck)")
    subprocess.run([shellcheck, SCRIPT], check=True)
