"""Number of started trajectories, the order of the waiting ones, and the placement of running ones."""

from contextlib import suppress
from dataclasses import replace

import pytest

from agentloop.api.coordinator import HeldLease, LeaseReport, ReplicaReport, TurnEnded, prefixes_of
from agentloop.errors import ModelNotFound, NoHealthyReplica
from agentloop.fleet.registry import Fleet
from agentloop.scheduling.balancer import Balancer, BalancerConfig
from agentloop.scheduling.replica_books import KVShare, ShareBounds
from agentloop.types import Load
from agentloop.values.capabilities import Needs
from tests.scheduling.test_balancer import add, demand, fleet_of, session

SHORT = BalancerConfig(usual_growth_tokens=1000.0)


def small_fleet(num=1, kv_tokens=10_000, **sizes):
    fleet = Fleet()
    for index in range(num):
        add(fleet, f"r{index}", kv_tokens, **sizes)
    return fleet


def turn(balancer, lease, context, now, sampled=100, cached=None, known=0):
    """Run a turn whose prompt extends an earlier context of `known` tokens."""
    balancer.turn_begun(lease.lease_id)
    balancer.turn_ended(TurnEnded(lease.lease_id, context, sampled, cached, known), now)


def fill(balancer, limit=100, prefix="t"):
    """Start trajectories of 1,000 prompt tokens while there is capacity."""
    leases = {}
    while balancer.has_room(demand("", "", 1000)) and len(leases) < limit:
        name = f"{prefix}{len(leases)}"
        leases[name] = balancer.acquire(demand(name, f"g{name}", 1000, name), 0.0)
    return leases


def report(fleet, name, **load):
    fleet.heartbeat(name, ReplicaReport(Load(weight_version=0, **load), True), 0.0)


@pytest.mark.parametrize("asked", [demand("t", "g", 1000), session("s", 1000.0)], ids=["trajectory", "session"])
def test_a_replica_thrashes_when_turns_that_return_find_less_than_half_of_their_kv(asked):
    balancer = Balancer(small_fleet(1, 10**6))
    lease = balancer.acquire(asked, 0.0)
    turn(balancer, lease, 1000, 0.0, cached=0)
    assert balancer.kv_use("r0").hit_rate is None, "nothing was there before"
    for number in range(1, 41):
        turn(balancer, lease, 1000, float(number), cached=400, known=1000)
    assert balancer.kv_use("r0").hit_rate == pytest.approx(0.4)
    assert balancer.kv_use("r0").is_thrashing
    for number in range(41, 200):
        turn(balancer, lease, 1000, float(number), cached=1000, known=1000)
    assert not balancer.kv_use("r0").is_thrashing


def test_as_many_begin_as_their_kv_and_its_growth_fit():
    # 10,000 tokens: 1,000 of a prompt and 1,000 reserved for growth, for each
    assert len(fill(Balancer(small_fleet(), SHORT))) == 5


def test_the_promise_follows_turns_and_trajectories_that_ended():
    """Short turns reserve little, and a trajectory reserves no more than complete ones grow by."""
    by_turns, by_ends = Balancer(small_fleet(kv_tokens=50_000)), Balancer(small_fleet(kv_tokens=50_000))
    before = len(fill(Balancer(small_fleet(kv_tokens=50_000))))
    lease = by_turns.acquire(demand("t", "g", 1000), 0.0)
    for number in range(100):
        turn(by_turns, lease, 1000 + 10 * number, 1.0)
    by_turns.release(lease, None, 2.0)
    for number in range(50):
        by_ends.release(by_ends.acquire(demand(f"t{number}", "g", 1000), 0.0), 100, 1.0)
    assert len(fill(by_turns)) > 2 * before
    assert len(fill(by_ends)) > 2 * before


def test_an_empty_replica_takes_one_that_never_fits():
    assert len(fill(Balancer(small_fleet(kv_tokens=500), SHORT))) == 1


def test_a_replica_that_does_not_say_how_much_it_holds_takes_all():
    balancer = Balancer(small_fleet(kv_tokens=0), SHORT)
    leases = fill(balancer, limit=50)
    assert len(leases) == 50
    turn(balancer, leases["t0"], 50_000, 1.0)
    balancer.look(100.0)
    assert balancer.orders("t0") == ()


def test_siblings_share_their_prompt_in_the_count():
    balancer, num = Balancer(small_fleet(kv_tokens=20_000), SHORT), 0
    while balancer.has_room(one := demand(f"g/{num}", "g", 5000, group_size=16)):
        balancer.acquire(one, 0.0)
        num += 1
    assert num == 15  # 5,000 once, and 1,000 reserved for each


