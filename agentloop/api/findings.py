"""Diagnosis of a service that is stuck or slow: the causes in one snapshot, the most decisive first.

Pure functions of the service status and the live activities, so that every cause can be tested without a service.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from agentloop.api.coordinator import ReplicaStatus, ServiceStatus
from agentloop.api.flight import Doing, FlightPage, FlightRow

SLOW_TOOL_S = 30.0
SLOW_TURN_S = 120.0
SLOW_UPDATE_S = 10.0
LONG_WAIT_S = 10.0
SILENT_SESSION_S = 60.0
UNREAD_S = 300.0
RECENT_BLOCK_S = 60.0
_HEARD_S = 5.0  # a heartbeat up to this age is normal


class Cause(StrEnum):
    """The cause of a finding."""

    PAUSED = "paused"
    ASLEEP = "asleep"
    DISK_FULL = "disk_full"
    STORE_AWAY = "store_away"
    STOPPING = "stopping"
    LOADING = "loading"
    NO_REPLICA = "no_replica"
    UPDATE = "update"
    SILENT_WORKER = "silent_worker"
    NO_WORKER = "no_worker"
    WORKERS_FULL = "workers_full"
    STALE = "stale"
    STORE = "store"
    NO_ROOM = "no_room"
    REPLICA = "replica"
    DRAINED = "drained"
    NO_PLACE = "no_place"
    TOOL = "tool"
    REWARD = "reward"
    LOOP = "loop"
    TURN = "turn"
    BLOCKED = "blocked"
    PRIORITY = "priority"
    UNREAD = "unread"
    SESSION = "session"
    NOTHING = "nothing"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause, with a sentence that names the evidence and the recommended action."""

    cause: Cause
    text: str
    action: str
    since_s: float | None = None  # duration; None: unknown


def findings(status: ServiceStatus, flights: FlightPage) -> tuple[Finding, ...]:
    """Return the causes that delay the service, the most decisive first. Never empty.

    A service without problems has one finding, LONG or NOTHING.
    """
    causes = [
        *_of_service(status),
        *_of_update(status),
        *_of_workers(status, flights),
        *_of_queue(status, flights),
        *_of_replicas(status),
        *_of_flights(flights),
        *_of_blocked(flights),
        *_of_rollouts(status),
        *_of_sessions(flights),
    ]
    return tuple(causes) or (_all_is_well(status, flights),)


def degraded(status: ServiceStatus) -> tuple[str, ...]:
    """Return the sentences of the findings about the service itself, its replicas and its hosts."""
    return tuple(finding.text for finding in (*_of_service(status), *_of_replicas(status)))


def waiting_calls(status: ServiceStatus) -> str:
    """Return a sentence with the number, users and waiting times of sessions and calls that wait for KV cache."""
    queue = status.queue
    users = ", ".join(f"{user.name} {user.waiting_calls}" for user in status.users if user.waiting_calls)
    times = f"the longest for {queue.longest_wait_s:.0f} s, the median for {queue.median_wait_s:.0f} s"
    return f"{queue.num_waiting} session(s) and calls wait for KV cache{f' ({users})' if users else ''}: {times}"


def about(name: str, flights: FlightPage) -> Finding | None:
    """Return the activity of the trajectory or session with this id; None if it is not in `flights`."""
    rows = (*flights.oldest, *flights.longest_tools, *flights.sessions)
    row = next((row for row in rows if row.id == name), None)
    if row is None:
        return None
    where = f" on {row.replica}" if row.replica else ""
    flight = row.flight
    activity = f"{flight.name} for {flight.for_s:.0f} s{where}"
    left = "" if flight.left_s is None else f"; its deadline is in {flight.left_s:.0f} s"
    text = f"{row.id}: {activity}, turn {flight.turn}, {flight.num_tokens} tokens{left}"
    return Finding(_CAUSE_OF.get(flight.doing, Cause.LONG), text, _ACTION_OF.get(flight.doing, ""), flight.for_s)


