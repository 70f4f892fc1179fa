"""Invariants of a schedule's history and of its store once all faults are over.

Every function returns problems, so that one schedule reports everything that is wrong with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from agentloop.fleet.desired_state import FleetWeights
from agentloop.fleet.registry import ReplicaState
from agentloop.rollout.turn_journal import YOUNG_S, mark_of
from agentloop.simulation.policy import routed_experts
from agentloop.types import KVPolicy, SplitReason, StopReason, TokenPath, Trajectory
from agentloop.values.aux_rows import AuxKind
from agentloop_servers.coordinator.coordinator import FLEET_WEIGHTS
from tests.support.fleet.adapter_world import held_by
from tests.support.fleet.poisons import FIRST_STATE
from tests.support.fleet.proving_policy import kept_with, logprobs_of
from tests.support.fleet.schedules import World
from tests.support.fleet.whole_world import WholeWorld

# time from a tool's answer until it is on a disk that is not slow, in a trajectory that is not young
SETTLED_S = 1.0


def fleet_problems(world: WholeWorld) -> Iterator[str]:
    """Return problems of the fleet, from the engines rather than the registry."""
    desk = world.coordinator.replicas
    if desk.sync.progress is not None or desk.sync.desired.orders.is_paused:
        yield f"the controller is at {desk.sync.progress}, paused: {desk.sync.desired.orders.is_paused}"
    if held := desk.fleet.held():
        yield f"{[one.replica_id for one in held]} are still held"
    known = {replica.replica_id: replica for replica in desk.fleet.replicas}
    placeable = {replica.replica_id for replica in desk.fleet.placeable()}
    for process in world.processes.values():
        replica = known.pop(process.replica_id, None)
        if not process.is_alive:
            if replica is not None and replica.state not in (ReplicaState.QUARANTINED, ReplicaState.JOINING):
                yield f"{process.replica_id} is dead and {replica.state}"
            continue
        if replica is None or replica.url != process.url or process.replica_id not in placeable:
            yield f"{process.url} is {replica}"
            continue
        engine = process.engine
        if (
            engine.weight_version != desk.fleet.weight_version
            or replica.weight_version != desk.fleet.weight_version
        ):
            yield f"{process.url} holds {engine.weight_version} where {desk.fleet.weight_version} is served"
        if held_by(process) != dict(desk.fleet.adapters):
            yield f"{process.url} has the adapters {held_by(process)} where {desk.fleet.adapters} are served"
        if engine.is_paused or not engine.is_usable:
            yield f"{process.url} takes traffic, paused: {engine.is_paused}, usable: {engine.is_usable}"
    if known:
        yield f"unknown replicas: {sorted(known)}"


def version_problems(world: World) -> Iterator[str]:
    """Return problems of the version that the fleet has reached."""
    history, version = world.history, world.coordinator.replicas.fleet.weight_version
    committed = {done for link in world.links.values() for done in link.commits}
    reported = max((report.version for report in history.reports), default=None)
    if version not in {0} | (history.pushed & committed):
        yield f"the fleet serves {version}, which was never pushed and committed"
    if version is not None and reported is not None and version < reported:
        yield f"the fleet serves {version}, but {reported} was reported"
    if history.served != sorted(history.served):
        yield f"the fleet's version went back: {history.served}"


def lease_problems(world: WholeWorld) -> Iterator[str]:
    """Return leases that are no longer used, and work without a worker."""
    replicas, rollouts = world.coordinator.replicas, world.coordinator.rollouts
    if replicas.balancer.num_holders:
        yield f"{replicas.balancer.num_holders} leases are held"
    for replica in replicas.fleet.replicas:
        if num_leases := replicas.balancer.num_leases(replica.replica_id):
            yield f"{replica.replica_id} has {num_leases} leases"
    for process in world.processes.values():
        load = process.engine.load()
        if process.is_alive and load.num_running + load.num_waiting:
            yield f"{process.url} has {load.num_running} requests running and {load.num_waiting} waiting"
    if left := [one for one in rollouts.queue.rollouts if not one.is_done]:
        yield f"rollouts are left in the queue: {left}"
    for one in world.workers:
        if one.worker.num_running or one.toolbox.num_abandoned:
            yield f"{one.name} runs {one.worker.num_running}, abandoned tools: {one.toolbox.num_abandoned}"
    if world.network.num_late:
        yield f"{world.network.num_late} calls are still on their way"


def record_problems(world: WholeWorld, stored: dict[str, list[Trajectory]]) -> Iterator[str]:
    """Return accepted work without exactly one record, and records that were changed on delivery."""
    ledger = world.ledger
    for rollout_id, groups in ledger.accepted.items():
        wanted = {(group.group_id, index) for group in groups for index in range(group.num_samples)}
        skipped = ledger.skipped[rollout_id]  # acknowledged: it may be deleted before it is read
        read = {(one.group_id, one.sample_index) for one in ledger.delivered[rollout_id]}
        deleted = skipped | (read if rollout_id in ledger.acknowledging else set())
        for what, records, less in (
            ("stored", stored.get(rollout_id, []), deleted),
            ("delivered", ledger.delivered[rollout_id], skipped),
        ):
            found = Counter((one.group_id, one.sample_index) for one in records)
            if set(found) | less != wanted or set(found.values()) - {1}:
                yield f"{rollout_id}: of {len(wanted)} accepted {dict(found)} were {what}"
    sessions = Counter(one.group_id for one in stored.get("sessions", []))
    if sessions != Counter(set(ledger.finished)):
        yield f"sessions {sorted(ledger.finished)} were finished, and {dict(sessions)} are stored"
    for record in stored.get("sessions", []):
        if (alike := ledger.alike.get(record.group_id)) is not None:
            turns = {turn.turn_id for path in record.paths for turn in path.turns}
            missing = {node.node_id for answer in alike for node in answer.choices} - turns
            if missing:
                yield f"session {record.group_id}: {missing} were answered, and are not recorded"
            continue
        if (last_turn := ledger.parts.get(record.group_id)) is not None:
            yield from _lineage_problems(record, last_turn)
            continue
        answers = ledger.answers[record.group_id]
        said = [one for one in record.messages if one.role == "assistant"]
        heard = [one.choices[0].reply.message for one in answers]
        if said != heard:
            yield f"session {record.group_id}: {len(said)} turns are recorded as {said}, and {heard} were heard"
        if not record.is_complete:
            yield f"session {record.group_id} is incomplete: {record.error}"


def _lineage_problems(record: Trajectory, last_turn: str) -> Iterator[str]:
    """Return missing links of a session whose agent used a sub-agent's result and continued from a summary."""
    kinds = sorted("main" if path.lineage is None else path.lineage.kind.value for path in record.paths)
    if kinds != ["compacts", "delegates", "main"] or len(record.credited_paths) != len(record.paths):
        yield f"session {record.group_id}: its paths are {kinds}, of which {record.credited_paths} are credited"
    elif record.path.turns[-1].turn_id != last_turn:
        yield f"session {record.group_id}: its final turn is {record.path.turns[-1].turn_id}, not {last_turn}"


