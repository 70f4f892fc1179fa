"""What replicas tell of their caches, and the models it corrects."""

from array import array

from agentloop.api.coordinator import KVChanges, ReplicaRegistration
from agentloop.engine import EngineInfo
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.replica_caches import ReplicaCaches


def caches(block_size=16, kv_tokens=160):
    fleet = Fleet()
    info = EngineInfo("fake", 4096, 1000, block_size, kv_tokens, 8)
    fleet.register(ReplicaRegistration("a", "http://a", info, 0), 0.0)
    return ReplicaCaches(fleet)


def packed(*names):
    return array("Q", names).tobytes()


def used(told, *names):
    """A turn on replica `a` used these blocks."""
    told.of("a").store("t", array("Q", names))
    told.of("a").release("t")


def test_a_model_has_the_replicas_capacity():
    assert caches().of("a").capacity_blocks == 10
    assert caches(kv_tokens=0).of("a") is None  # it does not say
    assert caches(block_size=0).of("a") is None
    assert caches().of("b") is None


def test_removals_correct_the_model():
    told = caches()
    assert told.changed("a", KVChanges(1, resident=b""))
    used(told, 1, 2, 3)
    assert told.changed("a", KVChanges(2, removed=packed(3, 99)))
    assert told.of("a").match(array("Q", [1, 2, 3])) == 2


def test_all_that_a_replica_holds_leaves_nothing_else():
    told = caches()
    used(told, 1, 2, 3)
    assert told.changed("a", KVChanges(7, resident=packed(1, 99)))
    assert told.of("a").match(array("Q", [1, 2, 3])) == 1
    assert told.of("a").num_blocks == 1


def test_a_gap_changes_nothing_until_all_is_told():
    told = caches()
    assert not told.changed("a", KVChanges(1, removed=packed(1)))
    assert told.changed("a", KVChanges(2, resident=b""))
    used(told, 1, 2, 3)
    assert not told.changed("a", KVChanges(4, removed=packed(1)))
    assert not told.changed("a", KVChanges(5, removed=packed(2)))
    assert told.of("a").match(array("Q", [1, 2, 3])) == 3
    assert told.changed("a", KVChanges(6, resident=packed(1, 2)))
    assert told.changed("a", KVChanges(7, removed=packed(2)))
    assert told.of("a").match(array("Q", [1, 2, 3])) == 1


def test_a_report_that_arrives_twice_counts_once():
    told = caches()
    assert told.changed("a", KVChanges(1, resident=b""))
    used(told, 1)
    assert told.changed("a", KVChanges(2, removed=packed(1)))
    used(told, 1)
    assert told.changed("a", KVChanges(2, removed=packed(1)))
    assert told.of("a").match(array("Q", [1])) == 1


def test_a_dropped_replica_begins_anew():
    told = caches()
    assert told.changed("a", KVChanges(1, resident=b""))
    used(told, 1)
    told.drop("a")
    told.drop("a")
    assert told.of("a").num_blocks == 0
    assert not told.changed("a", KVChanges(2))


def test_what_an_unknown_replica_tells_is_nobodys():
    assert caches().changed("b", KVChanges(1, removed=packed(1)))
