"""Planned stops: a worker that drains is leased nothing more, and hands over what it cannot finish."""

from __future__ import annotations

from areal_async.rpc.messages import Drain, Release
from replay_buffer.ledger.leasing import MAX_DRAINING


def drain(ledger, worker="rollout-0"):
    ledger.send(Drain(worker, "the host is taken down"))


def test_handing_over_uses_up_no_lease_of_the_group(drive):
    ledger = drive()
    for _ in range(20):
        (group,) = ledger.lease()
        ledger.send(Release("rollout-0", group.lease_id, "drained"))
    assert ledger.state(group) == "QUEUED"
    for _ in range(5):
        (group,) = ledger.lease()
        ledger.release(group)
    assert ledger.state(group) is None
    assert ledger.count("dropped:leases_used_up") == 1


def test_a_ledger_copy_from_before_the_drain_does_not_undo_it(drive):
    ledger = drive()
    copy = ledger.export()
    drain(ledger)
    assert "rollout-0" in ledger.rebuilt().meta.draining
    ledger.open()
    assert ledger.lease() == []
    ledger.set_consumer(checkpoint=1)
    ledger.open(0, copy)
    assert ledger.lease() == []
    assert len(ledger.lease(worker="rollout-1")) == 1


def test_nothing_is_unbounded_the_names_of_drained_workers_are_forgotten_in_the_end(drive):
    ledger = drive()
    for number in range(2 * MAX_DRAINING):
        drain(ledger, f"pod-{number}")
    assert len(ledger.index.meta.draining) == MAX_DRAINING
    assert f"pod-{2 * MAX_DRAINING - 1}" in ledger.index.meta.draining