_CAUSE_OF = {
    Doing.PLACE: Cause.NO_PLACE,
    Doing.TOOL: Cause.TOOL,
    Doing.REWARD: Cause.REWARD,
    Doing.LOOP: Cause.LOOP,
}
_ACTION_OF = {
    Doing.PLACE: "run `agentloop why` to see why the service has no capacity",
    Doing.TOOL: "check the tool; it is cancelled at its timeout",
    Doing.REWARD: "check the reward function; it is cancelled at `limits.reward_timeout_s`",
    Doing.LOOP: "check the code of the loop or the agent; it is cancelled at `limits.timeout_s`",
}


def _of_service(status: ServiceStatus) -> Iterator[Finding]:
    if status.is_stopping:
        text = "the service is stopping: no work is accepted or started"
        yield Finding(Cause.STOPPING, text, "start the service again; it resumes its work")
    if status.is_disk_full:
        text = "the run's disk is full: records and new work wait for free space"
        yield Finding(Cause.DISK_FULL, text, "free disk space, or acknowledge the records that were read")
    if status.store_away:
        text = f"the run's store is unavailable: records and new work wait: {status.store_away}"
        yield Finding(Cause.STORE_AWAY, text, "start the database, or repair the network to it; no data is lost")
    if status.paused_s is not None:
        text = f"paused for {status.paused_s:.0f} s{_because(status.pause_reason)}"
        yield Finding(Cause.PAUSED, text, "agentloop resume", status.paused_s)
    if status.asleep_s is not None:
        text = f"asleep for {status.asleep_s:.0f} s ({', '.join(status.asleep)}){_because(status.sleep_reason)}"
        yield Finding(Cause.ASLEEP, text, "agentloop wake", status.asleep_s)
    elif not status.is_ready:  # a sleeping fleet takes no traffic either
        yield _no_traffic(status)
    if status.store is not None and status.store.error:
        latest = "the latest version" if status.store.latest is None else f"version {status.store.latest}"
        text = f"the service cannot follow the store of versions to {latest}: {status.store.error}"
        action = "the fleet keeps its weights and retries; see docs/guides/published-versions.md"
        yield Finding(Cause.STORE, text, action)
    if status.num_workers == 0 and (num_queued := sum(rollout.num_queued for rollout in status.rollouts)):
        text = f"{num_queued} samples wait, but no worker is running"
        yield Finding(Cause.NO_WORKER, text, "see service.log for the reason that no worker starts")


def _no_traffic(status: ServiceStatus) -> Finding:
    text = "no replica takes traffic"
    if status.replicas:
        is_dummy = status.weight_version is None
        action = "push weights: the replicas have dummy weights" if is_dummy else "see each replica's error and log"
        return Finding(Cause.NO_REPLICA, text, action)
    if status.starting:
        return Finding(Cause.LOADING, f"{text}: none has joined yet", "wait, or see the log of the loading replica")
    last = f"; the last one that left: {status.lost[-1].reason}" if status.lost else ""
    return Finding(Cause.NO_REPLICA, f"{text}{last}", "see service.log and Ray's resources")


def _of_update(status: ServiceStatus) -> Iterator[Finding]:
    if (update := status.update) is not None and update.age_s >= SLOW_UPDATE_S:
        waits = f", waiting for {', '.join(update.waits_for)}" if update.waits_for else ""
        failed = f"; failed: {'; '.join(update.failures)}" if update.failures else ""
        state = f"has been {update.state} for {update.age_s:.0f} s"
        text = f"the update to version {update.version} {state}{waits}{failed}"
        action = "check that the sending trainer is running; otherwise the update ends at its timeout"
        yield Finding(Cause.UPDATE, text, action, update.age_s)


