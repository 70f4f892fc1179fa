"""The nodes of a Ray cluster: the addresses of private ports, and the node with the run directory.

The head node has the run directory and therefore runs the coordinator, unless a database stores the run; then the
coordinator can run on any node. Engines, workers and ingress processes run on any node, and their private ports
listen on that node's address. Without `cluster`, or on a single node, private ports listen on loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import ray
import structlog
from ray._private.state import available_resources_per_node
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentloop.errors import InvalidRequest, ServiceUnavailable, error_line
from agentloop_servers.config.service import AUTHORITY_NAME, ClusterSettings, ServiceConfig, kept_secret, run_secret
from agentloop_servers.http.auth import Keys
from agentloop_servers.net.tcp import ADDRESS_VARIABLE, ENCRYPT_VARIABLE
from agentloop_servers.net.tls import FileCertificates, RunAuthority, certificate
from agentloop_servers.private_http.trust import Trust

T = TypeVar("T")

_log = structlog.get_logger("cluster")

_HEAD = "node:__internal_head__"  # a resource that only the head node has
_CALL_TIMEOUT_S = 60.0
_NODES_WAIT_S = 1800.0
_LISTENS_WITHIN_S = 5.0
_FIND_RETRY_S = 0.2
_KV_NAMESPACE = b"agentloop"


def for_nodes(config: ServiceConfig) -> ServiceConfig:
    """Return the config with `cluster` set on several nodes and unset on a single node.

    Blocks until `cluster.min_nodes` nodes are alive. Raises InvalidRequest after a timeout.
    """
    least = 1 if config.cluster is None else config.cluster.min_nodes
    deadline_at = time.monotonic() + (_NODES_WAIT_S if ray.is_initialized() else 0.0)
    while (num := num_nodes()) < least:
        if time.monotonic() > deadline_at:
            raise InvalidRequest(
                f"the Ray cluster has {num} of {least} nodes: start more nodes, or lower cluster.min_nodes",
                param="cluster.min_nodes",
            )
        time.sleep(1.0)
    settings = (config.cluster or ClusterSettings()) if num_nodes() > 1 else None
    return config.model_copy(update={"cluster": settings})


def num_nodes() -> int:
    """Return the number of live nodes; 1 if Ray is not connected, because a Ray started here has one node."""
    return len(_nodes()) or 1


def node_resources(*, only_free: bool = False) -> dict[str, dict[str, float]]:
    """Return the total or free resources of each live node, by address; empty if Ray is not connected."""
    nodes = _nodes()
    if not only_free or not nodes:
        return {node["NodeManagerAddress"]: node["Resources"] for node in nodes}
    free = available_resources_per_node()
    return {node["NodeManagerAddress"]: free.get(node["NodeID"], {}) for node in nodes}


def node_labels() -> dict[str, dict[str, str]]:
    """Return the Ray labels of each live node, by address; empty if Ray is not connected."""
    return {node["NodeManagerAddress"]: node["Labels"] for node in _nodes()}


def dead_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray reports as dead; empty if Ray does not answer."""
    try:
        return frozenset(node["NodeID"] for node in ray.nodes() if not node["Alive"])
    except Exception as error:  # Ray raises plain exceptions
        _log.warning("nodes_not_known", reason=error_line(error))
        return frozenset()


def check_trust(config: ServiceConfig, keys: Keys) -> None:
    """Raise InvalidRequest if a service on several nodes would accept unauthenticated requests from their
    network."""
    if config.cluster is None:
        return
    if keys.is_open or not keys.has_admin:
        raise InvalidRequest(
            f"a service on {num_nodes()} nodes needs a user key and an admin key: set AGENTLOOP_KEY and"
            " AGENTLOOP_ADMIN_KEY, or `users`",
            param="keys",
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise InvalidRequest(
            "the Ray cluster does not require a token, so anyone on the network could run code: start every node"
            " with RAY_AUTH_MODE=token",
            param="cluster",
        )


def node_address(config: ServiceConfig) -> str:
    """Return the address of this node on which private ports listen and which they announce.

    Raises InvalidRequest if the node has no address in `cluster.network`.
    """
    if config.cluster is None:
        return loopback(config)
    own = str(ray.util.get_node_ip_address())
    if config.cluster.network is None:
        return own
    network = ipaddress.ip_network(config.cluster.network)
    addresses = [address for _, address in _addresses()]
    inside = [address for address in addresses if ipaddress.ip_address(address) in network]
    if not inside:
        raise InvalidRequest(
            f"node {own} has no address in {network}; it has {', '.join(addresses)}: change cluster.network",
            param="cluster.network",
        )
    return inside[0]


def loopback(config: ServiceConfig) -> str:
    """Return the loopback address for private ports that only this host's processes use."""
    return "::1" if ":" in config.host else "127.0.0.1"


def disk_of(run_dir: Path) -> str:
    """Return a unique id of the disk with this run directory, created on first use. It differs on another host,
    even for the same path."""
    path = run_dir / "disk"
    if not path.exists():
        (own := run_dir / f"disk.{os.getpid()}").write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):  # another process created it first
            path.hardlink_to(own)
        own.unlink()
    return path.read_text()


def prepare_engine_network(config: ServiceConfig) -> None:
    """Set the environment variables with the address and interface through which the engine reaches other nodes."""
    if config.cluster is None:
        return
    os.environ[ADDRESS_VARIABLE] = address = node_address(config)
    if config.cluster.tls is not None:
        os.environ[ENCRYPT_VARIABLE] = "1"
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """Return the name of this node's network interface with this address; None if no interface has it."""
    return next((name for name, its_address in _addresses() if its_address == address), None)


