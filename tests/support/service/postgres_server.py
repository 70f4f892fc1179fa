"""The distribution's PostgreSQL, unprivileged, with its own folder and port."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PASSWORD = "hunter2"  # the server does not require it
_START_S = 60.0


def _programs() -> Path | None:
    """Return the folder of the server's programs."""
    found = [Path(program).resolve().parent for program in [shutil.which("initdb")] if program]
    return next(iter([*found, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]), None)


class PostgresServer:
    """A server that a test may stop and start. It ends with this process."""

    def __init__(self, address: str = "127.0.0.1", namespace: str | None = None) -> None:
        """Skips the test if no server is installed.

        `namespace` is the name of the network namespace that has the address.
        """
        pytest.importorskip("psycopg", reason="needs psycopg (the extra postgres)")
        programs = _programs()
        if programs is None:
            pytest.skip("needs a PostgreSQL server (apt: postgresql)")
        self._programs = programs
        self._address, self._namespace = address, namespace
        self._folder = Path(tempfile.mkdtemp(prefix="agentloop-postgres-"))
        if os.geteuid() == 0:
            shutil.chown(self._folder, "nobody")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.data = self._folder / "data"
        subprocess.run(
            self._command("initdb", "-U", "agentloop", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"),
            check=True,
            capture_output=True,
        )
        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet trust\n")
        self._names = itertools.count()
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://agentloop:{PASSWORD}@{self._address}:{self.port}/postgres"

    def new_name(self) -> str:
        """Return a name that no run has."""
        return f"run-{next(self._names)}"

    def execute(self, statement: str, schema: str = "public") -> list[tuple[object, ...]]:
        """Execute a statement over a separate connection."""
        with importlib.import_module("psycopg").connect(self.url, autocommit=True) as connection:
            connection.execute(f'SET search_path TO "{schema}"')
            cursor = connection.execute(statement)
            return [] if cursor.description is None else cursor.fetchall()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        settings = ("-p", str(self.port), "-k", str(self._folder), "-h", self._address, "-c", "fsync=off")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command("postgres", *settings), stdout=log, stderr=log)
        deadline_at = time.monotonic() + _START_S
        while not self._is_ready():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline_at, "the server does not start"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server as an operator does: connections end, and committed data stays."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(_START_S)

    def end_connections(self) -> int:
        """Close all other connections; returns their number."""
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'agentloop%'"
        return len(self.execute(others))

    def close(self) -> None:
        """Stop the server and remove its folder."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_START_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ready(self) -> bool:
        path = self.data / "postmaster.pid"
        found = path.read_text() if path.is_file() else ""
        return found.startswith(f"{self._process.pid}\n") and "ready" in found

    def _command(self, program: str, *arguments: str) -> list[str]:
        """Return a command that runs as a user the program accepts, and ends with this process."""
        user = ["--reuid", "nobody", "--regid", "nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        entered = ["ip", "netns", "exec", self._namespace] if self._namespace is not None else []
        command = [
            *entered,
            "setpriv",
            *user,
            "--pdeathsig",
            "QUIT",
            str(self._programs / program),
            "-D",
            str(self.data),
        ]
        return [*command, *arguments]