def test_a_common_beginning_of_prompts_counts_once():
    balancer, leases = Balancer(small_fleet(kv_tokens=20_000), SHORT), []
    common = {"num_prompt_tokens": 5000, "prefixes": (("ids-4096", 4096), ("ids-512", 512))}
    while balancer.has_room(one := replace(session(f"s{len(leases)}", 9.0), **common)):
        leases.append(balancer.acquire(one, 0.0))
        turn(balancer, leases[-1], 5000, 1.0)
    assert len(leases) == 8  # 4,096 tokens once; 904 more and 1,000 reserved for each
    balancer.check()
    for lease in leases:
        balancer.release(lease, None, 2.0)
    balancer.check()


def test_a_common_beginning_counts_once_also_after_a_restart_of_the_coordinator():
    prefixes = (("ids-4096", 4096), ("ids-512", 512))
    before, after = Balancer(small_fleet(kv_tokens=20_000), SHORT), Balancer(small_fleet(kv_tokens=20_000), SHORT)
    asked = [
        replace(session(f"/s{number}", None), num_prompt_tokens=5000, prefixes=prefixes, process_id="w")
        for number in range(4)
    ]
    leases = [before.acquire(one, 0.0) for one in asked]
    held = tuple(HeldLease(lease, f"/s{number}", "", 5000, prefixes) for number, lease in enumerate(leases))
    after.took(LeaseReport("w", 1, leases=held), 0.0)
    assert after.kv_use("r0").predicted_tokens == before.kv_use("r0").predicted_tokens
    after.check()


def test_a_long_tool_gives_its_room_to_what_waits_and_returns_in_order_of_arrival():
    balancer = Balancer(small_fleet(), SHORT)
    leases = fill(balancer)
    for lease in leases.values():
        turn(balancer, lease, 1100, 1.0)
    balancer.look(3.0)
    assert not any(balancer.orders(name) for name in leases), "nothing has been at its tool for long"
    balancer.look(100.0)
    assert not any(balancer.orders(name) for name in leases), "nothing has waited since the last look"
    assert not balancer.has_room(demand("n", "n", 1000))
    balancer.look(101.0)
    assert all(balancer.orders(name) == ((lease.lease_id, None),) for name, lease in leases.items())
    new = fill(balancer, prefix="n")
    assert new
    for name in ("t3", "t1"):
        with pytest.raises(NoHealthyReplica):
            balancer.move(leases[name], is_failed=False)
    balancer.release(new.popitem()[1], None, 102.0)
    assert not balancer.has_room(demand("n", "n", 1000)), "what waits goes before what is new"
    assert balancer.next_up() == ("t3",)
    with pytest.raises(NoHealthyReplica):
        balancer.move(leases["t1"], is_failed=False)  # requested after the first trajectory
    while balancer.lease_of("t3") == leases["t3"]:
        with suppress(NoHealthyReplica):
            balancer.move(leases["t3"], is_failed=False)
        if balancer.lease_of("t3") == leases["t3"]:
            balancer.release(new.popitem()[1], None, 103.0)
    assert balancer.orders("t3") == ()
    assert balancer.next_up() == ("t1",)
    balancer.check()


@pytest.mark.parametrize("asked", [lambda name: demand(name, name, 1000, name), lambda name: session(name, 9.0)])
def test_holders_whose_contexts_have_outgrown_the_capacity_ask_before_their_next_turn(asked):
    balancer = Balancer(small_fleet(), SHORT)
    leases = {name: balancer.acquire(replace(asked(name), process_id=name), 0.0) for name in "abcd"}
    for lease in leases.values():
        turn(balancer, lease, 1500, 1.0)
    for name in "abc":
        turn(balancer, leases[name], 3000, 2.0, known=1500)
    is_let_go = [balancer.orders(name) == ((lease.lease_id, None),) for name, lease in leases.items()]
    assert is_let_go == [False, False, False, True], "the one with the fewest turns; the others have 9,000"
    with pytest.raises(NoHealthyReplica):
        balancer.move(leases["d"], is_failed=False)
    for name in "ab":
        balancer.release(leases[name], None, 3.0)
    assert balancer.move(leases["d"], is_failed=False).replica_id == "r0"
    balancer.check()


def test_without_a_limit_no_holder_asks_because_contexts_have_outgrown_the_capacity():
    balancer = Balancer(small_fleet(), replace(SHORT, limits_kv=False))
    leases = [balancer.acquire(demand(name, name, 1000), 0.0) for name in "abcd"]
    for lease in leases:
        turn(balancer, lease, 5000, 1.0)
    assert balancer.orders("w1") == ()


