"""Serve's deployments: their processes, and how many of them run on which nodes."""

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

_MOST_PROCESSES = 10_000  # of a kind: Serve asks for a bound
_LOOK_S = 1.0  # Serve's controller asks ten times a second
_MORE_AFTER_S = 10.0  # of work that more replicas are of use for
_FEWER_AFTER_S = 300.0  # without: a replica's start may take minutes
_LOST_AFTER_S = 120.0  # a lost node's processes are then gone for long, so that it is them that are given up
ENGINE_NAME = "EngineReplica"


def processes(
    kind: type,
    name: str,
    *,
    actor: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    max_ongoing_requests: int = 100,
    health_check_period_s: float = 2.0,
    health_check_timeout_s: float = 10.0,  # three are what the coordinator waits for a sign of life
    stays_s: float = 0.1,
    ends_within_s: float = 5.0,
) -> serve.Deployment:
    """Return a deployment, not bound. Serve ends a process whose health check fails three times.

    Told to end, a process goes on for `stays_s` before it closes, and is killed after `ends_within_s`.
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
    """The even share of a node in so many processes."""
    return -(-num // num_nodes())


def on_each_node(config: ServiceConfig, num: int) -> dict[str, Any]:
    """Return the placement of `num` processes: each node has its even share, also one that joins later."""
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
    """Serve's autoscaling policy, in its controller: `share` processes for each live node."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._looked_at = float("-inf")
        self._num_nodes = 1

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at, self._num_nodes = now, num_nodes()
        return self._share * self._num_nodes, {}


def number_of_replicas(entry: EngineEntry) -> dict[str, Any]:
    """Return Serve's options for the number of an entry's replicas, which follows the work if the entry says so."""
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
    """Serve's autoscaling policy, in its controller: the number that the coordinator has announced."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._num: int | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if (now := time.monotonic()) - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._num = find_wanted(context.app_name or "", context.deployment_name)
        return self._num or context.target_num_replicas, {}


def replicas_wanted(entries: Iterable[EngineEntry], status: ServiceStatus) -> dict[str, int]:
    """Return how many replicas of each entry are of use now, within its bounds.

    The KV that leases are predicted to need, and what waits for room with as much for each, over the limit of a
    replica; what waits goes to the first entry that has room for it. An entry without a replica that takes traffic
    keeps its least.
    """
    num_leases = sum(replica.num_leases for replica in status.replicas)
    num_waiting = status.queue.num_waiting + status.queue.num_queued - sum(r.num_held for r in status.rollouts)
    each = status.queue.kv_predicted_tokens / num_leases if num_leases and status.queue.reason else 0.0
    waiting, found = each * num_waiting, {}
    for entry in entries:
        own = [one for one in status.replicas if one.entry == entry.name and one.kv_limit_tokens]
        num = entry.replicas
        if own:
            limit = sum(one.kv_limit_tokens for one in own) / len(own)
            predicted = sum(one.kv_predicted_tokens for one in own)
            num = max(num, min(math.ceil((predicted + waiting) / limit), entry.max_replicas or num))
            waiting = max(0.0, waiting - max(0.0, num * limit - predicted))
        found[entry.name] = num
    return found


def engine_deployment(config: ServiceConfig, entry: EngineEntry, model: str = "") -> str:
    """Return the name of the deployment of an entry's replicas."""
    return of_model(ENGINE_NAME if config.engines is None else f"{ENGINE_NAME}-{entry.name}", model)


def of_model(name: str, model: str) -> str:
    """Return the name of a deployment of a model."""
    return f"{name}@{model}" if model else name
