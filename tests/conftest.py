"""Settings of all tests."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from agentloop.concurrency import aio
from agentloop.observability.logs import close_logging
from agentloop.plugins import resolve
from agentloop.storage.home import Home
from tests.support.service.postgres_server import PostgresServer

settings.register_profile("shared_cores", deadline=None)  # an example's wall time says nothing of the code
settings.load_profile("shared_cores")

# Logs of tests have neither colours nor the drawn tracebacks that structlog has by default.
PLAIN = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
]
structlog.configure(processors=PLAIN)
LOGGING = structlog.get_config()

gc.disable()


def pytest_collection_finish() -> None:
    """Take what the imports left out of the garbage collector's sight: it is a million objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL server for all tests of this process."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def postgres_run(postgres_server: PostgresServer, tmp_path: Path) -> Home:
    """The home of a run that no other test has."""
    kind = resolve("agentloop_postgres.home:PostgresRun", param="store")
    return kind(postgres_server.url, postgres_server.new_name(), tmp_path)


@pytest.fixture(autouse=True)
def _no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that a test's user code left behind are counted in that test alone."""
    monkeypatch.setattr(aio, "_abandoned_threads", set())


@pytest.fixture(autouse=True)
def _no_logging_of_other_tests() -> Iterator[None]:
    """A command that a test runs in this process configures its logging, or silences it."""
    level = logging.getLogger().level
    yield
    if structlog.get_config() != LOGGING:
        close_logging()
        logging.getLogger().setLevel(level)
        structlog.configure(**LOGGING)