def test_a_turn_that_began_before_its_order_was_heard_counts_again():
    balancer = Balancer(small_fleet(), SHORT)
    leases = fill(balancer)
    for lease in leases.values():
        turn(balancer, lease, 1500, 1.0)
    assert not balancer.has_room(demand("n", "n", 1000))
    balancer.look(100.0)
    low = balancer.kv_use("r0").predicted_tokens
    balancer.turn_begun(leases["t0"].lease_id)
    assert balancer.orders("t0") == ()
    assert balancer.kv_use("r0").predicted_tokens > low
    balancer.check()


def test_a_line_ends_with_its_replica():
    fleet = small_fleet(2)
    balancer = Balancer(fleet, SHORT)
    leases = fill(balancer)
    for lease in leases.values():
        turn(balancer, lease, 2000, 1.0)
    assert not balancer.has_room(demand("n", "n", 1000))
    balancer.look(100.0)
    fill(balancer, prefix="n")
    waiting = next(lease for lease in leases.values() if lease.replica_id == "r0")
    with pytest.raises(NoHealthyReplica):
        balancer.move(waiting, is_failed=False)
    fleet.deregister("r0")
    balancer.drop_replica("r0")
    assert balancer.move(waiting, is_failed=True).replica_id == "r1"
    balancer.check()


def test_in_the_tail_a_turn_s_end_moves_its_trajectory_to_a_replica_that_has_much_less():
    fleet = fleet_of("a")
    balancer = Balancer(fleet)
    leases = [balancer.acquire(demand(f"g{i}/0", f"g{i}", 1000, "w"), 0.0) for i in range(6)]
    add(fleet, "b")
    for lease in leases:
        turn(balancer, lease, 1500, 100.0)
    moved = dict(balancer.orders("w"))
    assert 1 <= len(moved) <= 3
    assert all(lease is not None and lease.replica_id == "b" for lease in moved.values())
    old = next(iter(moved))
    lease = next(one for one in leases if one.lease_id == old)
    assert balancer.move(lease, is_failed=True) == moved[old]  # already moved
    balancer.check()


def test_while_many_run_a_turn_s_end_moves_nothing():
    fleet = fleet_of("a")
    balancer = Balancer(fleet)
    leases = [balancer.acquire(demand(f"g{i}/0", f"g{i}", 1000, "w"), 0.0) for i in range(40)]
    add(fleet, "b")
    for lease in leases:
        turn(balancer, lease, 1500, 100.0)
    assert balancer.orders("w") == ()


def shares_after_rounds(asked):
    """Return the share after each of eight rounds of turns whose contexts were all lost."""
    balancer, shares = Balancer(small_fleet(1, 10**6)), []
    leases = [balancer.acquire(one, 0.0) for one in asked]
    for number in range(8):
        for lease in leases:
            turn(balancer, lease, 1000 + 100 * number, float(number), cached=0, known=900 + 100 * number)
        shares.append(balancer.share.value)
    return shares


def test_lost_contexts_trim_the_share_alike_for_trajectories_and_sessions():
    trajectories = shares_after_rounds([demand(f"t{number}", f"g{number}", 900) for number in range(64)])
    assert trajectories == shares_after_rounds([session(f"s{number}", 100.0) for number in range(64)])
    assert trajectories[-1] == pytest.approx(0.75**2)


def test_a_prompt_that_extends_no_earlier_turn_lost_nothing():
    balancer = Balancer(small_fleet(1, 10**6))
    lease = balancer.acquire(session("s", expires_at=10.0), 0.0)
    for number in range(100):
        turn(balancer, lease, 1000, float(number), cached=0)
    assert (balancer.share.value, balancer.kv_use("r0").hit_rate) == (1.0, None)


def test_the_promise_follows_sessions_too():
    balancer, other = Balancer(small_fleet(kv_tokens=50_000)), Balancer(small_fleet(kv_tokens=50_000))
    lease = balancer.acquire(session("s", expires_at=10.0), 0.0)
    for number in range(100):
        turn(balancer, lease, 1100 + 100 * number, 1.0, cached=0, known=1000 + 100 * number)
    balancer.release(lease, None, 2.0)
    assert len(fill(balancer)) > 1.5 * len(fill(other))


def test_equal_prefixes_go_together_until_their_replica_has_much_more():
    balancer = Balancer(fleet_of("a", "b", "c"))
    prompts = (("long", 8192), ("short", 512))
    placed = [
        balancer.acquire(replace(session(f"s{i}", 10.0), num_prompt_tokens=9000, prefixes=prompts), 0.0).replica_id
        for i in range(3)
    ]
    assert len(set(placed)) == 1, "what they share is worth more than the place they take"
    other = balancer.acquire(replace(session("o", 10.0), num_prompt_tokens=9000), 0.0)
    assert other.replica_id != placed[0]
    many = [
        balancer.acquire(replace(session(f"m{i}", 10.0), num_prompt_tokens=9000, prefixes=prompts), 0.0).replica_id
        for i in range(40)
    ]
    assert len(set(many)) == 3
    balancer.check()