def _of_workers(status: ServiceStatus, flights: FlightPage) -> Iterator[Finding]:
    for worker, silent_s in flights.silent:
        places = [block.place for block in flights.blocked if block.process == f"worker-{worker}" and block.place]
        at = f", last at {places[0]}" if places else ""
        text = f"worker {worker} sent no report for {silent_s:.0f} s: its event loop is blocked{at}, or it is lost"
        action = "see `event_loop_blocked` in service.log for the file and line"
        yield Finding(Cause.SILENT_WORKER, text, action, silent_s)
    num_waiting = sum(rollout.num_queued - rollout.num_held for rollout in status.rollouts)
    are_full = status.num_workers > 0 and flights.num_free == 0
    # While engines generate, full workers are normal.
    if num_waiting and are_full and not status.queue.reason and not _is_busy(status, flights):
        text = f"{num_waiting} samples wait: all slots of {status.num_workers} worker(s) are in use"
        yield Finding(Cause.WORKERS_FULL, text, "raise `workers.capacity` or `workers.replicas`")


def _of_queue(status: ServiceStatus, flights: FlightPage) -> Iterator[Finding]:
    num_held = sum(rollout.num_held for rollout in status.rollouts)
    num_queued = sum(rollout.num_queued for rollout in status.rollouts)
    is_running = any(rollout.num_running for rollout in status.rollouts)
    if 0 < num_held == num_queued and not is_running and not status.update:
        text = f"{num_held} samples are held until new weights arrive: by their version, adapter or staleness limit"
        yield Finding(Cause.STALE, text, "push weights, or raise `max_staleness` or `trajectories_per_version`")
    # While engines generate, a queue is normal.
    if status.queue.reason and status.is_ready and not _is_busy(status, flights):
        num = status.queue.num_queued + status.queue.num_waiting
        text = f"{num} samples and calls wait for capacity, but no engine has work: {status.queue.reason}"
        action = "trajectories with KV reservations are running tools; raise `balancer.min_kv_share`"
        yield Finding(Cause.NO_ROOM, text, action)
    elif status.is_ready and status.queue.longest_wait_s >= LONG_WAIT_S:
        action = "add replicas, or run fewer agents concurrently; the users' shares order this queue"
        yield Finding(Cause.NO_ROOM, waiting_calls(status), action, status.queue.longest_wait_s)


def _of_replicas(status: ServiceStatus) -> Iterator[Finding]:
    for replica in status.replicas:
        name = f"replica {replica.replica_id}"
        if replica.state not in ("ready", "updating", "asleep"):
            text = f"{name} is {replica.state}{_because(replica.error or _silence(replica))}"
            yield Finding(
                Cause.REPLICA, text, "other replicas took over its work; if the state persists, see its log"
            )
        if replica.is_thrashing and replica.kv_hit_rate is not None:
            hits = f"turns find only {replica.kv_hit_rate:.0%} of their earlier KV cache"
            text = f"{name} recomputes contexts: {hits}; fewer trajectories start until this recovers"
            yield Finding(Cause.REPLICA, text, "wait; if the state persists, lower `balancer.max_kv_share`")
        if replica.is_noise:
            text = f"{name} has broken weights: its sampled logprobs stay at -ln(vocabulary)"
            yield Finding(Cause.REPLICA, text, "push weights again, then run `agentloop check-logprobs`")
    for start in status.starting:
        state = "waiting to start" if start.reason else "loading"
        text = f"replica {start.replica_id} has been {state} for {start.waiting_s:.0f} s{_because(start.reason)}"
        yield Finding(Cause.LOADING, text, "wait, or see its log", start.waiting_s)
    for host in status.drained:
        yield Finding(Cause.DRAINED, f"{host} is drained: it receives no work", f"agentloop drain {host} --undo")


def _of_flights(flights: FlightPage) -> Iterator[Finding]:
    late = [row for row in flights.longest_tools if row.flight.for_s >= SLOW_TOOL_S]
    placing = [row for row in flights.oldest if row.flight.doing is Doing.PLACE and row.flight.for_s >= SLOW_TOOL_S]
    for doing, cause in _CAUSE_OF.items():
        rows = [row for row in (*late, *placing) if row.flight.doing is doing]
        if rows:
            yield Finding(cause, _slowest(rows), _ACTION_OF[doing], rows[0].flight.for_s)
    prefilling = [row for row in flights.oldest if row.flight.doing is Doing.PREFILL]
    if rows := [row for row in prefilling if row.flight.for_s >= SLOW_TURN_S]:
        action = "the engine has many requests, or it hangs and is stopped at `stall_timeout_s`"
        yield Finding(Cause.TURN, _slowest(rows), action, rows[0].flight.for_s)


