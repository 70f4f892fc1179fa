"""Settings of all tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

from agentloop import aio
from agentloop.logs import close_logging

settings.register_profile("shared_cores", deadline=None)  # an example's wall time says nothing of the code
settings.load_profile("shared_cores")

# Logs of tests have neither colours nor the drawn tracebacks that structlog has by default.
PLAIN = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]
structlog.configure(processors=PLAIN)

gc.disable()


def pytest_collection_finish() -> None:
    """Take what the imports left out of the garbage collector's sight: it is a million objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a test's user code left behind are counted in that test alone."""
    monkeypatch.setattr(aio, "_abandoned_threads", set())


@pytest.fixture(autouse=True)
def _no_logging_of_other_tests() -> Iterator[None]:
    """A command that a test runs in this process configures its logging."""
    level = logging.getLogger().level
    yield
    if structlog.get_config()["processors"] is not PLAIN:
        close_logging()
        logging.getLogger().setLevel(level)
        structlog.reset_defaults()
        structlog.configure(processors=PLAIN)
