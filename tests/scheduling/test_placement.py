from hypothesis import given
from hypothesis import strategies as st

from agentloop.scheduling.placement import LoadIndex

NAMES = st.sampled_from("abcdef")
ORDERS = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3), st.integers(0, 3))
STEPS = st.lists(st.one_of(st.tuples(NAMES, ORDERS), st.tuples(NAMES, st.none())), max_size=400)


@given(STEPS, st.one_of(st.none(), NAMES))
def test_the_least_is_that_of_a_walk_over_all(steps, without):
    index, orders = LoadIndex(), {}
    for name, order in steps:
        if order is None:
            index.remove(name)
            orders.pop(name, None)
        else:
            index.put(name, order)
            orders[name] = order
        for excluded in (None, without):
            others = [(order, name) for name, order in orders.items() if name != excluded]
            assert index.least(without=excluded) == min(others, default=(None, None))[1]


def test_a_replica_of_many_changes_is_found():
    index = LoadIndex()
    for load in range(1000):
        index.put("a", (float(load), 0, 0))
        index.put("b", (float(1000 - load), 0, 0))
    assert index.least() == "b"
    assert index.order("b")[0] == 1.0
    assert len(index) == 2
