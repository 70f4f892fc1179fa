"""Our arm: the service's own `Balancer`, fed with the reports that the service's processes would send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agentloop.api.coordinator import PREFIX_LENGTHS, Prefix, ReplicaRegistration, ReplicaReport, TurnEnded
from agentloop.engine.interface import EngineInfo
from agentloop.errors import NoHealthyReplica
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.balancer import Balancer
from agentloop.scheduling.lease_table import Demand
from agentloop.scheduling.waiting import WaitingConfig
from agentloop.types import Lease, Load
from tests.benchmarks.balancer.policy import EngineLoad, FleetShape, QuietPolicy, TurnAsk, TurnEnd
from tests.benchmarks.balancer.workload import Workload


class OursPolicy(QuietPolicy):
    """Trajectories hold leases and report every turn; they follow move orders at the next turn.

    With `prefixes` (by group), each trajectory is a session: it has no group, and may start beyond the capacity.
    """

    def __init__(
        self,
        shape: FleetShape,
        num_siblings: Mapping[int, int],
        prefixes: Mapping[int, tuple[Prefix, ...]] | None = None,
    ) -> None:
        self._shape = shape
        self._num_siblings = num_siblings
        self._prefixes = prefixes
        self._fleet = Fleet()
        self._num_added = 0
        for _ in range(shape.num_replicas):
            self._join(0.0)
        self.balancer = Balancer(self._fleet)
        self._leases: dict[int, Lease] = {}
        self._grown: dict[int, tuple[int, int]] = {}  # first prompt and last context

    def place(self, turn: TurnAsk, now: float) -> int | None:
        try:
            lease = self._lease(turn, now)
        except NoHealthyReplica:
            return None
        return None if lease is None else int(lease.replica_id)

    def began(self, turn: TurnAsk, replica: int, now: float) -> None:
        self.balancer.turn_begun(self._leases[turn.trajectory].lease_id)

    def ended(self, turn: TurnAsk, end: TurnEnd, now: float) -> None:
        number = turn.trajectory
        prompt = end.num_context_tokens - end.num_sampled_tokens
        first, num_known = self._grown.get(number, (prompt, 0))
        self._grown[number] = first, end.num_context_tokens
        lease_id = self._leases[number].lease_id
        counts = end.num_context_tokens, end.num_sampled_tokens, end.num_cached_tokens, num_known
        self.balancer.turn_ended(TurnEnded(lease_id, *counts), now)

    def finished(self, trajectory: int, now: float) -> None:
        lease = self._leases.pop(trajectory)
        prompt, context = self._grown.pop(trajectory, (0, 0))
        self.balancer.release(lease, context - prompt, now)

    def updated(self, is_flushed: bool, now: float) -> None:
        self.balancer.new_epoch(is_flushed=is_flushed)

    def replica_lost(self, replica: int, now: float) -> None:
        self._fleet.deregister(str(replica))
        self.balancer.drop_replica(str(replica))

    def replica_added(self, replica: int, now: float) -> None:
        self._join(now)

    def look(self, loads: Sequence[EngineLoad | None], now: float) -> None:
        for number, load in enumerate(loads):
            if load is not None:
                used_tokens = load.num_held_blocks * self._shape.block_size
                report = ReplicaReport(
                    Load(load.num_running, load.num_waiting, used_tokens, weight_version=0), True
                )
                self._fleet.heartbeat(str(number), report, now)
        self.balancer.look(now)

    def _lease(self, turn: TurnAsk, now: float) -> Lease | None:
        """Return the lease of a turn: the current one, the ordered one, or a newly acquired one.

        None if there is no capacity.
        """
        balancer, number = self.balancer, turn.trajectory
        lease = self._leases.get(number)
        if lease is None:
            name, num_tokens = str(number), turn.num_prompt_tokens
            if self._prefixes is None:
                demand = Demand(name, name, f"g{turn.group}", num_tokens, self._num_siblings[turn.group])
            else:
                prefixes = self._prefixes[turn.group]
                demand = Demand(name, name, "", num_tokens, is_session=True, prefixes=prefixes)
            if not balancer.has_room(demand, WaitingConfig().overcommit if demand.is_session else 0.0):
                return None
            lease = balancer.acquire(demand, now)
        else:
            order = dict(balancer.orders(str(number))).get(lease.lease_id, lease)
            is_lost = self._fleet.get(lease.replica_id) is None
            lease = balancer.move(lease, is_lost) if order is None or is_lost else order
        self._leases[number] = lease
        return lease

    def _join(self, now: float) -> None:
        shape, number = self._shape, self._num_added
        self._num_added += 1
        info = EngineInfo("simulated", 1 << 20, 1000, shape.block_size, shape.capacity_tokens, shape.max_running)
        registration = ReplicaRegistration(str(number), f"http://{number}", info, 0)
        replica = self._fleet.register(registration, now)
        self._fleet.begin_update(replica)
        self._fleet.admit(replica)


def ours(shape: FleetShape, workload: Workload, seed: int) -> OursPolicy:
    """Return the policy of a service with default settings."""
    num_siblings = Counter(one.group for one in workload.trajectories)
    return OursPolicy(shape, num_siblings)


def ours_sessions(shape: FleetShape, workload: Workload, seed: int) -> OursPolicy:
    """Return the policy of a service whose endpoint serves each trajectory as a session."""
    prefixes = {
        one.group: tuple(
            (
                f"system-{one.system}-{length}"
                if length <= one.num_system_tokens
                else f"group-{one.group}-{length}",
                length,
            )
            for length in reversed(PREFIX_LENGTHS)
            if length <= one.num_group_tokens
        )
        for one in workload.trajectories
    }
    return OursPolicy(shape, {}, prefixes)
