"""Start of Ray's own processes with timeouts that are long enough for a busy host.

Ray waits 30 s for its node to register, and the node waits 30 s for its agents to write their ports to files; Ray
2.60 has no setting for either. Therefore the agents' ports are chosen and written here in advance, and
`PatientNode` waits for the node before Ray's own wait starts. `ray.init` runs in a thread, because Ray installs
signal handlers in the main thread, and the handlers of its C++ code are disabled. A signal during a start is thus
handled by this process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from agentloop_servers.net.tcp import free_ports

NODE_TIMEOUT_S = 300.0  # time of one attempt for Ray's node to register
SLOW_AFTER_S = 15.0
NUM_TRIES = 2

PATIENCE = {  # the timeouts that Ray has settings for
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
QUIET = {  # intervals of Ray's and Serve's periodic work, which uses most of the CPU of an idle service
    "RAY_event_stats": "0",  # by default each process times every event of its loops for Ray's debug dump
    "RAY_num_workers_soft_limit": "0",  # idle workers that Ray keeps; default: the number of free CPUs
    "RAY_idle_worker_killing_time_threshold_ms": "60000",  # Ray tasks of users reuse their workers; default: 1000
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # default: 0.1
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",  # for each process; default: 100
    "REPORTER_UPDATE_INTERVAL_MS": "30000",  # for the node's own metrics; default: 5000
}
_AGENT_PORTS = {
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
    RUNTIME_ENV_AGENT_PORT_NAME: "runtime_env_agent_port",
}


class RayStart:
    """One start of Ray. `give_up`, from any thread, cancels it within a second. `say` prints a line of progress."""

    def __init__(self, say: Callable[[str], object], node_timeout_s: float = NODE_TIMEOUT_S) -> None:
        self._say = say
        self._node_timeout_s = node_timeout_s
        self._nodes: list[Any] = []
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        """Cancel the start: `run` stops all processes and raises ServiceUnavailable."""
        self._is_given_up.set()

    def run(self, **options: object) -> Any:
        """Run `ray.init` and return its result. After a failure, try once more in a new session.

        Raises ServiceUnavailable with a one-line message that names Ray's logs; no process is left behind.
        """
        for name, value in (PATIENCE | QUIET).items():
            os.environ.setdefault(name, value)
        # Set in this process only: Ray's own processes read the environment variable and keep the C++ handlers.
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
        for number in range(1, NUM_TRIES + 1):
            try:
                with nodes_made_by(partial(PatientNode, self)):
                    return ray.init(address="local", **options)
            except Exception as error:  # Ray raises plain exceptions
                logs = self._clean_up()
                reason = f"Ray did not start: {error_line(error)} ({_load()}; logs in {logs})"
                if self._is_given_up.is_set() or number == NUM_TRIES:
                    raise ServiceUnavailable(reason) from error
                self._say(f"{reason}; retrying once")
        raise AssertionError("unreachable")

    def await_node(self, node: Any, raylet: Any) -> None:
        """Wait until Ray's node is registered. Raises ServiceUnavailable if its process exits or after a
        timeout."""
        started_at, is_reported = time.monotonic(), False
        while (waited_s := time.monotonic() - started_at) < self._node_timeout_s:
            if self._is_given_up.is_set():
                raise ServiceUnavailable("the start was cancelled")
            if raylet.process.poll() is not None:
                raise ServiceUnavailable(f"its raylet exited with status {raylet.process.returncode}")
            try:
                services.get_node(node.gcs_address, node._node_id)
                return
            except RuntimeError:  # not registered yet
                time.sleep(0.2)
            if waited_s > SLOW_AFTER_S and not is_reported:
                is_reported = True
                self._say(f"Ray's node is slow to start ({_load()}): waiting up to {self._node_timeout_s:g} s")
        raise ServiceUnavailable(f"its node did not register within {self._node_timeout_s:g} s")

    def begin(self, node: Any) -> None:
        """Record a node that is being constructed, so that its processes can be stopped after a failure."""
        self._nodes.append(node)

    def _clean_up(self) -> str:
        """Stop the processes of failed nodes, and return the folder of the last node's logs."""
        ray.shutdown()
        logs = "none"
        while self._nodes:
            node = self._nodes.pop()
            logs = getattr(node, "_logs_dir", logs)
            if hasattr(node, "all_processes"):
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        return logs


class PatientNode(ray_node.Node):  # type: ignore[misc] # Ray has no types
    """Ray's node with agent ports that are chosen in advance, and a wait with our own timeout."""

    def __init__(self, start: RayStart, *arguments: Any, **options: Any) -> None:
        self._start = start
        start.begin(self)
        super().__init__(*arguments, **options)

    def start_log_monitor(self) -> None:
        """Do not start it: it reads all logs ten times a second for drivers that print them, which this one does
        not."""

    def start_monitor(self) -> None:
        """Do not start it: it adds nodes to a cluster, and this cluster has a single node."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for (name, field), port in zip(_AGENT_PORTS.items(), free_ports(len(_AGENT_PORTS)), strict=True):
            setattr(self._ray_params, field, port)
            persist_port(self._session_dir, self._node_id, name, port)
        super().start_raylet(*arguments, **options)
        self._start.await_node(self, self.all_processes["raylet"][0])


@contextmanager
def nodes_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """Make `ray.init` construct its node with `make` during the block."""
    plain = ray_node.Node
    ray_node.Node = make
    try:
        yield
    finally:
        ray_node.Node = plain


def _load() -> str:
    return f"load {os.getloadavg()[0]:.0f} on {usable_cpus()} CPUs"
