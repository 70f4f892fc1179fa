"""The run's directory: its secret outlives a deployment, and nobody else may read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentloop_servers.config import new_run_dir, run_secret
from agentloop_servers.http.auth import SessionKeys


def test_the_keys_of_sessions_are_good_after_another_deployment(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    key = SessionKeys(run_secret(folder)).key_of("s")
    assert SessionKeys(run_secret(folder)).session_of(key) == "s"
    assert SessionKeys(run_secret(tmp_path / "other")).session_of(key) is None


def test_the_secret_is_one_and_its_owners(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: run_secret(tmp_path), range(64)))
    assert len(found) == 1
    assert len(found.pop()) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_two_runs_have_two_directories(tmp_path: Path) -> None:
    assert new_run_dir(tmp_path) != new_run_dir(tmp_path)
