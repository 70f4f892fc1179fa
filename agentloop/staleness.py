"""Staleness limits: how far a run's trajectories may fall behind the fleet's weights.

Staleness is the fleet's weight version minus the oldest version in a trajectory. Two halves, both synchronous. In
the rollout queue an `Allowance` holds back what would exceed the limit. In a worker a `StalenessGuard` judges what
runs: an update may come at any token, so no admission rule alone keeps a long trajectory within its limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentloop.errors import InvalidRequest
from agentloop.limits import LimitReached
from agentloop.trajectory import TrajectoryBuilder
from agentloop.types import Generation, OnStale, RolloutGroup, StalenessLimit, StopReason

UNBOUNDED = 1 << 62  # trajectories

# --- admission: in the rollout queue ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FleetVersions:
    """What the fleet serves, and what an update under way would bring it to. None: not known, no update."""

    served: int | None = None
    coming: int | None = None


class Allowance:
    """How many trajectories of one run may be begun.

    The rule, from AReaL's `StalenessManager.get_capacity` (areal/infra/staleness_manager.py): begun and not failed
    < (max_staleness + 1 + versions committed since the first was begun) * trajectories per version. The trainer
    then consumes the last one begun before it is more than `max_staleness` versions old. Versions are counted by
    their numbers, the unit of the limit itself. A dropped or failed trajectory gives its place back.
    """

    def __init__(self, limit: StalenessLimit) -> None:
        self.limit = limit
        self.num_begun = 0
        self.first_version: int | None = None
        self.num_rollouts = 0

    def room(self, versions: FleetVersions) -> int:
        """How many may be begun now. Zero while an update is on its way that would take them over the limit."""
        served, coming = versions.served, versions.coming
        if served is not None and coming is not None and coming - served > self.limit.max_staleness:
            return 0
        per_version = self.limit.trajectories_per_version
        if per_version is None:
            return UNBOUNDED
        has_both = served is not None and self.first_version is not None
        num_versions = served - self.first_version if has_both else 0  # type: ignore[operator]
        return max(0, (self.limit.max_staleness + 1 + num_versions) * per_version - self.num_begun)

    def begin(self, served: int | None) -> None:
        """One trajectory is handed out."""
        self.num_begun += 1
        if self.first_version is None:
            self.first_version = served

    def learn(self, served: int | None) -> None:
        """What was begun before the fleet's version was known (a restart) counts from the first one known."""
        if self.num_begun > 0 and self.first_version is None:
            self.first_version = served

    def give_back(self) -> None:
        """One that was begun will not be trained on."""
        self.num_begun -= 1

    def restore(self, num_trained: int, first_version: int | None) -> None:
        """Count what an earlier process had finished."""
        self.num_begun += num_trained
        known = [version for version in (self.first_version, first_version) if version is not None]
        self.first_version = min(known, default=None)


class Allowances:
    """The allowances of all live rollouts. Those that name one run share one."""

    def __init__(self) -> None:
        self._by_run: dict[tuple[str, str], Allowance] = {}

    def check(self, rollout_id: str, groups: Iterable[RolloutGroup]) -> None:
        """Raises InvalidRequest for limits that cannot be, or that differ within a rollout or its live run."""
        limits = {group.staleness for group in groups}
        if len(limits) != 1:
            raise InvalidRequest("the groups of a rollout have one staleness limit", param="max_staleness")
        (limit,) = limits
        if limit is None:
            return
        if limit.max_staleness < 0:
            raise InvalidRequest("staleness is not negative", param="max_staleness")
        if limit.trajectories_per_version is not None and limit.trajectories_per_version < 1:
            raise InvalidRequest("a version consumes at least one trajectory", param="trajectories_per_version")
        known = self._by_run.get(_key(rollout_id, limit))
        if known is not None and known.limit != limit:
            raise InvalidRequest(f"run {limit.run_id} has another staleness limit", param="run_id")

    def join(self, rollout_id: str, limit: StalenessLimit | None) -> Allowance | None:
        """The allowance that a rollout draws on; None without a limit. `leave` follows."""
        if limit is None:
            return None
        allowance = self._by_run.setdefault(_key(rollout_id, limit), Allowance(limit))
        allowance.num_rollouts += 1
        return allowance

    def learn(self, served: int | None) -> None:
        """Tell every run what the fleet serves."""
        for allowance in self._by_run.values():
            allowance.learn(served)

    def leave(self, rollout_id: str, allowance: Allowance | None) -> None:
        """A rollout is done. The last one of its run takes the allowance with it."""
        if allowance is None:
            return
        allowance.num_rollouts -= 1
        if allowance.num_rollouts == 0:
            del self._by_run[_key(rollout_id, allowance.limit)]


def _key(rollout_id: str, limit: StalenessLimit) -> tuple[str, str]:
    return (limit.run_id, "" if limit.run_id else rollout_id)


# --- in flight: in a worker -------------------------------------------------------------------------------


class NewestVersion:
    """The newest weight version that a worker has heard of: from every generation, whoever asked for it."""

    def __init__(self) -> None:
        self.value: int | None = None

    def see(self, generation: Generation) -> None:
        """Learn from a replica's load and from the spans, which may be newer than the load's snapshot."""
        heard = [span.version for span in generation.weight_versions]
        if generation.load.weight_version is not None:
            heard.append(generation.load.weight_version)
        if self.value is not None:
            heard.append(self.value)
        self.value = max(heard, default=None)


class StalenessGuard:
    """One trajectory against its run's limit, asked between turns and at the end.

    A turn is never interrupted for staleness: its worker learns of a commit from the answers of other turns, if at
    all, and the limits on a turn's tokens bound the waste. A turn that an engine-side abort cut does not go on.
    """

    def __init__(self, limit: StalenessLimit, newest: NewestVersion) -> None:
        self._limit = limit
        self._newest = newest

    def must_end(self, builder: TrajectoryBuilder) -> bool:
        """Whether the trajectory is over its limit, as far as the worker knows, and its policy ends it for that."""
        return self._limit.on_stale is not OnStale.MASK and self._over(builder) is not None

    def check(self, builder: TrajectoryBuilder) -> None:
        """Raises LimitReached (STALE) if the trajectory must end."""
        if self.must_end(builder):
            raise LimitReached(StopReason.STALE)

    def settle(self, builder: TrajectoryBuilder) -> OnStale | None:
        """The loop has ended: take out of the mask what the policy says. Returns the policy if it had to act.

        MASK takes out what is too old for the newest version. FINISH keeps what was sampled while the limit held,
        so it takes out what the turn that met the update sampled after it. DROP leaves all of it to the caller.
        """
        found = self._over(builder)
        if found is None:
            return None
        oldest, newest = found
        match self._limit.on_stale:
            case OnStale.MASK:
                builder.mask_older_than(newest - self._limit.max_staleness)
            case OnStale.FINISH:
                builder.mask_newer_than(oldest + self._limit.max_staleness)
            case OnStale.DROP:
                pass
        return self._limit.on_stale

    def _over(self, builder: TrajectoryBuilder) -> tuple[int, int] | None:
        """The oldest and the newest version, if they are too far apart."""
        oldest, newest = builder.oldest_version, self._newest.value
        if oldest is None or newest is None or newest - oldest <= self._limit.max_staleness:
            return None
        return oldest, newest