def _of_blocked(flights: FlightPage) -> Iterator[Finding]:
    for block in flights.blocked:
        if block.ago_s < RECENT_BLOCK_S:
            text = f"the event loop of {block.process} was blocked {block.ago_s:.0f} s ago"
            if block.place:
                action = "fix this code: await instead of blocking, or run it in a thread"
                yield Finding(Cause.BLOCKED, f"{text}, at {block.place}", action, block.ago_s)
            else:
                action = "run fewer processes on the host, or add CPUs; see `host_short_of_cpu` in service.log"
                yield Finding(Cause.BLOCKED, f"{text}: its host was short of CPU", action, block.ago_s)


def _of_rollouts(status: ServiceStatus) -> Iterator[Finding]:
    rollouts = status.rollouts
    waiting = [each for each in rollouts if each.num_queued > each.num_held and not each.num_running]
    ahead = max((each.priority for each in rollouts if each.num_running), default=None)
    lower = [each for each in waiting if ahead is not None and each.priority < ahead]
    if lower:
        names = ", ".join(each.rollout_id for each in lower[:3])
        priority = max(each.priority for each in lower)
        text = f"{names}: samples of priority {ahead} start before those of priority {priority}"
        yield Finding(Cause.PRIORITY, text, "submit with a higher `priority`, or wait")
    for rollout_id, unread_s in status.unread:
        if unread_s >= UNREAD_S:
            text = f"the records of {rollout_id} are not read: the oldest has waited for {unread_s:.0f} s"
            yield Finding(Cause.UNREAD, text, "check that the trainer runs and reads records", unread_s)


def _of_sessions(flights: FlightPage) -> Iterator[Finding]:
    # A session that waits for capacity holds no reservation.
    idle = (row for row in flights.sessions if row.flight.doing is not Doing.PLACE)
    rows = [row for row in idle if row.flight.for_s >= SILENT_SESSION_S]
    if rows:
        text = f"{len(rows)} session(s) hold a KV reservation without making a call; the longest: {rows[0].id}"
        action = "check that the agent runs; finish the session, or give it a shorter `ttl_s`"
        yield Finding(Cause.SESSION, text, action, rows[0].flight.for_s)


def _all_is_well(status: ServiceStatus, flights: FlightPage) -> Finding:
    if flights.oldest:
        row, activities = flights.oldest[0], ", ".join(f"{num} {name}" for name, num in flights.doing[:4])
        text = f"no problem found: {activities}; the oldest, {row.id}, is at turn {row.flight.turn}"
        return Finding(Cause.LONG, text, "wait", row.flight.age_s)
    if any(rollout.num_queued for rollout in status.rollouts):
        return Finding(Cause.LONG, "the submitted samples are about to start", "wait")
    return Finding(Cause.NOTHING, "nothing runs: all submitted work is finished", "submit tasks")


def _is_busy(status: ServiceStatus, flights: FlightPage) -> bool:
    is_generating = any(name in (Doing.PREFILL, Doing.DECODE) for name, _ in flights.doing)
    return is_generating or any(replica.load.num_running for replica in status.replicas)


def _slowest(rows: list[FlightRow]) -> str:
    row = rows[0]
    others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    left = "" if row.flight.left_s is None else f", deadline in {row.flight.left_s:.0f} s"
    where = row.worker or row.replica
    return f"{row.id} has waited for its {row.flight.name} for {row.flight.for_s:.0f} s{left} on {where}{others}"


def _silence(replica: ReplicaStatus) -> str:
    return f"no heartbeat for {replica.heartbeat_age_s:.0f} s" if replica.heartbeat_age_s > _HEARD_S else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
