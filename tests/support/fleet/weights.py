"""A fleet of fake engines with its `ReplicaSync`, and a decorator that runs async tests in virtual time."""

from functools import wraps

from agentloop.concurrency.clock import VirtualClock
from agentloop.engine.interface import PushSource, TensorInfo, WeightUpdate
from agentloop.fleet.late_replicas import LateReplicas
from agentloop.fleet.registry import Fleet
from agentloop.fleet.replica_steps import WeightConfig
from agentloop.fleet.replica_sync import ReplicaSync
from agentloop.types import KVPolicy
from tests.support.engine.engines import INFO, FakeEngine

CONFIG = WeightConfig(
    stage_timeout_s=100.0,
    pause_timeout_s=10.0,
    commit_timeout_s=20.0,
    resume_timeout_s=10.0,
    sleep_timeout_s=10.0,
    wake_timeout_s=10.0,
    offer_timeout_s=10.0,
    max_catch_up_attempts=3,
    num_reports=3,
)
KEEP = KVPolicy.KEEP


class FleetSite:
    """A fleet of fake engines and its owner."""

    def __init__(self, clock, *replica_ids, version=0, info=INFO, initial=None):
        self.clock = clock
        self.info = info
        self.engines = {}
        self.fleet = Fleet()
        self.sync = ReplicaSync(self.fleet, self.connect, clock, CONFIG, initial=initial)
        self.late = LateReplicas(self.sync, self.fleet, clock)
        for replica_id in replica_ids:
            self.register(replica_id, version)
            replica = self.fleet.get(replica_id)
            if version is not None:
                self.fleet.begin_update(replica)
                self.fleet.admit(replica)

    def connect(self, url):
        return self.engines[url.removeprefix("fake://")]

    def register(self, replica_id, version=0):
        self.engines[replica_id] = FakeEngine(self.clock, f"fake://{replica_id}", version, self.info)
        self.fleet.register(self.engines[replica_id].registration(), self.clock.now())
        return self.engines[replica_id]

    def state(self, replica_id):
        return self.fleet.get(replica_id).state

    def placeable(self):
        return [replica.replica_id for replica in self.fleet.placeable()]

    async def update(self, version, kv_policy=KEEP, **options):
        return await self.sync.update_weights(WeightUpdate(version, f"dir{version}"), kv_policy, **options)

    async def push(self, version, kv_policy=KEEP, token="trainer", **options):
        update = WeightUpdate(version, push=push_source(token))
        return await self.sync.update_weights(update, kv_policy, **options)

    def calls(self, replica_id):
        """Return the calls of the engine since the last time."""
        engine = self.engines[replica_id]
        calls, engine.calls = engine.calls, []
        return calls


def push_source(token="trainer"):
    return PushSource(("127.0.0.1:1",), token, (TensorInfo("w", "bfloat16", (2, 3)),))


def virtual(test):
    """Run an async test that takes a clock on that clock's own loop."""

    @wraps(test)
    def run(**arguments):
        clock = VirtualClock()
        clock.run(test(clock=clock, **arguments))

    del run.__wrapped__  # pytest would look for a fixture named clock
    return run
