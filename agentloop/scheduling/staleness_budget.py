"""The staleness budget: the trajectories of a run that may be begun before the fleet's weights move on.

Staleness is the fleet's weight version minus the oldest version in a trajectory. In the rollout queue a
`StalenessBudget` holds back what would exceed the limit; the worker judges what runs
(`rollout/budget.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentloop.errors import InvalidRequest
from agentloop.types import RolloutGroup, StalenessLimit

UNBOUNDED = 1 << 62  # trajectories


@dataclass(frozen=True, slots=True)
class FleetVersions:
    """The version the fleet serves, and the one an update under way would bring. None: not known, no update.

    `adapters` are the versions of those that are served by name.
    """

    served: int | None = None
    coming: int | None = None
    adapters: Mapping[str, int] = field(default_factory=dict)

    def of(self, adapter: str) -> FleetVersions:
        """Return the versions of what samples a rollout: an adapter, or with "" the base weights."""
        return FleetVersions(self.adapters.get(adapter)) if adapter else self


class StalenessBudget:
    """The number of trajectories of one run that may be begun.

    The rule, from AReaL's `StalenessManager.get_capacity` (areal/infra/staleness_manager.py): begun and not failed
    < (max_staleness + 1 + versions committed since the first was begun) * trajectories per version. The trainer
    then consumes the last one begun before it is more than `max_staleness` versions old. Versions are counted by
    their numbers, the unit of the limit itself. A dropped or failed trajectory gives its place back.
    """

    def __init__(self, limit: StalenessLimit, adapter: str = "") -> None:
        """`adapter` is that of the run, by whose versions it lives."""
        self.limit = limit
        self.adapter = adapter
        self.num_begun = 0
        self.first_version: int | None = None
        self.num_rollouts = 0

    def room(self, versions: FleetVersions) -> int:
        """Return the number that may be begun now: none if an update under way would make them too old."""
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
        """Count a trajectory that is handed out."""
        self.num_begun += 1
        if self.first_version is None:
            self.first_version = served

    def learn(self, served: int | None) -> None:
        """Count what was begun before any version was known (a restart) from the first known one on."""
        if self.num_begun > 0 and self.first_version is None:
            self.first_version = served

    def set_back(self, num_versions: int) -> None:
        """Note that the fleet was taken back by some versions: what was trained until then stays counted."""
        if self.first_version is not None:
            self.first_version -= num_versions

    def give_back(self) -> None:
        """Take out a trajectory that will not be trained on."""
        self.num_begun -= 1

    def restore(self, num_trained: int, first_version: int | None) -> None:
        """Count what an earlier process had finished."""
        self.num_begun += num_trained
        known = [version for version in (self.first_version, first_version) if version is not None]
        self.first_version = min(known, default=None)


class StalenessBudgets:
    """The budgets of all live rollouts. Those that name one run share one."""

    def __init__(self) -> None:
        self._by_run: dict[tuple[str, str, str], StalenessBudget] = {}
        self._versions = FleetVersions()

    def check(self, rollout_id: str, groups: Iterable[RolloutGroup], adapter: str = "") -> None:
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
        known = self._by_run.get(_key(rollout_id, limit, adapter))
        if known is not None and known.limit != limit:
            raise InvalidRequest(f"run {limit.run_id} has another staleness limit", param="run_id")

    def join(self, rollout_id: str, limit: StalenessLimit | None, adapter: str = "") -> StalenessBudget | None:
        """Return the budget of a rollout; None without a limit. `leave` follows."""
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
        """Remove a rollout that is done; the last one of its run removes the budget too."""
        if budget is None:
            return
        budget.num_rollouts -= 1
        if budget.num_rollouts == 0:
            del self._by_run[_key(rollout_id, budget.limit, budget.adapter)]


def _key(rollout_id: str, limit: StalenessLimit, adapter: str) -> tuple[str, str, str]:
    return limit.run_id, "" if limit.run_id else rollout_id, adapter
