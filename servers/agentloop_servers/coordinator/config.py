"""CoordinatorConfig: the bounds and deadlines of the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentloop.engine import WeightUpdate
from agentloop.fleet import FleetConfig, WeightConfig
from agentloop.scheduling import BalancerConfig
from agentloop.types import KVPolicy


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """All finite."""

    kv_policy: KVPolicy = KVPolicy.RECOMPUTE  # of updates that do not say
    initial_weights: WeightUpdate | None = None  # what engines load at their start, under the version they say
    max_queued_trajectories: int = 100_000
    max_attempts: int = 3  # of one trajectory, over lost workers
    max_page: int = 1000
    heartbeat_interval_s: float = 1.0
    worker_timeout_s: float = 30.0  # silence after which a worker is lost; `take` waits half as long at most
    max_wait_s: float = 60.0  # of one `read`
    placement_wait_s: float = 20.0  # for a replica that is about to come back; below the callers' own deadline
    restart_grace_s: float = 10.0  # for workers to say what they still run, before that is given out again
    direct_lease_ttl_s: float = 3600.0
    fleet: FleetConfig = field(default_factory=FleetConfig)
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    weights: WeightConfig = field(default_factory=WeightConfig)