def keep_problems(world: WholeWorld, stored: dict[str, list[Trajectory]]) -> Iterator[str]:
    """Return groups that kept too many complete samples, or cancelled samples although they have too few.

    Rollouts that clients cancelled, or whose records were deleted, are not checked.
    """
    for rollout_id, groups in world.ledger.accepted.items():
        if rollout_id in world.ledger.cancelling | world.ledger.acknowledging:
            continue
        for group in groups:
            own = [one for one in stored.get(rollout_id, []) if one.group_id == group.group_id]
            num_complete = sum(one.is_sound for one in own)
            if any(one.stop_reason is StopReason.ENGINE_FAILED for one in own) and group.task.weight_version:
                continue  # a sample that counted was lost with its worker after its weights were gone
            num_cancelled = sum(one.stop_reason is StopReason.CANCELLED for one in own)
            wanted = group.num_samples if group.keep is None else group.keep
            if num_complete > wanted or (num_cancelled and num_complete < wanted):
                yield (
                    f"{rollout_id}/{group.group_id} keeps {wanted} of {group.num_samples}: "
                    f"{num_complete} are complete, {num_cancelled} cancelled"
                )


def token_problems(world: WholeWorld, stored: dict[str, list[Trajectory]]) -> Iterator[str]:
    """Return tokens that their version would not have sampled there, and spans that do not tile the output."""
    accepted = world.ledger.accepted.items()
    demands = {(name, group.group_id): group.task.weight_version for name, groups in accepted for group in groups}
    for records in stored.values():
        for record in records:
            name = f"{record.rollout_id}/{record.group_id}/{record.sample_index}"
            own = record.group_id if record.rollout_id == "sessions" else record.rollout_id
            if any(word in (record.error or "") for word in ("auxiliary", *AuxKind)):
                yield f"{name} failed because of its auxiliary rows: {record.error}"
            if record.adapter != world.adapter_of(own):
                yield f"{name} says that {record.adapter!r} sampled it"
            demand = demands.get((record.rollout_id, record.group_id))
            for path in record.paths:
                known = world.known_versions(record.adapter)
                problems = _path_problems(world.kv_policy, path, known, record.adapter)
                yield from (f"{name}: {problem}" for problem in (*problems, *_aux_problems(path)))
                if demand and not all(demand.accepts(span.version) for span in path.weight_versions):
                    yield f"{name}: {demand} was answered by {path.weight_versions}"


