"""The storage backends of a store: all of them pass the same tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service.store_home import StoreHome


@pytest.fixture(params=["sqlite", "postgres"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHome:
    if request.param == "sqlite":
        return StoreHome(tmp_path / "trajectories.sqlite", tmp_path)
    return StoreHome(request.getfixturevalue("postgres_run"), tmp_path, request.getfixturevalue("postgres_server"))
