"""Settings of all tests."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from agentloop.concurrency import aio
from agentloop.engine import canary
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

SHARE_THE_SERVICE = ("tests/servers/test_service.py", "tests/servers/endpoint/test_endpoint_service.py")

gc.disable()


def pytest_collection_finish() -> None:
    """Take what the imports left out of the garbage collector's sight: it is a million objects that stay."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests that share an engine or a service in one process, and those of another file together."""
    if config.getvalue("dist") != "loadgroup":  # xdist 3.8 does not find the marks of groups under pytest 9.2
        return None
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - SGLang's environment has no xdist

    class BySharedProcesses(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            engine = re.search(r"\[(vllm|speculative|sglang)\b", test) if "/contract/" in path else None
            if engine is not None:
                return engine[1]
            return "shared service" if path in SHARE_THE_SERVICE else path

    return BySharedProcesses(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze the objects that a file leaves: full collections over them took a fifth of a lane's CPU time."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


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
def _patient_canary_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host a step of a real engine may take longer than a canary check's shortest deadline of 10 s."""
    if request.node.get_closest_marker("engine") is not None:
        monkeypatch.setattr(canary, "_MIN_DEADLINE_S", canary._MAX_DEADLINE_S)


@pytest.fixture(autouse=True)
def _no_logging_of_other_tests() -> Iterator[None]:
    """A command that a test runs in this process configures its logging, or silences it."""
    level = logging.getLogger().level
    yield
    if structlog.get_config() != LOGGING:
        close_logging()
        logging.getLogger().setLevel(level)
        structlog.configure(**LOGGING)
