"""The staleness guard: one running trajectory against its run's limit.

An update may come at any token, so no admission rule alone (`scheduling/staleness_budget.py`) keeps a long
trajectory within its limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.generation.leased_engine import NewestVersion
from agentloop.rollout.budget import LimitReached
from agentloop.trajectory.growing_path import GrowingPath
from agentloop.types import OnStale, StalenessLimit, StopReason, WeightVersionSpan


class StalenessGuard:
    """One trajectory against its run's limit, asked before each turn and its tool calls, and at the end.

    A turn is never interrupted for staleness: its worker learns of a commit from the answers of other turns, if at
    all, and the limits on a turn's tokens bound the waste. A turn that an engine-side abort cut does not continue.
    """

    def __init__(self, limit: StalenessLimit, newest: NewestVersion) -> None:
        self._limit = limit
        self._newest = newest

    @property
    def newest_version(self) -> int | None:
        """The newest version that this worker has heard of."""
        return self._newest.value

    def learn(self, version: int) -> None:
        """Note a version that a worker before this one had heard of."""
        self._newest.value = version if self._newest.value is None else max(version, self._newest.value)

    def must_end(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> bool:
        """Return True if the trajectory is over its limit, as far as the worker knows, and `on_stale` stops it.

        `sampled` are the versions of a turn that is not in the path yet.
        """
        return self._limit.on_stale is not OnStale.MASK and self._over(path, sampled) is not None

    def check(self, path: GrowingPath) -> None:
        """Raises LimitReached (STALE) if the trajectory must end."""
        if self.must_end(path):
            raise LimitReached(StopReason.STALE)

    def settle(self, path: GrowingPath) -> OnStale | None:
        """Apply the policy to a path whose loop has ended. Returns the policy if the path is over its limit.

        MASK takes the tokens out of the mask that are too old for the newest version. FINISH keeps the tokens that
        were sampled while the limit held, and takes out those that the turn sampled after the update. DROP leaves
        the path as it is: its caller discards it.
        """
        found = self._over(path)
        if found is None:
            return None
        oldest, newest = found
        match self._limit.on_stale:
            case OnStale.MASK:
                path.mask_older_than(newest - self._limit.max_staleness)
            case OnStale.FINISH:
                path.mask_newer_than(oldest + self._limit.max_staleness)
            case OnStale.DROP:
                pass
        return self._limit.on_stale

    def _over(self, path: GrowingPath, sampled: Sequence[WeightVersionSpan] = ()) -> tuple[int, int] | None:
        """Return the oldest and the newest version, if they are too far apart."""
        versions = path.versions | {span.version for span in sampled}
        if not versions:
            return None
        # The newest version of the fleet is older than the path's newest where the fleet was taken back.
        of_fleet = set() if self._newest.value is None else {self._newest.value}
        oldest, newest = min(versions), max(versions | of_fleet)
        return (oldest, newest) if newest - oldest > self._limit.max_staleness else None
