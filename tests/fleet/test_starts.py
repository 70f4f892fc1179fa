"""Engine starts that request permission before they take memory."""

from agentloop.fleet.starts import SILENT_AFTER_S, Starts


def test_a_start_waits_for_the_wake_and_then_loads_until_it_joins():
    starts = Starts()
    assert not starts.ask("a", 0.0, is_asleep=True)
    assert starts.under_way == ()
    assert [(one.waiting_s, one.reason) for one in starts.statuses(4.0)] == [(4.0, "the fleet sleeps")]
    assert starts.ask("a", 5.0, is_asleep=False)
    assert starts.under_way == ("a",)
    assert starts.ask("a", 6.0, is_asleep=True)  # it holds the memory already
    assert starts.statuses(6.0)[0].reason == ""
    starts.ended("a")
    assert (starts.under_way, starts.statuses(7.0)) == ((), ())


def test_one_that_is_silent_is_forgotten():
    starts = Starts()
    starts.ask("a", 0.0, is_asleep=False)
    starts.expire(SILENT_AFTER_S - 1.0)
    assert starts.under_way == ("a",)
    starts.expire(SILENT_AFTER_S)
    assert starts.under_way == ()