def staleness_problems(world: WholeWorld, stored: dict[str, list[Trajectory]]) -> Iterator[str]:
    """Return tokens in a mask that are older than another token of the same path allows."""
    for name, groups in world.ledger.accepted.items():
        limits = {group.group_id: group.staleness for group in groups}
        for record in stored.get(name, []):
            limit = limits[record.group_id]
            for path in record.paths if limit is not None and record.is_sound else ():
                trained = [
                    one.version for one in path.weight_versions if path.response_mask[one.start : one.end].any()
                ]
                if limit is not None and trained and max(trained) - min(trained) > limit.max_staleness:
                    yield f"{name}/{record.group_id}/{record.sample_index}: {limit} and {trained} are trained on"


def _aux_problems(path: TokenPath) -> Iterator[str]:
    """Return auxiliary rows that do not belong to the recorded tokens at their positions."""
    sampled = [index for turn in path.turns for index in range(turn.start, turn.end)]
    if not sampled:
        return
    ids, experts, mask = (
        [*path.prompt_ids.tolist(), *path.response_ids.tolist()],
        path.routed_experts,
        path.sampling_mask,
    )
    expected = routed_experts(ids, 0, len(path.prompt_ids) + sampled[-1]).table
    if experts is None or not np.array_equal(experts, expected):
        yield f"its routed experts are {None if experts is None else experts.shape}, not {expected.shape}"
    kept = {index: kept_with(ids[len(path.prompt_ids) + index]) for index in sampled}
    wanted = [one for index in sampled for one in kept[index]]
    ends = np.cumsum([len(kept.get(index, ())) for index in range(len(path.response_ids))])
    if mask is None or mask[0].tolist() != wanted or not np.array_equal(mask[1], ends):
        yield "its sampling mask is not that of its tokens"


def _path_problems(kv_policy: KVPolicy, path: TokenPath, known: set[int], adapter: str) -> Iterator[str]:
    turns = [index for turn in path.turns for index in range(turn.start, turn.end)]
    spanned = [index for span in path.weight_versions for index in range(span.start, span.end)]
    if spanned != turns:
        yield f"the spans {path.weight_versions} do not tile the turns {path.turns}"
        return
    unknown = {span.version for span in path.weight_versions} - known
    if unknown:
        yield f"versions {unknown} were never pushed, or refused"
    ids, first = [*path.prompt_ids.tolist(), *path.response_ids.tolist()], len(path.prompt_ids)
    for turn in path.turns:
        own = [span for span in path.weight_versions if span.start < turn.end and span.end > turn.start]
        if [span.version for span in own] != sorted({span.version for span in own}):
            yield f"a turn's versions are {own}"
        if kv_policy is not KVPolicy.RECOMPUTE and known != {0} and not adapter:
            continue  # KV of several versions was mixed, as the policy allows
        for span in own:
            start, end = max(span.start, turn.start), min(span.end, turn.end)
            expected = logprobs_of(ids, first + start, first + end, span.version, adapter)
            if path.logprobs[start:end].tolist() != expected:
                yield f"[{start}, {end}) was not sampled under version {span.version} after what is recorded"


