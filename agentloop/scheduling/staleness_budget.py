"""The staleness budget: how many trajectories of a run may start before the fleet's weights change.

Staleness is the fleet's weight version minus the oldest version in a trajectory. A `StalenessBudget` keeps samples
queued that would exceed the limit; the worker checks the running ones (`rollout/budget.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentloop.errors import InvalidRequest
from agentloop.types import RolloutGroup, StalenessLimit

UNBOUNDED = 1 << 62  # trajectories


@dataclass(frozen=True, slots=True)
class FleetVersions:
    """The fleet's served version, and the version that a running update brings. None: unknown; no update.

    `adapters` has the served version of each named adapter, `held` the versions of held replicas.
    """

    served: int | None = None
    coming: int | None = None
    adapters: Mapping[str, int] = field(default_factory=dict)
    held: frozenset[int] = frozenset()

    def of(self, adapter: str) -> FleetVersions:
        """Return the versions of an adapter, or of the base weights for ""."""
        return FleetVersions(self.adapters.get(adapter)) if adapter else self


class StalenessBudget:
    """The number of trajectories of a run that may start.

    The rule is AReaL's `StalenessManager.get_capacity` (areal/infra/staleness_manager.py): started and not failed
    < (max_staleness + 1 + versions since the first start) * trajectories per version. So the trainer consumes the
    last started trajectory before it is more than `max_staleness` versions old. Versions are differences of
    version numbers, as in the limit. A dropped or failed trajectory is subtracted again.
    """

    def __init__(self, limit: StalenessLimit, adapter: str = "") -> None:
        """`adapter` is the run's adapter, whose versions count; "" for the base weights."""
        self.limit = limit
        self.adapter = adapter
        self.num_begun = 0
        self.first_version: int | None = None
        self.num_rollouts = 0

    def room(self, versions: FleetVersions) -> int:
        """Return the number of trajectories that may start now; 0 if a running update would make them too old."""
        versions = versions.of(self.adapter)
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
        """Count a dispatched trajectory."""
        self.num_begun += 1
        if self.first_version is None:
            self.first_version = served

    def learn(self, served: int | None) -> None:
        """Set the first version to `served` if trajectories started before a version was known, after a restart."""
        if self.num_begun > 0 and self.first_version is None:
            self.first_version = served

    def set_back(self, num_versions: int) -> None:
        """Record a rollback of the fleet by some versions. Trajectories that were trained before stay counted."""
        if self.first_version is not None:
            self.first_version -= num_versions

    def give_back(self) -> None:
        """Remove a trajectory that will not be trained on."""
        self.num_begun -= 1

    def restore(self, num_trained: int, first_version: int | None) -> None:
        """Add the trajectories that finished under an earlier coordinator."""
        self.num_begun += num_trained
        known = [version for version in (self.first_version, first_version) if version is not None]
        self.first_version = min(known, default=None)


class StalenessBudgets:
    """The budgets of all live rollouts. Rollouts of one run share a budget."""

    def __init__(self) -> None:
        self._by_run: dict[tuple[str, str, str], StalenessBudget] = {}
        self._versions = FleetVersions()

    def check(self, rollout_id: str, groups: Iterable[RolloutGroup], adapter: str = "") -> None:
        """Raise InvalidRequest if a limit is invalid, or differs within a rollout or from its live run."""
        limits = {group.staleness for group in groups}
        if len(limits) != 1:
            raise InvalidRequest(
                "all groups of a rollout must have the same staleness limit", param="max_staleness"
            )
        (limit,) = limits
        if limit is None:
            return
        if limit.max_staleness < 0:
            raise InvalidRequest(
                f"max_staleness is {limit.max_staleness}, expected 0 or more", param="max_staleness"
            )
        if limit.trajectories_per_version is not None and limit.trajectories_per_version < 1:
            raise InvalidRequest(
                f"trajectories_per_version is {limit.trajectories_per_version}, expected 1 or more",
                param="trajectories_per_version",
            )
        known = self._by_run.get(_key(rollout_id, limit, adapter))
        if known is not None and known.limit != limit:
            raise InvalidRequest(
                f"run {limit.run_id} already has another staleness limit: {known.limit}; use it, or another run id",
                param="run_id",
            )

    def join(self, rollout_id: str, limit: StalenessLimit | None, adapter: str = "") -> StalenessBudget | None:
        """Return a rollout's budget; None without a limit. Paired with `leave`."""
        if limit is None:
            return None
        budget = self._by_run.setdefault(_key(rollout_id, limit, adapter), StalenessBudget(limit, adapter))
        budget.num_rollouts += 1
        return budget

    def learn(self, versions: FleetVersions) -> None:
        earlier, self._versions = self._versions, versions
        for budget in self._by_run.values():
            before, served = earlier.of(budget.adapter).served, versions.of(budget.adapter).served
            if before is not None and served is not None and served < before:
                budget.set_back(before - served)
            budget.learn(served)

    def leave(self, rollout_id: str, budget: StalenessBudget | None) -> None:
        """Remove a finished rollout. The last rollout of a run removes the budget."""
        if budget is None:
            return
        budget.num_rollouts -= 1
        if budget.num_rollouts == 0:
            del self._by_run[_key(rollout_id, budget.limit, budget.adapter)]


def _key(rollout_id: str, limit: StalenessLimit, adapter: str) -> tuple[str, str, str]:
    return limit.run_id, "" if limit.run_id else rollout_id, adapter
