"""Who begins, who waits, who goes on elsewhere: the balancer told of turns."""

from contextlib import suppress

import pytest

from agentloop.api.coordinator import TurnEnded
from agentloop.errors import NoHealthyReplica
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.admission import MAX_PASSED, Admission, AdmissionConfig
from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.expected_work import WorkPriors
from tests.scheduling.test_balancer import add, demand, fleet_of, session

PRIORS = WorkPriors(growth_tokens=1000.0)


def small_fleet(num=1, kv_tokens=10_000, **sizes):
    fleet = Fleet()
    for index in range(num):
        add(fleet, f"r{index}", kv_tokens, **sizes)
    return fleet


def turn(balancer, lease, context, now, sampled=100, cached=None, tool="read"):
    balancer.turn_begun(lease.lease_id, now)
    balancer.turn_ended(TurnEnded(lease.lease_id, context, sampled, cached, tool), now)


def fill(balancer, limit=100):
    """Begin trajectories of 1,000 prompt tokens as long as there is room."""
    leases = {}
    while balancer.has_room(f"g{len(leases)}", 1000) and len(leases) < limit:
        name = f"t{len(leases)}"
        leases[name] = balancer.acquire(demand(name, f"g{len(leases)}", 1000, name), 0.0)
    return leases


def test_a_replica_thrashes_when_turns_that_return_find_less_than_half_of_their_kv():
    balancer = Balancer(small_fleet(1, 10**6))
    lease = balancer.acquire(demand("t", "g", 1000), 0.0)
    turn(balancer, lease, 1000, 0.0, cached=0)
    assert balancer.kv_use("r0").hit_rate is None, "nothing was there before"
    for number in range(1, 41):
        turn(balancer, lease, 1000, float(number), cached=400)
    assert balancer.kv_use("r0").hit_rate == pytest.approx(0.4)
    assert balancer.kv_use("r0").is_thrashing
    for number in range(41, 200):
        turn(balancer, lease, 1000, float(number), cached=1000)
    assert not balancer.kv_use("r0").is_thrashing
    balancer.new_epoch(is_flushed=True, now=200.0)
    assert balancer.kv_use("r0").hit_rate is None


def test_as_many_begin_as_their_kv_fits():
    balancer = Balancer(small_fleet(), BalancerConfig(priors=PRIORS))
    assert 3 <= len(fill(balancer)) <= 6


def test_nothing_is_expected_to_outgrow_the_engines_context():
    """However long trajectories are thought to be, or have been elsewhere, each fits in one context."""
    balancer = Balancer(small_fleet(kv_tokens=40_000, max_context=2000))  # 8,192 tokens of growth are expected
    leases = fill(balancer)
    assert len(leases) == 20
    for lease in leases.values():
        turn(balancer, lease, 1900, 1.0)
    assert balancer.kv_use("r0").predicted_tokens <= 40_000
    balancer.release(leases["t0"], 1000, 2.0)
    assert balancer.has_room("new", 1000)
    balancer.check()


def test_an_empty_replica_takes_one_that_never_fits():
    balancer = Balancer(small_fleet(kv_tokens=500), BalancerConfig(priors=PRIORS))
    assert len(fill(balancer)) == 1


def test_a_replica_that_does_not_say_how_much_it_holds_takes_all():
    balancer = Balancer(small_fleet(kv_tokens=0), BalancerConfig(priors=PRIORS))
    leases = fill(balancer, limit=50)
    assert len(leases) == 50
    turn(balancer, leases["t0"], 50_000, 1.0)
    balancer.look(2.0)
    assert balancer.orders("t0") == ()


def test_siblings_share_their_prompt_in_the_count():
    balancer = Balancer(small_fleet(kv_tokens=20_000), BalancerConfig(priors=PRIORS, min_stagger_s=1e9))
    num = 0
    while balancer.has_room("g", 5000) and num < 50:
        balancer.acquire(demand(f"g/{num}", "g", 5000, group_size=8), 0.0)
        num += 1
    apart = Balancer(small_fleet(kv_tokens=20_000), BalancerConfig(priors=PRIORS))
    num_apart = 0
    while apart.has_room(f"g{num_apart}", 5000) and num_apart < 50:
        apart.acquire(demand(f"g{num_apart}/0", f"g{num_apart}", 5000), 0.0)
        num_apart += 1
    assert num >= 2 * num_apart


