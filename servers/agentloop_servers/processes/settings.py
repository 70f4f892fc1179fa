"""The settings of the service's parts that follow from its config: processes, balancer, deadlines.

Deadlines of a weight update nest, each longer than what it waits for:

    engine: stage, commit  <  coordinator: each step  <  all steps together  <  ingress: the update  <  its call
                           <  an order to a replica

The first is the one that says what went wrong; where they do not nest, another one ends the call without a reason.
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
"""The time by which a call lasts longer than what it asks for."""

_FIRST_STEP_FACTOR = 5  # an engine may compile before its first step
_PRIOR_GROWTHS = 4  # of a trajectory, that a whole context holds: what is expected before any has ended
_CPUS_OF_AN_ENGINE = 2  # its process and its front end, which step and answer all the time
_CPUS_OF_OTHERS = 2  # the coordinator, and Ray
_CPUS_OF_EACH = 3  # CPUs for one process of each kind, and a little for users' tools
_MOST_OF_AN_ENGINE = 4
_MAX_PROCESSES = 16  # of a kind


def processes_for(num_engines: int, num_cpus: int) -> int:
    """Return how many ingress processes, and as many workers, go with so many engines on GPUs.

    An engine of a 4B model ends about 65 turns of 256 tokens a second, which takes an eighth of a core of workers
    or of ingress processes, and half a core of these where all are streamed. But turns that began together end
    together: of 500 at 2 ms each, the last waits a second for the one process that has them all, and its place in
    the engine stands idle. So an engine has four processes of each kind, as far as engines leave CPUs for them.
    """
    spare = num_cpus - _CPUS_OF_AN_ENGINE * num_engines - _CPUS_OF_OTHERS
    return max(1, min(spare // _CPUS_OF_EACH, _MOST_OF_AN_ENGINE * num_engines, _MAX_PROCESSES))


def sized(config: ServiceConfig, run_dir: Path, num_cpus: int | None = None, num_nodes: int = 1) -> ServiceConfig:
    """Return the config with the numbers of its processes. `num_cpus`: of a node; None: this one's.

    Without GPUs there is one of each kind on each node. On one host the number of ingress processes is kept with
    the run, whose sessions they share. Workers take twice as many trajectories as engines have seats: the others
    wait for tools. Raises InvalidRequest if the run's own config cannot be read.
    """
    num_each, workers, first = 1, config.workers, saved_config(run_dir)
    if config.num_gpu_engines:
        num_engines = -(-config.num_gpu_engines // num_nodes)
        num_each = processes_for(num_engines, usable_cpus() if num_cpus is None else num_cpus)
    num_workers, capacity = workers.replicas or num_each * num_nodes, 256
    if config.num_gpu_engines:
        on_gpu = [entry for entry in config.entries if entry.on_gpu]
        num_seats = sum(entry.num_seats * entry.replicas * entry.data_parallel_size for entry in on_gpu)
        capacity = max(capacity, 2 * num_seats // num_workers)
    number_kept = None if first is None or config.cluster is not None else first.ingress_replicas
    sizes = {"replicas": num_workers, "capacity": workers.capacity or capacity}
    return config.model_copy(
        update={
            "ingress_replicas": config.ingress_replicas or number_kept or num_each * num_nodes,
            "workers": workers.model_copy(update=sizes),
        }
    )


def balancer_config(config: ServiceConfig) -> BalancerConfig:
    """Return the settings of the balancer; those that are not given are its own."""
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
    """Return the deadlines of an update's steps: a little longer than the engine's own, which say what went wrong.

    Raises InvalidRequest unless they fit, all together, into the time of the whole update.
    """
    updates, entries = config.updates, config.entries
    own_stage_s = max(entry.stage_timeout_s for entry in entries)
    own_commit_s = max(entry.commit_timeout_s for entry in entries)
    commit_timeout_s = own_commit_s + CALL_MARGIN_S  # an engine's own sleep and wake have the same
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
            f"engine.stage_timeout_s and engine.commit_timeout_s are below {ORDER_TIMEOUT_S - CALL_MARGIN_S:g} s, "
            f"the most that an order to a replica takes, and not {longest_s - CALL_MARGIN_S:g} s",
            param="engine.stage_timeout_s",
        )
    if steps.update_timeout_s >= updates.timeout_s:
        raise InvalidRequest(
            f"updates.timeout_s is {updates.timeout_s:g} s, and the steps of an update may take "
            f"{steps.update_timeout_s:g} s together (engine.stage_timeout_s is {own_stage_s:g}, "
            f"engine.commit_timeout_s {own_commit_s:g}): raise the one, or lower the others",
            param="updates.timeout_s",
        )
    return steps


def replica_config(config: ServiceConfig, entry: EngineEntry) -> ReplicaConfig:
    """Return the bounds of a replica."""
    return ReplicaConfig(
        stall_timeout_s=entry.stall_timeout_s,
        first_step_timeout_s=_FIRST_STEP_FACTOR * entry.stall_timeout_s,
        max_pause_s=config.max_pause_s,
        entry=entry.name,
        withheld=frozenset(entry.withheld),
    )
