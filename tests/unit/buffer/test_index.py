"""The index: derived figures, order, and what a change makes possible."""

from __future__ import annotations

import random

from replay_buffer.ledger.index import SortedIndex


def test_order_is_by_key_then_id_and_follows_changes():
    rng = random.Random(0)
    order, model = SortedIndex(), {}
    for _ in range(2000):
        id_ = f"g{rng.randrange(40)}"
        key = None if rng.random() < 0.3 else (rng.randrange(5), rng.randrange(5))
        order.set(id_, key)
        model.pop(id_, None)
        if key is not None:
            model[id_] = key
        expected = sorted(model, key=lambda name: (model[name], name))
        assert list(order) == expected
        assert order.first_key() == (model[expected[0]] if expected else None)
        assert (id_ in order) == (key is not None)


def test_edges_say_what_has_become_possible(drive):
    ledger = drive(batch_groups=1, max_staleness=0, group_size=2)

    (group,) = ledger.lease()
    assert ledger.fired == set()
    ledger.put(group, [0])
    assert ledger.fired == {"claim"}
    ledger.put(group, [1])
    assert ledger.fired == {"claim", "batch"}, "what waited for the group may go on"
    items = ledger.claim()
    assert ledger.fired == set()
    ledger.judge(items)
    assert ledger.fired == {"batch"}
    ledger.batch()
    ledger.commit()
    assert ledger.fired == {"lease", "batch"}
    (group,) = ledger.lease()
    ledger.release(group)
    assert ledger.fired == {"lease", "batch"}
