"""Who may take memory, and when."""

from agentloop.fleet.starts import StartConfig, Starts

CONFIG = StartConfig(max_starts=3, window_s=100.0, silent_after_s=10.0)


def test_a_replica_that_asks_while_the_fleet_sleeps_waits_for_the_wake():
    starts = Starts(CONFIG)
    assert starts.ask("a", 0, 0.0, is_asleep=True) > 0
    assert starts.under_way == ()
    assert [(one.waiting_s, one.reason) for one in starts.statuses(4.0)] == [(4.0, "the fleet sleeps")]
    assert starts.ask("a", 0, 5.0, is_asleep=False) == 0.0
    assert starts.under_way == ("a",)
    assert starts.ask("a", 0, 6.0, is_asleep=True) == 0.0  # it has taken the memory already
    starts.ended("a")
    assert (starts.under_way, starts.statuses(7.0)) == ((), ())


def test_a_slot_that_dies_again_and_again_is_held_back_for_a_while():
    starts = Starts(CONFIG)
    for number in range(3):
        assert starts.ask(f"a{number}", 0, 10.0 * number, is_asleep=False) == 0.0
        starts.ended(f"a{number}")
    assert starts.ask("a3", 0, 30.0, is_asleep=False) > 0
    (held,) = starts.statuses(30.0)
    assert held.reason == "slot 0 was started 3 times within 100 s; again in 70 s"
    assert starts.ask("b", 1, 30.0, is_asleep=False) == 0.0  # another slot
    assert starts.ask("a3", 0, 100.0, is_asleep=False) == 0.0  # the first start has left the window
    assert starts.ask("a4", 0, 101.0, is_asleep=False) > 0


def test_who_is_silent_is_forgotten():
    starts = Starts(CONFIG)
    starts.ask("a", 0, 0.0, is_asleep=False)
    starts.expire(9.0)
    assert starts.under_way == ("a",)
    starts.expire(10.0)
    assert starts.under_way == ()
