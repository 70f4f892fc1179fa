"""A Ray cluster on test hosts, and a service on it."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.hosts.bed import DISK, Bed, Host

KEY, ADMIN_KEY = "user-key", "admin-key"
PORT = 8000
RUNS = DISK / "runs"
CLOCK_VARIABLE = "AGENTLOOP_TEST_CLOCK_S"
"""Environment variable with the seconds by which a host's clock is ahead, for the `sitecustomize` of `clock`."""

_CLOCK = Path(__file__).parent / "clock"
_RAY_PORT = 6379
_START_S = 180.0


class Cluster:
    """Hosts of which the first is the head of a Ray cluster. `folder` is shared by all hosts."""

    def __init__(self, bed: Bed, folder: Path, head_cpus: int = 2) -> None:
        self.bed = bed
        self._folder = folder
        self._variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "AGENTLOOP_KEY": KEY,
            "AGENTLOOP_ADMIN_KEY": ADMIN_KEY,
            "PYTHONPATH": ":".join(sys.path),
        }
        self.head = self.add(head_cpus)

    python = sys.executable

    @property
    def hosts(self) -> list[Host]:
        return self.bed.hosts

    def add(self, num_cpus: int = 2, clock_s: float = 0.0, labels: str = "") -> Host:
        """Start a host with Ray, as one more node. Python's clock on it is ahead by `clock_s`.

        `labels` are Ray's, such as `zone=a`.
        """
        apart = {}
        if clock_s:
            apart = {CLOCK_VARIABLE: str(clock_s), "PYTHONPATH": f"{_CLOCK}:{self._variables['PYTHONPATH']}"}
        host = self.bed.add(**{**self._variables, **apart})
        self.start_ray(host, num_cpus, labels)
        return host

    def bystander(self) -> Host:
        """Start a host that is not a node of the cluster."""
        return self.bed.add(**self._variables)

    def restart(self, host: Host) -> None:
        """Power a host off and on again, and restart Ray on it."""
        host.kill()
        host.power_on()
        self.start_ray(host)

    def start_ray(self, host: Host, num_cpus: int = 2, labels: str = "") -> None:
        """Start Ray on a host, as systemd would, and wait until its node has joined."""
        command = [sys.executable, "-m", "tests.hosts.ray_start", "start", f"--node-ip-address={host.address}"]
        command += [f"--num-cpus={num_cpus}", "--object-store-memory=100000000"]
        command += [f"--labels={labels}"] if labels else []
        if host.number == 0:
            command += ["--head", f"--port={_RAY_PORT}", f"--temp-dir={DISK}/ray", "--include-dashboard=false"]
        else:
            command += [f"--address={self.head.address}:{_RAY_PORT}"]
        host.run(command, _START_S)

    def status(self) -> dict[str, Any]:
        return self.call(self.head, "/status")

    def call(
        self, host: Host, path: str, body: object | None = None, timeout_s: float = 30.0, key: str = ADMIN_KEY
    ) -> Any:
        """Call the service from a host, by default with the admin's key. Raises CalledProcessError."""
        command = ["curl", "-sSf", "-m", f"{timeout_s:g}", "-H", f"Authorization: Bearer {key}"]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        return json.loads(host.run([*command, f"http://{self.head.address}:{PORT}{path}"], timeout_s + 10.0))

    def drain(self, host: Host) -> str:
        """Drain a host by its command, until it may be removed. Raises CalledProcessError."""
        command = [sys.executable, "-m", "agentloop_servers.cli", "drain", host.address]
        return self.head.run([*command, "--url", f"http://{self.head.address}:{PORT}"], 120.0)

    def doctor(self, config: str = "servers/cluster.yaml") -> str:
        """Return the doctor's output on the cluster, whether or not it passes."""
        command = [sys.executable, "-m", "agentloop_servers.cli", "doctor", "--cluster", "--config", config]
        return self.head.run(["sh", "-c", f"COLUMNS=200 {shlex.join(command)} 2>&1; echo exit $?"], 120.0)

    @contextlib.contextmanager
    def service(self, base: str = "servers/simulated.yaml", **args: object) -> Iterator[None]:
        """Start the service from a shipped config with other arguments; it is ready."""
        document = yaml.safe_load(Path(base).read_text())
        document["applications"][0]["args"] |= {"host": "0.0.0.0", "port": PORT, **args}
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        self._serve("--config", str(config), "--out", str(RUNS))
        yield

    def resume(self) -> None:
        """Resume the run on the head's disk, and wait until the service is ready."""
        self._serve("--resume", self.run_dir())

    def run_dir(self) -> str:
        """Return the directory of the run, on the head."""
        return self.head.run(["readlink", "-f", str(RUNS / "latest")]).strip()

    def _serve(self, *options: str) -> None:
        log = self._folder / "serve.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "agentloop_servers.cli", "serve", *options, "--address", "auto"]
        process = self.head.start(command, log)
        deadline_at = time.monotonic() + _START_S
        while "ready at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_at, log.read_text()
            time.sleep(0.2)
