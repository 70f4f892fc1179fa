"""Serve's deployments: their processes, and how many of them run on which nodes."""

from __future__ import annotations

import time
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from agentloop_servers.cluster import num_nodes
from agentloop_servers.config import ServiceConfig

_MOST_PROCESSES = 10_000  # of a kind: Serve asks for a bound
_LOOK_S = 1.0  # Serve's controller asks ten times a second
_LOST_AFTER_S = 120.0  # a lost node's processes are then gone for long, so that it is them that are given up


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
                "policy_function": "agentloop_servers.placement:OnEachNode",
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
