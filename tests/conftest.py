"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from agentloop import aio

settings.register_profile("shared_cores", deadline=None)  # an example's wall time says nothing of the code
settings.load_profile("shared_cores")


@pytest.fixture(autouse=True)
def _no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a test's user code left behind are counted in that test alone."""
    monkeypatch.setattr(aio, "_abandoned_threads", set())
