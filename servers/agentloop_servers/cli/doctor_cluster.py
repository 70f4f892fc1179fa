"""`agentloop doctor --cluster`: what each node of a Ray cluster has, side by side."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import ray
from rich.table import Table

from agentloop import __version__
from agentloop.errors import AgentLoopError, InvalidRequest, error_line
from agentloop_servers.cli.doctor import Check, package
from agentloop_servers.cluster.nodes import for_nodes, interface_of, node_address, node_ports, on_each_node
from agentloop_servers.config.service import ServiceConfig

Facts: TypeAlias = dict[str, str]

MAX_CLOCK_GAP_S = 1.0
_REACH_TIMEOUT_S = 3.0
_PACKAGES = ("ray", "torch", "vllm", "sglang")
_MAY_DIFFER = frozenset({"clock", "cpu", "memory of /dev/shm", "address", "GPUs"})


def examine_cluster(config: ServiceConfig, address: str) -> tuple[list[Check], Table]:
    """Return findings over the nodes of the Ray cluster at an address, and a table with a column for each node.

    Raises InvalidRequest if there is no such cluster.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise InvalidRequest(
            f"no Ray cluster at {address}: {error_line(error)}; start it with `ray start --head`", param="address"
        ) from error
    try:
        found = on_each_node(_facts, for_nodes(config), node_ports())
        asked_at = time.time()
        clocks = on_each_node(_now)  # by processes that have started by now
        took_s = time.time() - asked_at
    finally:
        ray.shutdown()
    for node, clock in clocks.items():
        gap_s = clock - asked_at - took_s / 2
        mark = "BROKEN: " if abs(gap_s) > MAX_CLOCK_GAP_S + took_s / 2 else ""
        found[node]["clock"] = f"{mark}{gap_s:+.1f} s from this node's"
    names = list(dict.fromkeys(name for facts in found.values() for name in facts))
    table = Table("", *found, box=None)
    for name in names:
        table.add_row(name, *(facts.get(name, "-") for facts in found.values()))
    return list(_judged(found, names)), table


def _judged(found: dict[str, Facts], names: list[str]) -> Iterator[Check]:
    for name in names:
        values = {node: facts.get(name, "-") for node, facts in found.items()}
        broken = [f"{node}: {value}" for node, value in values.items() if value.startswith("BROKEN")]
        if broken:
            yield Check(name, False, "; ".join(broken), is_needed=name != "clock")
        elif len(set(values.values())) > 1 and name not in _MAY_DIFFER:
            yield Check(name, False, "; ".join(f"{node}: {value}" for node, value in values.items()))
        else:
            yield Check(name, True, "as it must be" if name in _MAY_DIFFER else next(iter(values.values())))


def _now() -> float:
    return time.time()


def _facts(config: ServiceConfig, ports: dict[str, int]) -> Facts:
    """Return what this node has; what must not be so begins with BROKEN."""
    facts = {"python": platform.python_version(), "agentloop": __version__}
    facts |= {name: package(name, is_needed=False).detail for name in _PACKAGES}
    facts["model"] = _model(config)
    facts["keys"] = _digests(config.keys.user_key_env, config.keys.admin_key_env)
    token = os.environ.get("RAY_AUTH_MODE")
    facts["ray's token"] = "asked for" if token == "token" else f"BROKEN: RAY_AUTH_MODE is {token}"
    facts["cpu"] = f"{os.cpu_count()} cores"
    facts["GPUs"] = str(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))
    facts["memory of /dev/shm"] = f"{shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    facts["address"] = _address(config)
    facts["port"] = _port(config)
    unreached = [address for address, port in ports.items() if not _is_reached(address, port)]
    facts["other nodes"] = f"BROKEN: {', '.join(unreached)} not reached" if unreached else "all reached"
    return facts


def _model(config: ServiceConfig) -> str:
    """Return a digest of the model folder's small files, and of its weights' names and sizes."""
    try:
        folder = config.model_path()
    except AgentLoopError as error:
        return f"BROKEN: {error.message}"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            if path.suffix in (".json", ".jinja", ".txt"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _digests(*variables: str) -> str:
    values = [os.environ.get(name, "") for name in variables]
    return " ".join(hashlib.sha256(value.encode()).hexdigest()[:8] if value else "none" for value in values)


def _address(config: ServiceConfig) -> str:
    try:
        return f"{(address := node_address(config))} on {interface_of(address)}"
    except AgentLoopError as error:
        return f"BROKEN: {error.message}"


def _port(config: ServiceConfig) -> str:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        return f"BROKEN: {config.port}: {error.strerror}"
    return f"{config.port} is free"


def _is_reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _REACH_TIMEOUT_S).close()
    except OSError:
        return False
    return True