def tool_problems(world: WholeWorld) -> Iterator[str]:
    """Return tool answers that were on disk when their worker was killed, and were requested again.

    If a living worker may be considered lost, two workers run a trajectory for a while, and both call the tool.
    """
    happened = world.history.counts
    if not world.network.is_perfect or any(
        happened[one] for one in ("_stall_worker", "_stall_coordinator", "_crash")
    ):
        return
    limits = {
        f"{name}/{group.group_id}": group.staleness
        for name, groups in world.ledger.accepted.items()
        for group in groups
    }
    everyone = (*world.workers, *world.dead)
    begin_again = {name for one in everyone for name in one.tool.without_snapshot}
    for dead in world.dead:
        if not dead.has_good_disk:
            continue  # a journal that could not be written has ended
        written_by, begun_at = dead.died_at - SETTLED_S, dict[str, float]()
        for one in dead.tool.calls:
            begun_at[one.trajectory_id] = min(one.begun_at, begun_at.get(one.trajectory_id, math.inf))
        kept = {
            (one.trajectory_id, one.key)
            for one in dead.tool.calls
            if one.ended_at < written_by and begun_at[one.trajectory_id] < written_by - YOUNG_S
            if one.trajectory_id not in begin_again and mark_of(one.trajectory_id) not in world.damaged_journals
        }
        for other in everyone:
            for one in other.tool.calls if other is not dead else ():
                begins_anew = limits[one.trajectory_id.rpartition("/")[0]] is not None
                if (one.trajectory_id, one.key) in kept and one.begun_at > dead.died_at and not begins_anew:
                    yield f"{other.name} asked {one.key} of {one.trajectory_id} again, which {dead.name} had"


def state_problems(stored: dict[str, list[Trajectory]]) -> Iterator[str]:
    """Return answers of an environment that do not start in the state that the previous answer left."""
    for record in (record for records in stored.values() for record in records):
        expected = FIRST_STATE
        # A compaction leaves earlier tool results in the paths before it.
        is_compacted = any(path.split_reason is SplitReason.COMPACTED for path in record.paths)
        messages = (
            [message for path in record.paths for message in path.messages] if is_compacted else record.messages
        )
        for message in messages:
            if message.role == "tool" and message.content.startswith("noted ") and ": " in message.content:
                before, after = message.content.partition(": ")[2].split()
                if before != expected:
                    name = f"{record.rollout_id}/{record.group_id}/{record.sample_index}"
                    yield f"{name}: the environment went from {expected} to {before}"
                expected = after


async def restart_problems(world: WholeWorld) -> list[str]:
    """Return differences between the actual state and the state that a coordinator started now would restore."""
    version = world.coordinator.replicas.fleet.weight_version
    saved = await world.run_store.saved_state(FLEET_WEIGHTS, FleetWeights) or FleetWeights()
    if version and (saved.served is None or saved.served.version < version or saved.pending is not None):
        return [f"the fleet serves {version}, but a restart would go to {saved}"]
    return []


def file_problems(world: WholeWorld) -> Iterator[str]:
    """Return journals of trajectories that have ended.

    A journal with a damaged header is removed only when it is old.
    """
    left = [path for path in world.turns.rglob("*") if path.is_file() and path.stat().st_size]
    if left := [path for path in left if path.name.partition(".")[0] not in world.damaged_journals]:
        yield f"journals are left: {left}"
