"""Why nothing moves, or why it is slow: findings from one snapshot of the service, the most decisive first.

A pure function of what `GET /status` and the flights say, so that each cause can be staged without a service.
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
_HEARD_S = 5.0  # the age of a heartbeat that is no evidence


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
    """One cause, in a sentence that names its evidence, and what to do about it."""

    cause: Cause
    text: str
    action: str
    since_s: float | None = None  # None: not known


def findings(status: ServiceStatus, flights: FlightPage) -> tuple[Finding, ...]:
    """Return what keeps the service from going on, the most decisive first; never empty.

    A service in which all that is begun goes on has one finding, LONG or NOTHING.
    """
    found = [
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
    return tuple(found) or (_all_is_well(status, flights),)


def degraded(status: ServiceStatus) -> tuple[str, ...]:
    """Return why the service does not all that it could: the sentences about itself, its replicas and hosts."""
    return tuple(one.text for one in (*_of_service(status), *_of_replicas(status)))


def waiting_calls(status: ServiceStatus) -> str:
    """Return in a sentence how many sessions and calls wait for KV, for how long, and whose they are."""
    queue = status.queue
    users = ", ".join(f"{one.name} {one.waiting_calls}" for one in status.users if one.waiting_calls)
    times = f"the longest for {queue.longest_wait_s:.0f} s, the median {queue.median_wait_s:.0f} s"
    return f"{queue.num_waiting} session(s) and calls wait for KV{f' ({users})' if users else ''}: {times}"


def about(name: str, flights: FlightPage) -> Finding | None:
    """Return what the trajectory or session of this id waits for; None if it is not among the flights."""
    rows = (*flights.oldest, *flights.longest_tools, *flights.sessions)
    row = next((row for row in rows if row.id == name), None)
    if row is None:
        return None
    where = f" on {row.replica}" if row.replica else ""
    flight = row.flight
    what = f"{flight.name} since {flight.for_s:.0f} s{where}"
    left = "" if flight.left_s is None else f"; its deadline is in {flight.left_s:.0f} s"
    text = f"{row.id}: {what}, turn {flight.turn}, {flight.num_tokens} tokens{left}"
    return Finding(_CAUSE_OF.get(flight.doing, Cause.LONG), text, _ACTION_OF.get(flight.doing, ""), flight.for_s)


_CAUSE_OF = {
    Doing.PLACE: Cause.NO_PLACE,
    Doing.TOOL: Cause.TOOL,
    Doing.REWARD: Cause.REWARD,
    Doing.LOOP: Cause.LOOP,
}
_ACTION_OF = {
    Doing.PLACE: "see what the service as a whole waits for: agentloop why",
    Doing.TOOL: "look at the tool; it is cut at its timeout",
    Doing.REWARD: "look at the reward function; it is cut at `limits.reward_timeout_s`",
    Doing.LOOP: "look at the loop's own code, or the agent's; it is cut at `limits.timeout_s`",
}


def _of_service(status: ServiceStatus) -> Iterator[Finding]:
    if status.is_stopping:
        text = "the service is stopping: nothing is accepted or begun"
        yield Finding(Cause.STOPPING, text, "start the service again; it goes on where it was")
    if status.is_disk_full:
        text = "the run's disk is full: records and new work wait until there is room"
        yield Finding(Cause.DISK_FULL, text, "make room, or acknowledge what was read")
    if status.store_away:
        text = f"records and new work wait for the run's store: {status.store_away}"
        yield Finding(Cause.STORE_AWAY, text, "start the database, or repair the network to it; nothing is lost")
    if status.paused_s is not None:
        text = f"paused for {status.paused_s:.0f} s{_because(status.pause_reason)}"
        yield Finding(Cause.PAUSED, text, "agentloop resume", status.paused_s)
    if status.asleep_s is not None:
        text = f"asleep for {status.asleep_s:.0f} s ({', '.join(status.asleep)}){_because(status.sleep_reason)}"
        yield Finding(Cause.ASLEEP, text, "agentloop wake", status.asleep_s)
    elif not status.is_ready:
        yield _no_traffic(status)
    if status.store is not None and status.store.error:
        latest = "its pointer" if status.store.latest is None else f"version {status.store.latest}"
        text = f"the store of versions is not followed to {latest}: {status.store.error}"
        yield Finding(Cause.STORE, text, "the fleet serves on, and tries again; see docs/guides/contracts.md")
    if status.num_workers == 0 and (num_queued := sum(one.num_queued for one in status.rollouts)):
        text = f"{num_queued} samples wait, and there is no worker"
        yield Finding(Cause.NO_WORKER, text, "look at service.log: why do workers not start?")


def _no_traffic(status: ServiceStatus) -> Finding:
    text = "no replica takes traffic"
    if status.replicas:
        is_dummy = status.weight_version is None
        action = "push weights: they are dummy ones" if is_dummy else "see each one's reason, and its log"
        return Finding(Cause.NO_REPLICA, text, action)
    if status.starting:
        return Finding(Cause.LOADING, f"{text}: none has joined yet", "wait, or look at the log of what loads")
    last = f"; the last one that left: {status.lost[-1].reason}" if status.lost else ""
    return Finding(Cause.NO_REPLICA, f"{text}{last}", "look at service.log and Ray's resources")


def _of_update(status: ServiceStatus) -> Iterator[Finding]:
    if (update := status.update) is not None and update.age_s >= SLOW_UPDATE_S:
        waits = f", waits for {', '.join(update.waits_for)}" if update.waits_for else ""
        failed = f"; failed: {'; '.join(update.failures)}" if update.failures else ""
        text = f"the update to version {update.version} is {update.state} since {update.age_s:.0f} s{waits}{failed}"
        yield Finding(Cause.UPDATE, text, "it ends at its timeouts; is the trainer that sends alive?", update.age_s)


def _of_workers(status: ServiceStatus, flights: FlightPage) -> Iterator[Finding]:
    for worker, silent_s in flights.silent:
        blocked = [one.place for one in flights.blocked if one.process == f"worker-{worker}" and one.place]
        at = f", last at {blocked[0]}" if blocked else ""
        text = f"worker {worker} is silent since {silent_s:.0f} s: its event loop is blocked{at}, or it is lost"
        yield Finding(Cause.SILENT_WORKER, text, "service.log: `event_loop_blocked` has file and line", silent_s)
    num_waiting = sum(one.num_queued - one.num_held for one in status.rollouts)
    are_full = status.num_workers > 0 and flights.num_free == 0
    if num_waiting and are_full and not status.queue.reason and not _is_busy(status, flights):
        text = f"{num_waiting} samples wait: all places of {status.num_workers} workers are taken"
        yield Finding(Cause.WORKERS_FULL, text, "raise `workers.capacity` or `workers.replicas`")


def _of_queue(status: ServiceStatus, flights: FlightPage) -> Iterator[Finding]:
    num_held = sum(one.num_held for one in status.rollouts)
    num_queued = sum(one.num_queued for one in status.rollouts)
    if 0 < num_held == num_queued and not any(one.num_running for one in status.rollouts) and not status.update:
        text = f"{num_held} samples are held until new weights come: by their version, adapter or staleness limit"
        yield Finding(Cause.STALE, text, "push weights, or raise `max_staleness` or `trajectories_per_version`")
    if status.queue.reason and status.is_ready and not _is_busy(status, flights):
        num = status.queue.num_queued + status.queue.num_waiting
        text = f"{num} samples and calls wait for a place, and no engine has work: {status.queue.reason}"
        yield Finding(Cause.NO_ROOM, text, "those with places are at their tools; raise `balancer.min_kv_share`")
    elif status.is_ready and status.queue.longest_wait_s >= LONG_WAIT_S:
        action = "add replicas, or run fewer agents at a time; users' shares order this queue"
        yield Finding(Cause.NO_ROOM, waiting_calls(status), action, status.queue.longest_wait_s)


def _of_replicas(status: ServiceStatus) -> Iterator[Finding]:
    for replica in status.replicas:
        name = f"replica {replica.replica_id}"
        if replica.state not in ("ready", "updating", "asleep"):
            text = f"{name} is {replica.state}{_because(replica.error or _silence(replica))}"
            yield Finding(Cause.REPLICA, text, "others have its work; if it stays so, look at its log")
        if replica.is_thrashing and replica.kv_hit_rate is not None:
            found = f"turns that return find {replica.kv_hit_rate:.0%} of their KV"
            text = f"{name} computes contexts again: {found}; less may begin until they do"
            yield Finding(Cause.REPLICA, text, "wait; if it stays so, lower `balancer.max_kv_share`")
        if replica.is_noise:
            text = f"{name} samples noise: its logprobs stay at -ln(vocabulary)"
            yield Finding(Cause.REPLICA, text, "push weights again; `agentloop check-logprobs`")
    for start in status.starting:
        what = "waits to start" if start.reason else "loads"
        text = f"replica {start.replica_id} {what} since {start.waiting_s:.0f} s{_because(start.reason)}"
        yield Finding(Cause.LOADING, text, "wait, or look at its log", start.waiting_s)
    for host in status.drained:
        yield Finding(Cause.DRAINED, f"{host} is drained: it gets no work", f"agentloop drain {host} --undo")


def _of_flights(flights: FlightPage) -> Iterator[Finding]:
    late = [row for row in flights.longest_tools if row.flight.for_s >= SLOW_TOOL_S]
    placing = [row for row in flights.oldest if row.flight.doing is Doing.PLACE and row.flight.for_s >= SLOW_TOOL_S]
    for doing, cause in _CAUSE_OF.items():
        rows = [row for row in (*late, *placing) if row.flight.doing is doing]
        if rows:
            yield Finding(cause, _slowest(rows), _ACTION_OF[doing], rows[0].flight.for_s)
    begun = [row for row in flights.oldest if row.flight.doing is Doing.PREFILL]
    if rows := [row for row in begun if row.flight.for_s >= SLOW_TURN_S]:
        action = "its engine has many requests, or hangs: then it is ended at `stall_timeout_s`"
        yield Finding(Cause.TURN, _slowest(rows), action, rows[0].flight.for_s)


def _of_blocked(flights: FlightPage) -> Iterator[Finding]:
    for one in flights.blocked:
        if one.ago_s < RECENT_BLOCK_S:
            text = f"the event loop of {one.process} was blocked {one.ago_s:.0f} s ago"
            if one.place:
                action = "fix that code: await, or run it in a thread"
                yield Finding(Cause.BLOCKED, f"{text}, at {one.place}", action, one.ago_s)
            else:
                action = (
                    "run fewer processes on that host, or give it more CPUs: `host_short_of_cpu` in service.log"
                )
                yield Finding(Cause.BLOCKED, f"{text}: its host was short of CPU", action, one.ago_s)


def _of_rollouts(status: ServiceStatus) -> Iterator[Finding]:
    waiting = [one for one in status.rollouts if one.num_queued > one.num_held and not one.num_running]
    ahead = max((one.priority for one in status.rollouts if one.num_running), default=None)
    behind = [one for one in waiting if ahead is not None and one.priority < ahead]
    if behind:
        names = ", ".join(one.rollout_id for one in behind[:3])
        text = f"{names}: everything of priority {ahead} goes before priority {max(one.priority for one in behind)}"
        yield Finding(Cause.PRIORITY, text, "submit with a higher `priority`, or wait")
    for rollout_id, unread_s in status.unread:
        if unread_s >= UNREAD_S:
            text = f"nobody reads the records of {rollout_id}: the first waits since {unread_s:.0f} s"
            yield Finding(Cause.UNREAD, text, "is the trainer alive, and at its step?", unread_s)


def _of_sessions(flights: FlightPage) -> Iterator[Finding]:
    idle = (row for row in flights.sessions if row.flight.doing is not Doing.PLACE)
    rows = [row for row in idle if row.flight.for_s >= SILENT_SESSION_S]
    if rows:
        text = f"{len(rows)} session(s) keep a place and make no call; the longest: {rows[0].id}"
        action = "is the agent alive? finish the session, or give it a shorter `ttl_s`"
        yield Finding(Cause.SESSION, text, action, rows[0].flight.for_s)


def _all_is_well(status: ServiceStatus, flights: FlightPage) -> Finding:
    if flights.oldest:
        row, what = flights.oldest[0], ", ".join(f"{num} {name}" for name, num in flights.doing[:4])
        text = f"nothing is wrong: {what}; the oldest, {row.id}, is at turn {row.flight.turn}"
        return Finding(Cause.LONG, text, "wait", row.flight.age_s)
    if any(one.num_queued for one in status.rollouts):
        return Finding(Cause.LONG, "what was submitted is about to begin", "wait")
    return Finding(Cause.NOTHING, "nothing runs: nothing was submitted that is not finished", "submit tasks")


def _is_busy(status: ServiceStatus, flights: FlightPage) -> bool:
    is_generating = any(name in (Doing.PREFILL, Doing.DECODE) for name, _ in flights.doing)
    return is_generating or any(one.load.num_running for one in status.replicas)


def _slowest(rows: list[FlightRow]) -> str:
    row = rows[0]
    others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    left = "" if row.flight.left_s is None else f", deadline in {row.flight.left_s:.0f} s"
    where = row.worker or row.replica
    return f"{row.id} waits for its {row.flight.name} since {row.flight.for_s:.0f} s{left} on {where}{others}"


def _silence(replica: ReplicaStatus) -> str:
    return f"no heartbeat for {replica.heartbeat_age_s:.0f} s" if replica.heartbeat_age_s > _HEARD_S else ""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
