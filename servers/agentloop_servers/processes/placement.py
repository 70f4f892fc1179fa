"""Ray Serve deployments: their options, and the number of processes and their nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from agentloop.api.coordinator import ServiceStatus
from agentloop_servers.cluster.nodes import find_wanted, num_nodes
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig

_MOST_PROCESSES = 10_000  # per deployment: Serve requires a maximum
_LOOK_S = 1.0  # how long a result is cached: Serve's controller calls a policy ten times a second
_MORE_AFTER_S = 10.0  # time with work for more replicas before replicas are added
_FEWER_AFTER_S = 300.0  # time with too many replicas before some are removed: a start can take minutes
_LOST_AFTER_S = (
    120.0  # by then Serve has dropped a lost node's processes, so scaling down removes those, not live ones
)
ENGINE_NAME = "EngineReplica"


def processes(
    kind: type,
    name: str,
    *,
    actor: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    max_ongoing_requests: int = 100,
    health_check_period_s: float = 2.0,
    health_check_timeout_s: float = 10.0,  # three timeouts are the coordinator's own limit for a silent replica
    stays_s: float = 0.1,
    ends_within_s: float = 5.0,
) -> serve.Deployment:
    """Return an unbound deployment. Serve replaces a process whose health check fails three times.

    On shutdown a process continues for `stays_s` before it closes, and is killed after `ends_within_s`.
    """
    return serve.deployment(
        kind,
        name=name,
        max_ongoing_requests=max_ongoing_requests,
        ray_actor_options=actor or {"num_cpus": 0},
        health_check_period_s=health_check_period_s,
        health_check_timeout_s=health_check_timeout_s,
        graceful_shutdown_wait_loop_s=stays_s,
        graceful_shutdown_timeout_s=ends_within_s,
        **(placement or {"num_replicas": 1}),
    )


def share_of_node(num: int) -> int:
    """Return the number of processes per node if `num` processes are spread evenly, rounded up."""
    return -(-num // num_nodes())


def on_each_node(config: ServiceConfig, num: int) -> dict[str, Any]:
    """Return Serve's options that spread `num` processes evenly over the nodes, including nodes that join later."""
    if config.cluster is None:
        return {"num_replicas": num}
    share = share_of_node(num)
    return {
        "max_replicas_per_node": share,
        "autoscaling_config": {
            "policy": {
                "policy_function": "agentloop_servers.processes.placement:OnEachNode",
                "policy_kwargs": {"share": share},
            },
            "min_replicas": 1,
            "initial_replicas": num,
            "max_replicas": _MOST_PROCESSES,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": _LOST_AFTER_S,
        },
    }


class OnEachNode:
    """An autoscaling policy that runs in Serve's controller: `share` processes per live node."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._looked_at = float("-inf")
        self._num_nodes = 1

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at, self._num_nodes = now, num_nodes()
        return self._share * self._num_nodes, {}


def number_of_replicas(entry: EngineEntry) -> dict[str, Any]:
    """Return Serve's options for the number of replicas of an engine pool: fixed, or autoscaled with
    `max_replicas`."""
    if entry.max_replicas is None:
        return {"num_replicas": entry.replicas}
    return {
        "autoscaling_config": {
            "policy": {"policy_function": "agentloop_servers.processes.placement:AsWanted"},
            "min_replicas": entry.replicas,
            "max_replicas": entry.max_replicas,
            "upscale_delay_s": _MORE_AFTER_S,
            "downscale_delay_s": _FEWER_AFTER_S,
        }
    }


class AsWanted:
    """An autoscaling policy that runs in Serve's controller: the number that the coordinator has announced."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._num: int | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._num = find_wanted(context.app_name or "", context.deployment_name)
        return self._num or context.target_num_replicas, {}


def replicas_wanted(entries: Iterable[EngineEntry], status: ServiceStatus) -> dict[str, int]:
    """Return the number of replicas of each engine pool that the current work can use, within the pool's bounds.

    The number is the predicted KV of the pool's leases and of waiting work, divided by the KV limit of a replica.
    Each waiting item counts with the average predicted KV of a lease. Waiting work is assigned to the first pool
    with capacity. A pool without a replica that accepts traffic keeps its minimum.
    """
    num_leases = sum(replica.num_leases for replica in status.replicas)
    num_waiting = status.queue.num_waiting + status.queue.num_queued - sum(r.num_held for r in status.rollouts)
    each = status.queue.kv_predicted_tokens / num_leases if num_leases and status.queue.reason else 0.0
    waiting_tokens, wanted = each * num_waiting, {}
    for entry in entries:
        replicas = [
            replica for replica in status.replicas if replica.entry == entry.name and replica.kv_limit_tokens
        ]
        num = entry.replicas
        if replicas:
            limit = sum(replica.kv_limit_tokens for replica in replicas) / len(replicas)
            predicted = sum(replica.kv_predicted_tokens for replica in replicas)
            num = max(num, min(math.ceil((predicted + waiting_tokens) / limit), entry.max_replicas or num))
            waiting_tokens = max(0.0, waiting_tokens - max(0.0, num * limit - predicted))
        wanted[entry.name] = num
    return wanted


def engine_deployment(config: ServiceConfig, entry: EngineEntry, model: str = "") -> str:
    """Return the name of the deployment of an engine pool's replicas."""
    return of_model(ENGINE_NAME if config.engines is None else f"{ENGINE_NAME}-{entry.name}", model)


def of_model(name: str, model: str) -> str:
    """Return the name of a model's deployment: `name` for the policy, otherwise `name@model`."""
    return f"{name}@{model}" if model else name
