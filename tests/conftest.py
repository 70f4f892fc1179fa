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

settings.register_profile("shared_cores", deadline=None)  # wall time of an example is not a property of the code
settings.load_profile("shared_cores")

# Test logs have neither colors nor the drawn tracebacks that structlog writes by default.
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
    """Freeze the imported objects: the garbage collector would otherwise scan a million permanent objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests that share an engine or a service in one process, and the tests of every other file together."""
    if config.getvalue("dist") != "loadgroup":  # xdist 3.8 does not find group marks under pytest 9.2
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
    """Freeze the objects that a file leaves: full collections of them took a fifth of the CPU time of a lane."""
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
    """A PostgreSQL storage backend that no other test uses."""
    kind = resolve("agentloop_postgres.home:PostgresRun", param="store")
    return kind(postgres_server.url, postgres_server.new_name(), tmp_path)


@pytest.fixture(autouse=True)
def _no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the threads that user code leaves behind only in the test that started them."""
    monkeypatch.setattr(aio, "_abandoned_threads", set())


@pytest.fixture(autouse=True)
def _patient_canary_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the canary deadline: on a busy host, a step of a real engine can exceed the shortest one, 10 s."""
    if request.node.get_closest_marker("engine") is not None:
        monkeypatch.setattr(canary, "_MIN_DEADLINE_S", canary._MAX_DEADLINE_S)


@pytest.fixture(autouse=True)
def _no_logging_of_other_tests() -> Iterator[None]:
    """Restore the logging configuration, which a command run in this process may change."""
    level = logging.getLogger().level
    yield
    if structlog.get_config() != LOGGING:
        close_logging()
        logging.getLogger().setLevel(level)
        structlog.configure(**LOGGING)
