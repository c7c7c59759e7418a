from hypothesis import given
from hypothesis import strategies as st

from areal_async.weights.channels.serving import MAX_SOURCES, RelayTree, sources

ORIGIN = "o"
LINE = [f"r{i}" for i in range(40)]


@given(st.integers(1, 40), st.integers(1, 4))
def test_the_origin_serves_one_and_each_receiver_at_most_its_fan_out(n, fan_out):
    parents = [sources(LINE[:n], me, ORIGIN, fan_out)[0] for me in range(n)]
    assert parents.count(ORIGIN) == 1
    assert all(parents.count(member) <= fan_out for member in LINE)
    for me in range(n):  # following first sources ends at the origin: nobody waits in a circle
        at, steps = me, 0
        while parents[at] != ORIGIN:
            at, steps = LINE.index(parents[at]), steps + 1
            assert steps <= n


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 4))
def test_the_origin_is_always_among_the_sources_and_oneself_never(n, me, fan_out):
    found = sources(LINE[:n], me % n, ORIGIN, fan_out)
    assert ORIGIN in found
    assert LINE[me % n] not in found
    assert len(found) == len(set(found)) <= MAX_SOURCES


def test_without_relays_everyone_fetches_from_the_origin():
    assert sources(LINE, 7, ORIGIN, 0) == [ORIGIN]


def test_receivers_form_a_chain_in_the_order_in_which_they_ask():
    tree = RelayTree(1)
    assert tree.join("k", "a", ORIGIN)[0] == ORIGIN
    assert tree.join("k", "b", ORIGIN)[:2] == ["a", ORIGIN]
    assert tree.join("k", "c", ORIGIN)[:3] == ["b", "a", ORIGIN]
    assert tree.join("k", "b", ORIGIN)[0] == "a", "asking again changes nothing"
    tree.forget("k")
    assert tree.join("k", "b", ORIGIN)[0] == ORIGIN
