"""Settings of all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from agentloop import aio
from agentloop.logs import close_logging

settings.register_profile("shared_cores", deadline=None)  # an example's wall time says nothing of the code
settings.load_profile("shared_cores")


@pytest.fixture(autouse=True)
def _no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a test's user code left behind are counted in that test alone."""
    monkeypatch.setattr(aio, "_abandoned_threads", set())


@pytest.fixture(autouse=True)
def _no_logging_of_other_tests() -> Iterator[None]:
    """A command that a test runs in this process configures its logging."""
    level = logging.getLogger().level
    yield
    if structlog.is_configured():
        close_logging()
        logging.getLogger().setLevel(level)
        structlog.reset_defaults()