def test_no_sibling_begins_before_the_prompt_of_the_first_is_there_or_a_while_has_passed():
    balancer = Balancer(fleet_of("a", "b"), BalancerConfig(min_stagger_s=0.1))
    lease = balancer.acquire(demand("g/0", "g", 20_000, group_size=8), 0.0)
    assert balancer.waits_for_leader("g", 0.1)
    assert not balancer.waits_for_leader("h", 0.1)
    assert not balancer.waits_for_leader("g", 5.0)
    other = Balancer(fleet_of("a", "b"), BalancerConfig(min_stagger_s=0.1))
    lease = other.acquire(demand("g/0", "g", 20_000, group_size=8), 0.0)
    turn(other, lease, 20_100, 0.1)
    assert not other.waits_for_leader("g", 0.1)
    assert other.acquire(demand("g/1", "g", 20_000, group_size=8), 0.1).replica_id == lease.replica_id


def test_a_long_tool_gives_its_room_to_another_and_waits_for_it_first_in_line():
    balancer = Balancer(small_fleet(), BalancerConfig(priors=PRIORS))
    leases = fill(balancer)
    for lease in leases.values():
        turn(balancer, lease, 1500, 1.0)
    gone = leases["t0"]
    balancer.look(1000.0)
    assert (gone.lease_id, None) in balancer.orders("t0")
    assert balancer.has_room("new", 1000)
    new = []
    while balancer.has_room("new", 1000):
        new.append(balancer.acquire(demand(f"new{len(new)}", "new", 1000), 1000.0))
    with pytest.raises(NoHealthyReplica):
        balancer.move(gone, is_failed=False, now=1000.0)
    balancer.release(new.pop(), None, 1001.0)
    balancer.release(new.pop(), None, 1001.0)
    back = balancer.move(gone, is_failed=False, now=1001.0)
    assert back.replica_id == "r0"
    assert balancer.orders("t0") == ()
    balancer.check()


def test_whoever_waits_goes_on_after_a_bounded_number_of_others():
    """However many others are new or wait too, and fit where it does not: a few pass it, then none before it."""
    balancer = Balancer(small_fleet(), BalancerConfig(priors=PRIORS))
    leases = fill(balancer)
    big = leases.pop("t0")
    for lease in leases.values():
        turn(balancer, lease, 1500, 1.0)
    turn(balancer, big, 9000, 1.0)
    balancer.look(1000.0)
    running = []
    while balancer.has_room("n", 1000):
        running.append(balancer.acquire(demand(f"n{len(running)}", f"n{len(running)}", 1000), 1000.0))
    num_passed, back = 0, None
    while back is None:
        try:
            back = balancer.move(big, is_failed=False, now=1000.0)
        except NoHealthyReplica:
            balancer.release(running.pop(0), 500, 1000.0)
        for name, other in list(leases.items()) if back is None else ():
            with suppress(NoHealthyReplica):
                running.append(balancer.move(other, is_failed=False, now=1000.0))
                num_passed += 1
                del leases[name]
        while back is None and balancer.has_room("n", 1000):
            num_passed += 1
            running.append(balancer.acquire(demand(f"m{num_passed}", f"m{num_passed}", 1000), 1000.0))
    assert num_passed == MAX_PASSED
    balancer.check()


def test_a_line_ends_with_its_replica():
    fleet = small_fleet(2)
    balancer = Balancer(fleet, BalancerConfig(priors=PRIORS))
    leases = fill(balancer)
    for lease in leases.values():
        turn(balancer, lease, 2000, 1.0)
    balancer.look(1000.0)
    while balancer.has_room("n", 1000):
        balancer.acquire(demand(f"n{balancer.num_leases('r0') + balancer.num_leases('r1')}", "n", 1000), 1000.0)
    waiting = next(lease for lease in leases.values() if lease.replica_id == "r0")
    with pytest.raises(NoHealthyReplica):
        balancer.move(waiting, is_failed=False, now=1000.0)
    fleet.deregister("r0")
    balancer.drop_replica("r0")
    assert balancer.move(waiting, is_failed=True, now=1001.0).replica_id == "r1"
    balancer.check()


def test_a_flush_places_anew_what_waits_at_tools_the_longest_first():
    fleet = fleet_of("a")
    balancer = Balancer(fleet, BalancerConfig(group_slack_trajectories=0.0))
    leases = [balancer.acquire(demand(f"g{i}/0", f"g{i}", 1000, "w"), 0.0) for i in range(8)]
    for lease in leases[:6]:
        turn(balancer, lease, 5000, 1.0)
    add(fleet, "b")
    balancer.new_epoch(is_flushed=False, now=2.0)
    assert balancer.orders("w") == ()
    balancer.new_epoch(is_flushed=True, now=3.0)
    orders = dict(balancer.orders("w"))
    assert orders.keys() == {lease.lease_id for lease in leases[:6]}
    moved = {old: new for old, new in orders.items() if new is not None}  # the others ask before they go on
    assert len(moved) >= 3
    assert {lease.replica_id for lease in moved.values()} == {"b"}
    old, new = next(iter(moved.items()))
    balancer.turn_begun(old, 3.5)  # this turn had begun before the order came
    assert old in dict(balancer.orders("w"))
    balancer.turn_begun(new.lease_id, 4.0)
    assert old not in dict(balancer.orders("w"))
    balancer.check()


