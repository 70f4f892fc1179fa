"""A rollout queue without replicas: every sample gets a lease, unless the test says otherwise."""

from agentloop.scheduling.rollout_queue import RolloutQueue
from agentloop.types import Lease

LEASE = Lease("lease", "replica", "")


class PlacingQueue(RolloutQueue):
    """A queue whose `take` returns samples without their leases."""

    def take(self, worker_id, num_free, now, try_to_place=lambda _: LEASE):
        return tuple(sample for sample, _ in super().take(worker_id, num_free, now, try_to_place))
