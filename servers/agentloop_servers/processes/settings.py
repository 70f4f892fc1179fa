"""Settings of the service's parts that are derived from its config: number of processes, balancer, timeouts.

The timeouts of a weight update nest; each is longer than the timeout of the operation that it waits for:

    engine: stage, commit  <  coordinator: each step  <  all steps together  <  ingress: the update  <  its call
                           <  an order to a replica

The innermost timeout expires first and reports the reason. Without nesting, an outer timeout would hide the reason.
"""

from __future__ import annotations

from pathlib import Path

from agentloop.errors import InvalidRequest
from agentloop.fleet.replica_steps import WeightConfig
from agentloop.scheduling.balancer import BalancerConfig
from agentloop.scheduling.replica_books import ShareBounds
from agentloop_servers.cluster.host import usable_cpus
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig, model_sizes, saved_config
from agentloop_servers.replica.client import ORDER_TIMEOUT_S
from agentloop_servers.replica.server import ReplicaConfig

CALL_MARGIN_S = 15.0
"""The difference between the timeout of a call and the timeout of the requested operation."""

_FIRST_STEP_FACTOR = 5  # an engine may compile before its first step
_PRIOR_GROWTHS = (
    4  # a trajectory is expected to grow by 1/4 of the maximum context until trajectories have finished
)
_CPUS_OF_AN_ENGINE = 2  # the engine's process and its front end, which are always busy
_CPUS_OF_OTHERS = 2  # the coordinator, and Ray
_CPUS_OF_EACH = 3  # CPUs for one worker and one ingress process, including a reserve for users' tools
_MOST_OF_AN_ENGINE = 4  # processes of each kind per engine
_MAX_PROCESSES = 16  # processes of each kind


def processes_for(num_engines: int, num_cpus: int) -> int:
    """Return the number of ingress processes, and of workers, for `num_engines` engines on GPUs.

    Each engine gets up to four processes of each kind, as far as the engines leave CPUs.
    """
    # The average load is low: an engine of a 4B model finishes about 65 turns of 256 tokens per second, which needs
    # 1/8 of a core in workers or ingress processes (1/2 if all are streamed). But turns that start together end
    # together: with 500 turns at 2 ms in a single process, the last turn waits a second while its slot in the
    # engine is idle.
    spare = num_cpus - _CPUS_OF_AN_ENGINE * num_engines - _CPUS_OF_OTHERS
    return max(1, min(spare // _CPUS_OF_EACH, _MOST_OF_AN_ENGINE * num_engines, _MAX_PROCESSES))


def sized(config: ServiceConfig, run_dir: Path, num_cpus: int | None = None, num_nodes: int = 1) -> ServiceConfig:
    """Return the config with its numbers of processes and the workers' capacity filled in.

    `num_cpus` is the number of CPUs of a node, by default of this one. Without GPUs there is one process of each
    kind per node. Raises InvalidRequest if the run's saved config cannot be read.
    """
    num_each, workers, first = 1, config.workers, saved_config(run_dir)
    if config.num_gpu_engines:
        num_engines = -(-config.num_gpu_engines // num_nodes)
        num_each = processes_for(num_engines, usable_cpus() if num_cpus is None else num_cpus)
    num_workers, capacity = workers.replicas or num_each * num_nodes, 256
    if config.num_gpu_engines:
        on_gpu = [entry for entry in config.entries if entry.on_gpu]
        num_seats = sum(entry.num_seats * entry.replicas * entry.data_parallel_size for entry in on_gpu)
        # Twice the engines' running requests, because about half of the trajectories wait for tools.
        capacity = max(capacity, 2 * num_seats // num_workers)
    # On one host, the sessions are partitioned over the number of ingress processes at the run's first start.
    number_kept = None if first is None or config.cluster is not None else first.ingress_replicas
    sizes = {"replicas": num_workers, "capacity": workers.capacity or capacity}
    return config.model_copy(
        update={
            "ingress_replicas": config.ingress_replicas or number_kept or num_each * num_nodes,
            "workers": workers.model_copy(update=sizes),
        }
    )


def balancer_config(config: ServiceConfig) -> BalancerConfig:
    """Return the settings of the balancer, with its own defaults for settings that the config leaves out."""
    settings, own = config.balancer, BalancerConfig()
    least = own.share.least if settings.min_kv_share is None else settings.min_kv_share
    most = max(own.share.most, least) if settings.max_kv_share is None else settings.max_kv_share
    return BalancerConfig(
        lease_ttl_s=settings.lease_ttl_s,
        usual_growth_tokens=min(own.usual_growth_tokens, model_sizes(config).max_context_tokens / _PRIOR_GROWTHS),
        share=ShareBounds(min(least, most), most),
        limits_kv=settings.limits_kv,
    )


def weight_config(config: ServiceConfig) -> WeightConfig:
    """Return the timeouts of an update's steps, each `CALL_MARGIN_S` longer than the engine's own timeout.

    Raises InvalidRequest if their sum is not less than the timeout of the complete update.
    """
    updates, entries = config.updates, config.entries
    own_stage_s = max(entry.stage_timeout_s for entry in entries)
    own_commit_s = max(entry.commit_timeout_s for entry in entries)
    commit_timeout_s = own_commit_s + CALL_MARGIN_S  # engines use the commit timeout for sleep and wake, too
    steps = WeightConfig(
        straggler_grace_s=updates.straggler_grace_s,
        exact_grace_s=updates.exact_grace_s,
        stage_timeout_s=own_stage_s + CALL_MARGIN_S,
        commit_timeout_s=commit_timeout_s,
        sleep_timeout_s=commit_timeout_s,
        wake_timeout_s=commit_timeout_s,
    )
    if (longest_s := max(steps.stage_timeout_s, commit_timeout_s)) >= ORDER_TIMEOUT_S:
        raise InvalidRequest(
            "engine.stage_timeout_s and engine.commit_timeout_s must be below"
            f" {ORDER_TIMEOUT_S - CALL_MARGIN_S:g} s, the limit of an order to a replica, not"
            f" {longest_s - CALL_MARGIN_S:g} s",
            param="engine.stage_timeout_s",
        )
    if steps.update_timeout_s >= updates.timeout_s:
        raise InvalidRequest(
            f"updates.timeout_s is {updates.timeout_s:g} s, but the steps of an update may take "
            f"{steps.update_timeout_s:g} s in total (engine.stage_timeout_s is {own_stage_s:g}, "
            f"engine.commit_timeout_s {own_commit_s:g}): raise the former, or lower the latter",
            param="updates.timeout_s",
        )
    return steps


def replica_config(config: ServiceConfig, entry: EngineEntry) -> ReplicaConfig:
    """Return the timeouts and settings of a replica."""
    return ReplicaConfig(
        stall_timeout_s=entry.stall_timeout_s,
        first_step_timeout_s=_FIRST_STEP_FACTOR * entry.stall_timeout_s,
        max_pause_s=config.max_pause_s,
        entry=entry.name,
        withheld=frozenset(entry.withheld),
    )
