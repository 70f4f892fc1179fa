"""Ray's own processes, started with the patience that a busy host needs.

Ray gives its node 30 s to appear, and the node gives its agents 30 s to tell their ports in files; no setting of
Ray 2.60 moves either. So the agents' ports are chosen and told here, in advance, and the node is awaited here,
before Ray's own wait begins. It runs in a thread: Ray sets its handlers of signals in the main one, and those of
its C++ parts are left out. So a signal within a start is this process's own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from agentloop.errors import ServiceUnavailable, error_line
from agentloop_servers.cluster.host import usable_cpus

NODE_TIMEOUT_S = 300.0  # of one try, for Ray's node to appear
SLOW_AFTER_S = 15.0
NUM_TRIES = 2

PATIENCE = {  # settings of what Ray lets be set
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
QUIET = {  # settings of what Ray and Serve do by the clock, which is most of the CPU of an idle service
    "RAY_event_stats": "0",  # else each process times every event of its loops, for Ray's own debug dump
    "RAY_num_workers_soft_limit": "0",  # idle workers that Ray keeps; else as many as there are free CPUs
    "RAY_idle_worker_killing_time_threshold_ms": "60000",  # users' next Ray tasks reuse their workers; else 1000
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # else 0.1
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",  # of each process; else 100
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # of the node's own metrics; else 5000
}
_AGENT_PORTS = {
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
    RUNTIME_ENV_AGENT_PORT_NAME: "runtime_env_agent_port",
}


class RayStart:
    """One start of Ray. `give_up` ends it within moments, from any thread."""

    def __init__(self, say: Callable[[str], object], node_timeout_s: float = NODE_TIMEOUT_S) -> None:
        self._say = say
        self._node_timeout_s = node_timeout_s
        self._nodes: list[Any] = []
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Have `run` raise ServiceUnavailable, with nothing left."""
        self._is_given_up.set()

    def run(self, **options: object) -> Any:
        """Return what `ray.init` returns. A try that failed is followed by one more, in a fresh session.

        Raises ServiceUnavailable, with nothing left, in one line that leads to Ray's logs.
        """
        for name, value in (PATIENCE | QUIET).items():
            os.environ.setdefault(name, value)
        # Read from the environment by each process that Ray starts; this one alone goes without the C++ handlers.
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
        for number in range(1, NUM_TRIES + 1):
            try:
                with nodes_made_by(partial(PatientNode, self)):
                    return ray.init(address="local", **options)
            except Exception as error:  # Ray's are plain ones
                logs = self._clean_up()
                reason = f"Ray did not start: {error_line(error)} ({_load()}; logs in {logs})"
                if self._is_given_up.is_set() or number == NUM_TRIES:
                    raise ServiceUnavailable(reason) from error
                self._say(f"{reason}; trying once more")
        raise AssertionError("unreachable")

    def await_node(self, node: Any, raylet: Any) -> None:
        """Return once Ray's node is registered. Raises ServiceUnavailable if its process ends, or in the end."""
        started_at, is_told = time.monotonic(), False
        while (waited_s := time.monotonic() - started_at) < self._node_timeout_s:
            if self._is_given_up.is_set():
                raise ServiceUnavailable("it was told to end")
            if raylet.process.poll() is not None:
                raise ServiceUnavailable(f"its raylet ended with status {raylet.process.returncode}")
            try:
                services.get_node(node.gcs_address, node._node_id)
                return
            except RuntimeError:  # not registered yet
                time.sleep(0.2)
            if waited_s > SLOW_AFTER_S and not is_told:
                is_told = True
                self._say(f"Ray's node is slow to start ({_load()}): waiting up to {self._node_timeout_s:g} s")
        raise ServiceUnavailable(f"its node did not appear within {self._node_timeout_s:g} s")

    def begin(self, node: Any) -> None:
        """Remember a node that is being made, for the case that it fails."""
        self._nodes.append(node)

    def _clean_up(self) -> str:
        """End the processes of the nodes that failed, and return where the last one's logs are."""
        ray.shutdown()
        logs = "none"
        while self._nodes:
            node = self._nodes.pop()
            logs = getattr(node, "_logs_dir", logs)
            if hasattr(node, "all_processes"):
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        return logs


class PatientNode(ray_node.Node):  # type: ignore[misc] # Ray has no types
    """Ray's node, whose agents' ports are told in advance, and which is awaited as long as it takes."""

    def __init__(self, start: RayStart, *arguments: Any, **options: Any) -> None:
        self._start = start
        start.begin(self)
        super().__init__(*arguments, **options)

    def start_log_monitor(self) -> None:
        """Start none: it reads all logs ten times a second for drivers that print them, which this one does not."""

    def start_monitor(self) -> None:
        """Start none: it adds nodes to a cluster, and this one has one node."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for (name, field), port in zip(_AGENT_PORTS.items(), _free_ports(len(_AGENT_PORTS)), strict=True):
            setattr(self._ray_params, field, port)
            persist_port(self._session_dir, self._node_id, name, port)
        super().start_raylet(*arguments, **options)
        self._start.await_node(self, self.all_processes["raylet"][0])


@contextmanager
def nodes_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """Have `ray.init` make its node by `make`."""
    plain = ray_node.Node
    ray_node.Node = make
    try:
        yield
    finally:
        ray_node.Node = plain


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def _load() -> str:
    return f"load {os.getloadavg()[0]:.0f} on {usable_cpus()} CPUs"
