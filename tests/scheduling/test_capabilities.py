"""A trajectory is only placed on engines that can serve its needs, after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.api.coordinator import ReplicaRegistration
from agentloop.engine.interface import EngineInfo
from agentloop.errors import NoHealthyReplica, UnsupportedParameter
from agentloop.fleet.registry import Fleet, FleetConfig
from agentloop.scheduling.balancer import Balancer
from agentloop.scheduling.lease_table import Demand
from agentloop.types import Lease
from agentloop.values.capabilities import (
    CONSTRAINTS,
    NO_NEEDS,
    NOT_SPECULATIVE,
    SAMPLING,
    Capabilities,
    Feature,
    Needs,
    bits_of,
    configured_features,
    features_asked,
    features_of,
    needs_of,
)
from agentloop.values.checks import check_sampling
from agentloop.values.sampling import Constraint, ConstraintKind, SamplingParams

NOW = 0.0
ENTRIES = {  # features, context
    "all": (SAMPLING | CONSTRAINTS | {Feature.IMAGES}, 1000),
    "long": (SAMPLING, 4000),
    "plain": (SAMPLING - {Feature.SEED}, 1000),
}
IMAGES = Needs(bits_of(frozenset({Feature.IMAGES})), 100)
SEED = Needs(bits_of(frozenset({Feature.SEED})), 100)


def join(fleet: Fleet, entry: str, number: int = 0) -> str:
    features, context = ENTRIES[entry]
    info = EngineInfo(entry, context, 1000, 16, 10_000_000, 8, features=frozenset(features))
    name = f"{entry}-{number}"
    registration = ReplicaRegistration(name, f"http://{name}", info, 0, entry=entry)
    replica = fleet.register(registration, NOW)
    fleet.begin_update(replica)
    fleet.admit(replica)
    return name


def fleet_of(*entries: str, **config: frozenset[str]) -> Fleet:
    fleet = Fleet(FleetConfig(**config))  # type: ignore[arg-type] # its one field of that kind
    for number, entry in enumerate(entries):
        join(fleet, entry, number)
    return fleet


def needing(holder: str, needs: Needs) -> Demand:
    return Demand(f"r/g/{holder}", "w1", "r/g", 100, needs=needs)


def test_what_a_request_asks_for():
    plain = SamplingParams(10)
    assert needs_of(plain, 7, has_images=False) == Needs(0, 17)
    constrained = SamplingParams(10, constraint=Constraint(ConstraintKind.REGEX, "a+"), seed=0)
    assert features_of(features_asked(constrained)) == (Feature.REGEX, Feature.SEED)
    off = SamplingParams(10, repetition_penalty=1.0, min_p=0.0, num_top_logprobs=0)
    assert features_asked(off) == 0
    everything = SamplingParams(
        10,
        seed=1,
        logit_bias=((1, 1.0),),
        presence_penalty=1.0,
        repetition_penalty=1.1,
        min_p=0.1,
        min_tokens=1,
        num_top_logprobs=1,
    )
    assert frozenset(features_of(features_asked(everything))) == SAMPLING - {Feature.GREEDY}
    assert features_of(features_asked(SamplingParams(10, temperature=0.0))) == (Feature.GREEDY,)


def test_one_that_does_not_say_can_do_all():
    assert Capabilities().suits(Needs(bits_of(frozenset(Feature)), 1 << 40))


def test_each_goes_where_it_can_be_served():
    balancer = Balancer(fleet_of("all", "long", "plain"))
    assert balancer.acquire(needing("images", IMAGES), NOW).replica_id == "all-0"
    assert balancer.acquire(needing("long", Needs(0, 3000)), NOW).replica_id == "long-1"
    seeded = {balancer.acquire(needing(f"seed{number}", SEED), NOW).replica_id for number in range(8)}
    assert seeded == {"all-0", "long-1"}
    free = {balancer.acquire(needing(f"free{number}", NO_NEEDS), NOW).replica_id for number in range(16)}
    assert free == {"all-0", "long-1", "plain-2"}


def test_what_no_context_holds_goes_to_the_longest():
    balancer = Balancer(fleet_of("all", "long"))
    assert balancer.acquire(needing("huge", Needs(0, 1 << 30)), NOW).replica_id == "long-1"


def test_a_turn_that_needs_more_moves_and_stays_where_it_had_all():
    balancer = Balancer(fleet_of("plain", "all", "long"))
    lease = balancer.acquire(needing("a", SEED), NOW)
    moved = balancer.move(lease, is_failed=False, needs=IMAGES)
    assert moved.replica_id == "all-1"
    assert balancer.move(moved, is_failed=False).replica_id == "all-1"  # its context contains images
    balancer.check()


def test_needs_that_no_engine_has_together_are_those_of_now():
    balancer = Balancer(fleet_of("all", "long"))
    lease = balancer.acquire(needing("a", IMAGES), NOW)
    assert balancer.move(lease, is_failed=False, needs=Needs(0, 3000)).replica_id == "long-1"


def test_a_priority_needs_engines_that_were_configured_for_it():
    assert configured_features(can_constrain=True, scheduling_policy="fcfs") == SAMPLING | CONSTRAINTS
    by_priority = configured_features(can_constrain=False, scheduling_policy="priority")
    assert by_priority == SAMPLING | {Feature.PRIORITY}
    first = needs_of(SamplingParams(1, priority=-1), 1, has_images=False)
    assert Capabilities(bits_of(by_priority)).suits(first)
    with pytest.raises(
        UnsupportedParameter, match=r"it needs engines with scheduling_policy: priority$"
    ) as refused:
        Balancer(fleet_of("all")).acquire(needing("a", first), NOW)
    assert refused.value.param == "priority"


def test_a_refusal_names_the_field_and_the_engines():
    fleet = fleet_of("long", "plain")
    balancer = Balancer(fleet)
    lease = balancer.acquire(needing("a", NO_NEEDS), NOW)
    regex = needs_of(
        SamplingParams(1, seed=1, constraint=Constraint(ConstraintKind.REGEX, "a")), 1, has_images=False
    )
    for refused in (
        lambda: balancer.move(lease, is_failed=False, needs=regex),
        lambda: balancer.acquire(needing("b", regex), NOW),
        lambda: balancer.has_room(needing("b", regex)),
    ):
        with pytest.raises(
            UnsupportedParameter, match=r"constraint \(regex\): none; with seed \(seed\): long"
        ) as caught:
            refused()
        assert caught.value.param == "constraint"
    assert balancer.lease_of("r/g/a") == lease
    assert balancer.move(lease, is_failed=False) != lease  # it continues unchanged


def test_a_kind_that_has_not_joined_or_is_away_is_waited_for():
    fleet = fleet_of("plain", entries=frozenset({"plain", "all"}))
    balancer = Balancer(fleet)
    for _ in range(2):
        with pytest.raises(NoHealthyReplica):
            balancer.acquire(needing("a", IMAGES), NOW)
        assert not balancer.has_room(needing("b", IMAGES))
        name = join(fleet, "all", 1)
        assert balancer.acquire(needing("a", IMAGES), NOW).replica_id == name
        fleet.deregister(name)
        balancer.drop_replica(name)


def test_a_holder_that_comes_to_an_adapter_goes_where_that_is_held():
    fleet = fleet_of("all", "all")
    fleet.adapters = {"math": 0}
    balancer, under = Balancer(fleet), Needs(context_tokens=100, adapter="math")
    lease = balancer.acquire(needing("a", Needs(context_tokens=100)), NOW)
    here = fleet.get(lease.replica_id)
    assert here is not None
    fleet.note_adapter(here, "math", is_held=False)
    moved = balancer.move(lease, False, under)
    assert moved.replica_id != lease.replica_id
    assert balancer.move(moved, True).replica_id == moved.replica_id


class CapabilityMachine(RuleBasedStateMachine):
    """Replicas join and leave; trajectories start, need more, fail and are moved by the balancer."""

    holders = st.integers(0, 5)
    needs = st.builds(
        Needs,
        st.sets(st.sampled_from([Feature.IMAGES, Feature.SEED, Feature.REGEX])).map(frozenset).map(bits_of),
        st.sampled_from([0, 500, 3000]),
    )

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of(*ENTRIES, entries=frozenset(ENTRIES))
        self.balancer = Balancer(self.fleet)
        self.held: dict[str, tuple[Lease, Needs]] = {}

    def _took(self, name: str, lease: Lease, needs: Needs) -> None:
        assert lease.can.suits(needs)
        self.held[name] = lease, needs

    @rule(holder=holders, needs=needs)
    def acquire(self, holder: int, needs: Needs) -> None:
        try:
            lease = self.balancer.acquire(needing(str(holder), needs), NOW)
        except (NoHealthyReplica, UnsupportedParameter) as error:
            can_serve = [name for name in ENTRIES if self._can(name).suits(needs)]
            assert isinstance(error, NoHealthyReplica) == bool(can_serve)  # noqa: PT017
            if self.balancer.lease_of(f"r/g/{holder}") is None:
                self.held.pop(str(holder), None)
        else:
            self._took(str(holder), lease, needs)

    @rule(holder=holders, needs=needs, is_failed=st.booleans())
    def move(self, holder: int, needs: Needs, is_failed: bool) -> None:
        if (held := self.held.get(str(holder))) is None:
            return
        try:
            lease = self.balancer.move(held[0], is_failed, needs)
        except (NoHealthyReplica, UnsupportedParameter):
            return
        self._took(str(holder), lease, needs)

    @rule()
    def flush(self) -> None:
        self.balancer.new_epoch(is_flushed=True)
        for name, (_, needs) in list(self.held.items()):
            lease = self.balancer.lease_of(f"r/g/{name}")
            assert lease is not None
            self._took(name, lease, needs)

    @rule(entry=st.sampled_from(sorted(ENTRIES)))
    def leave(self, entry: str) -> None:
        for replica in self.fleet.replicas:
            if replica.registration.entry == entry:
                self.fleet.deregister(replica.replica_id)
                self.balancer.drop_replica(replica.replica_id)

    @rule(entry=st.sampled_from(sorted(ENTRIES)), number=st.integers(0, 1))
    def come(self, entry: str, number: int) -> None:
        if self.fleet.get(f"{entry}-{number}") is None:
            join(self.fleet, entry, number)

    @invariant()
    def adds_up(self) -> None:
        self.balancer.check()

    def _can(self, entry: str) -> Capabilities:
        features, context = ENTRIES[entry]
        return Capabilities(bits_of(frozenset(features)), context)


CapabilityMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCapabilityMachine = CapabilityMachine.TestCase


@pytest.mark.parametrize("asked", [{"seed": 1}, {"logit_bias": ((5, 1.0),)}, {"min_p": 0.1}])
def test_what_an_engine_with_drafts_lacks_says_so(asked):
    can = bits_of(SAMPLING - NOT_SPECULATIVE)
    with pytest.raises(UnsupportedParameter, match=r"it needs engines without speculative$") as refused:
        check_sampling(SamplingParams(1, **asked), 100, features=can, engine="vllm")
    assert refused.value.param == next(iter(asked))