def test_different_prompts_with_one_affinity_go_together():
    def placed(affinity: str, num_tokens: int) -> set[str]:
        balancer = Balancer(fleet_of("a", "b", "c"))
        prompts = [prefixes_of(range(number, number + num_tokens), affinity) for number in range(3)]
        leases = [
            balancer.acquire(replace(session(f"s{at}", 10.0), num_prompt_tokens=num_tokens, prefixes=one), 0.0)
            for at, one in enumerate(prompts)
        ]
        balancer.check()
        return {lease.replica_id for lease in leases}

    for num_tokens in (100, 9000):
        assert len(placed("rollout-1", num_tokens)) == 1
        assert len(placed("", num_tokens)) == 3


def test_equal_prefixes_under_other_adapters_or_versions_are_others():
    fleet = fleet_of("a", "b", "c")
    fleet.adapters = {"math": 1, "law": 1}
    balancer = Balancer(fleet)

    def placed(name, adapter):
        asked = replace(session(name, 10.0), num_prompt_tokens=9000, prefixes=(("long", 8192),))
        return balancer.acquire(replace(asked, needs=Needs(adapter=adapter)), 0.0).replica_id

    first = placed("m1", "math")
    assert placed("m2", "math") == first
    law = placed("l1", "law")
    base = placed("b1", "")
    assert len({first, law, base}) == 3
    assert (placed("l2", "law"), placed("b2", "")) == (law, base)
    assert placed("m3", "math") == first
    balancer.new_epoch(is_flushed=True, adapter="math")
    assert placed("m4", "math") != first
    assert placed("l3", "law") == law, "the other adapter's version is the same"
    with pytest.raises(ModelNotFound):
        placed("x", "gone")


def test_the_share_grows_while_something_waits_and_the_engines_have_unused_kv():
    fleet = small_fleet()
    balancer = Balancer(fleet, SHORT)
    leases = fill(balancer)
    balancer.look(1.0)
    grown = balancer.share.value
    assert grown > 1.0, "something was refused, and the engine holds nothing"
    balancer.look(2.0)
    assert balancer.share.value == grown, "nothing waits"
    assert not balancer.has_room(demand("n", "n", 3000))
    report(fleet, "r0", kv_used_tokens=9000)
    balancer.look(3.0)
    assert balancer.share.value == grown, "the engine uses its KV"
    assert not balancer.has_room(demand("n", "n", 3000))
    report(fleet, "r0", num_waiting=1)
    balancer.look(4.0)
    assert balancer.share.value == grown, "the engine has a queue of its own"
    for lease in leases.values():
        turn(balancer, lease, 1700, 5.0)
    assert not balancer.has_room(demand("n", "n", 3000))
    report(fleet, "r0")
    balancer.look(5.0)
    assert balancer.share.value == grown, "holders at their tools use it"


def test_the_share_is_trimmed_and_cut_as_contexts_are_computed_again():
    share = KVShare(ShareBounds())
    for _ in range(48):
        share.turn(100.0, 11.0, 1)
    assert share.value == 1.0
    for _ in range(48):
        share.turn(100.0, 13.0, 1)
    assert share.value == pytest.approx(0.92)
    for _ in range(48):
        share.turn(100.0, 31.0, 1)
    assert share.value == pytest.approx(0.92 * 0.75)
    for _ in range(100 * 48):
        share.turn(100.0, 100.0, 1)
    assert share.value == ShareBounds().least
    for _ in range(1000):
        share.grow(0.0, 100.0)
    assert share.value == ShareBounds().most


def test_kv_that_was_to_be_there_and_was_computed_again_counts_as_lost():
    balancer = Balancer(small_fleet(1, 10**6))
    lease = balancer.acquire(demand("t", "g", 1000), 0.0)
    turn(balancer, lease, 1000, 0.0, cached=0)
    for number in range(60):
        turn(balancer, lease, 1000, float(number), cached=980, known=1000)  # all except a part of a block
    assert balancer.share.value == 1.0
    for number in range(60):
        turn(balancer, lease, 1000, float(number), cached=0, known=1000)
    assert balancer.share.value < 1.0


def test_kv_that_a_flush_took_counts_as_lost():
    balancer = Balancer(small_fleet(1, 10**6))
    lease = balancer.acquire(demand("t", "g", 1000), 0.0)
    for number in range(60):
        turn(balancer, lease, 1000, float(number), cached=1000 * (number > 0), known=1000 * (number > 0))
        balancer.new_epoch(is_flushed=True)
    assert balancer.share.value < 1.0