def node_ports() -> dict[str, int]:
    """Return the port of Ray's node manager on each live node, by address; for reachability checks."""
    return {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in _nodes()}


def where_the_run_is(config: ServiceConfig, function: Callable[..., T], *arguments: object, **named: object) -> T:
    """Call a function on the node with the run directory. Raises the function's errors."""
    if config.cluster is None:
        return function(*arguments, **named)
    return _called(function, [_head()], *arguments, **named)[0]


def coordinator_place(config: ServiceConfig) -> dict[str, Any] | None:
    """Return the Ray actor options that place the coordinator; None on a single node.

    The coordinator runs on the head node, which has the run directory. If a database stores the run, any node is
    possible.
    """
    if config.cluster is None:
        return None
    if config.store is None:
        return {"num_cpus": 0, "resources": {_HEAD: 0.001}}
    head = _head()
    # Prefer the head node, or the other nodes if the head has no CPUs for work.
    wanted = head["NodeID"] if head["Resources"].get("CPU") else f"!{head['NodeID']}"
    return {
        "num_cpus": 0,
        "label_selector": {"ray.io/node-id": wanted},
        "fallback_strategy": [{"label_selector": {}}],
    }


def on_each_node(function: Callable[..., T], *arguments: object) -> dict[str, T]:
    """Call a function on each live node. Return the results by address. Raises the function's errors."""
    nodes = _nodes()
    answers = _called(function, nodes, *arguments)
    return {node["NodeManagerAddress"]: answer for node, answer in zip(nodes, answers, strict=True)}


def nodes_without(directory: str) -> tuple[str, ...]:
    """Return the addresses of the nodes on which a directory does not exist."""
    return tuple(address for address, is_there in on_each_node(os.path.isdir, directory).items() if not is_there)


def run_trust(config: ServiceConfig, run_dir: Path) -> Trust:
    """Return the secret and certificates by which the processes of a run authenticate each other.

    They are created at the run's first start. Raises InvalidRequest.
    """
    settings = None if config.cluster is None else config.cluster.tls
    if settings == "run":
        return Trust(run_secret(run_dir), RunAuthority.of(kept_secret(run_dir, AUTHORITY_NAME, certificate)))
    files = None if settings is None else FileCertificates(**settings.model_dump())
    return Trust(run_secret(run_dir), files)


def check_certificates(config: ServiceConfig) -> None:
    """Raise InvalidRequest if the files of `cluster.tls` are not usable on this node, or no certificate can be
    made."""
    settings = None if config.cluster is None else config.cluster.tls
    if settings == "run":
        certificate()
    elif settings is not None:
        files = FileCertificates(**settings.model_dump())
        files.server("")
        files.client()


def announce_coordinator(app_name: str, url: str, model: str = "") -> None:
    """Store the URL of a model's coordinator in Ray's key-value store, from which every process of the application
    reads it. The model "" is the policy."""
    _announce(_key(app_name, model), url)


def announce_wanted(app_name: str, deployment: str, num: int) -> None:
    """Store the wanted number of a deployment's processes, which the policy in Serve's controller reads."""
    _announce(_wanted_key(app_name, deployment), str(num))


def find_wanted(app_name: str, deployment: str) -> int | None:
    """Return the number stored by `announce_wanted`; None if no number was stored."""
    stored = _internal_kv_get(_wanted_key(app_name, deployment), namespace=_KV_NAMESPACE)
    return int(stored) if stored else None


async def find_coordinator(app_name: str, model: str = "") -> str:
    """Wait until a model's coordinator accepts connections, and return its URL. Raises ServiceUnavailable if Ray
    fails.

    A new coordinator announces another URL, so the URL is read again after each failed connection.
    """
    # Not through a Serve handle: its reply to a host that has vanished blocks the coordinator's event loop for a
    # minute.
    while True:
        try:
            stored = await asyncio.to_thread(_internal_kv_get, _key(app_name, model), namespace=_KV_NAMESPACE)
        except Exception as error:  # Ray raises plain exceptions
            raise ServiceUnavailable(
                f"cannot read the coordinator's address from Ray: {error_line(error)}; check `ray status`"
            ) from error
        if stored and await _listens(url := str(stored, "ascii")):
            return url
        await asyncio.sleep(_FIND_RETRY_S)


def _announce(key: bytes, value: str) -> None:
    _internal_kv_put(key, value.encode(), overwrite=True, namespace=_KV_NAMESPACE)


def _key(app_name: str, model: str) -> bytes:
    return f"coordinator of {app_name} {model}".rstrip().encode()


def _wanted_key(app_name: str, deployment: str) -> bytes:
    return f"wanted {deployment} of {app_name}".encode()


async def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_LISTENS_WITHIN_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _called(
    function: Callable[..., T], nodes: list[dict[str, Any]], *arguments: object, **named: object
) -> list[T]:
    task = ray.remote(function)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    calls = [task.options(num_cpus=0, scheduling_strategy=place).remote(*arguments, **named) for place in places]
    try:
        results: list[T] = ray.get(calls, timeout=_CALL_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"a call to the nodes of the cluster failed ({type(error).__name__}): check `ray status`, then retry"
        ) from error
    return results


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def _head() -> dict[str, Any]:
    return next(node for node in _nodes() if _HEAD in node["Resources"])


def _addresses() -> list[tuple[str, str]]:
    """Return the pairs (interface, address) of this node, without loopback and link-local addresses."""
    pairs = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            try:
                address = ipaddress.ip_address(entry.address)
            except ValueError:  # a MAC address
                continue
            if not address.is_loopback and not address.is_link_local:
                pairs.append((name, str(address)))
    return pairs