def test_after_a_flush_trajectories_go_on_as_there_is_room_and_sessions_at_once():
    balancer = Balancer(small_fleet(), BalancerConfig(priors=PRIORS))
    leases = fill(balancer)
    call = balancer.acquire(session("s", expires_at=10.0), 0.0)
    for lease in leases.values():
        turn(balancer, lease, 1500, 1.0)
    turn(balancer, call, 500, 1.0)
    assert not any(balancer.orders(name) for name in (*leases, ""))
    balancer.new_epoch(is_flushed=True, now=2.0)
    assert all(balancer.orders(name) == ((lease.lease_id, None),) for name, lease in leases.items())
    assert balancer.orders("") == ()
    balancer.admission.rho = 0.5  # as after some flushes
    gone_on = []
    for lease in leases.values():
        with suppress(NoHealthyReplica):
            gone_on.append(balancer.move(lease, is_failed=False, now=3.0))
    assert 1 <= len(gone_on) < len(leases)
    for lease in gone_on:
        balancer.release(lease, 3000, 4.0)
    assert balancer.move(leases[balancer.admission.next_up()[0]], is_failed=False, now=4.0).replica_id == "r0"
    balancer.check()


def test_a_trajectory_moves_while_its_tool_runs_if_that_ends_the_work_sooner():
    fleet = fleet_of("a")
    balancer = Balancer(fleet)
    leases = [balancer.acquire(demand(f"g{i}/0", f"g{i}", 1000, "w"), 0.0) for i in range(6)]
    add(fleet, "b")
    for lease in leases:
        turn(balancer, lease, 1500, 100.0)
    moved = dict(balancer.orders("w"))
    assert 1 <= len(moved) <= 3
    assert all(lease.replica_id == "b" for lease in moved.values())
    old = next(iter(moved))
    lease = next(one for one in leases if one.lease_id == old)
    assert balancer.move(lease, is_failed=True, now=101.0) == moved[old]  # it has moved already
    balancer.check()


def test_sessions_are_neither_staggered_nor_learned_from():
    balancer = Balancer(fleet_of("a"))
    before = balancer.hoped_tokens("g")
    lease = balancer.acquire(session("s", expires_at=10.0), 0.0)
    turn(balancer, lease, 100_000, 1.0)
    balancer.release(lease, 100_000, 2.0)
    assert balancer.hoped_tokens("g") == before


def test_the_share_of_kv_shrinks_while_contexts_are_lost_and_grows_again():
    admission = Admission(AdmissionConfig(window_turns=10))
    for _ in range(40):
        admission.turn(2.0, 1.0, 1)
    low = admission.rho
    assert low == pytest.approx(0.75**4)
    for _ in range(100):
        admission.refused()
        admission.turn(0.0, 1.0, 1)
    assert admission.rho > low
    for _ in range(100_000):
        admission.turn(9.0, 1.0, 1)
    assert admission.rho == AdmissionConfig().least


def test_what_a_flush_costs_is_spread_over_the_turns_until_the_next_one():
    """A third of it counts, beside the fixed parts: little of it lets the share be, much of it shrinks it."""
    often, seldom = Admission(AdmissionConfig(window_turns=10)), Admission(AdmissionConfig(window_turns=10))
    for admission, num_turns in ((often, 10), (seldom, 100)):
        for _ in range(4):
            for _ in range(num_turns):
                admission.turn(0.0, 1.0, 1)
            admission.flushed(20.0)
    assert often.rho == pytest.approx((1 - AdmissionConfig().shrinkage) ** 3)
    assert seldom.rho == AdmissionConfig().initial


def test_after_the_last_flush_the_share_grows_again():
    admission = Admission(AdmissionConfig(window_turns=10))
    admission.flushed(1000.0)  # before any turn: all at once
    for _ in range(100):
        admission.refused()
        admission.turn(0.0, 1.0, 1)
    assert 0.75 < admission.rho < 1.2


def test_the_share_of_kv_does_not_grow_while_nobody_waits():
    admission = Admission(AdmissionConfig(window_turns=10))
    before = admission.rho
    for _ in range(100):
        admission.turn(0.0, 1.0, 1)
    assert admission.rho == before
