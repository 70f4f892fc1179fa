"""The service's keys are present where they are needed, and hidden from user code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from agentloop_servers.config.service import KeysConfig

ROOT = Path(__file__).parents[3]
HERE = "tests.parts.isolation.looks_for_keys"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("isolation", [pytest.param("none", marks=pytest.mark.long), "process"])
def test_no_process_shows_user_code_a_key(tmp_path: Path, isolation: str) -> None:
    """The run's client uses the keys in its environment, and its workers do not see them."""
    document = yaml.safe_load((ROOT / "servers" / "simulated.yaml").read_text())
    workers = {"isolation": isolation, "allowed_imports": [HERE], "max_processes": 1}
    document["applications"][0]["args"] |= {"replicas": 1, "workers": workers}
    config, tasks, key = tmp_path / "config.yaml", tmp_path / "tasks.jsonl", f"user-{uuid.uuid4().hex}"
    config.write_text(yaml.safe_dump(document))
    task = {"task_id": "t", "messages": [{"role": "user", "content": "?"}], "reward": f"{HERE}:reward"}
    tasks.write_text(json.dumps(task | {"reference": key[::-1], "limits": {"max_tokens_per_turn": 16}}))
    command = [sys.executable, "-m", "agentloop_servers.cli", "rollout", "--config", str(config)]
    command += ["--tasks", str(tasks), "--samples", "1", "--out", str(tmp_path)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "servers", ROOT / "tools")))
    keys = {"AGENTLOOP_KEY": key, "AGENTLOOP_ADMIN_KEY": f"admin-{key}"}
    environment = {**os.environ, "PYTHONPATH": paths, **keys}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = _rows(tmp_path)
    assert (row["reward"], row["reward_error"]) == (0.0, None)


def _rows(out: Path) -> list[dict[str, object]]:
    command = ["export", str((out / "latest").resolve()), "--format", "jsonl", "--out", str(out / "rows.jsonl")]
    program = f"import sys; sys.argv = ['agentloop', *{command!r}]; from agentloop_servers.cli import main; main()"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def test_hidden_keys_are_gone_from_what_the_kernel_shows() -> None:
    key = uuid.uuid4().hex
    program = f"""
from pathlib import Path
from agentloop_servers.config.service import KeysConfig
before = Path("/proc/self/environ").read_bytes()
taken = KeysConfig().hide()
after = Path("/proc/self/environ").read_bytes()
print(taken == {{"AGENTLOOP_KEY": {key!r}}}, b"{key}" in before, b"{key}" in after, b"HOME=" in after)
"""
    environment = {**os.environ, "AGENTLOOP_KEY": key, "HOME": "/tmp"}
    environment.pop("AGENTLOOP_ADMIN_KEY", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", "False", "True"]
    assert KeysConfig(user_key_env="NO_SUCH_KEY", admin_key_env="NO_SUCH_KEY_EITHER").hide() == {}
