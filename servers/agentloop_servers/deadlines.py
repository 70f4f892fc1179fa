"""The deadlines of a weight update, from the engine's own to the whole call, each longer than what it waits for.

    engine: stage, commit  <  coordinator: each step  <  all steps together  <  ingress: the update  <  its call
                           <  an order to a replica

The first is the one that says what went wrong; where they do not nest, another one ends the call without a reason.
"""

from __future__ import annotations

from agentloop.errors import InvalidRequest
from agentloop.fleet.weight_update import WeightConfig
from agentloop_servers.config import ServiceConfig
from agentloop_servers.engine_config import EngineEntry
from agentloop_servers.replica.client import ORDER_TIMEOUT_S
from agentloop_servers.replica.server import ReplicaConfig

FIRST_STEP_FACTOR = 5  # an engine may compile before its first step
CALL_MARGIN_S = 15.0
"""The time by which a call lasts longer than what it asks for."""


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
    stall_timeout_s = entry.stall_timeout_s
    return ReplicaConfig(
        stall_timeout_s=stall_timeout_s,
        first_step_timeout_s=FIRST_STEP_FACTOR * stall_timeout_s,
        max_pause_s=config.max_pause_s,
        entry=entry.name,
        withheld=frozenset(entry.withheld),
    )
