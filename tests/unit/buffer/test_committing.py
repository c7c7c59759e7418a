"""Commits, checkpoints and the ledger copy."""

from __future__ import annotations

import msgspec

from areal_async.rpc.messages import ExportLedger
from areal_async.rpc.schema import Fault
from replay_buffer.ledger.committing import Copy


def test_the_largest_staleness_is_remembered(drive):
    ledger = drive(batch_groups=1, max_staleness=2)
    (old,) = ledger.lease()
    ledger.step()
    ledger.step()
    ledger.put(old, version=0)
    ledger.judge(ledger.claim())
    ledger.batch()
    assert ledger.index.consumer("policy").max_staleness_seen == 0
    ledger.commit()
    assert ledger.index.consumer("policy").max_staleness_seen == 2


def test_a_checkpoint_of_a_step_to_come_is_refused(drive):
    ledger = drive()
    assert isinstance(ledger.checkpointed(1), Fault)


def test_the_copy_holds_what_is_under_way_and_nothing_that_is_trained(drive):
    ledger = drive(batch_groups=1, max_staleness=3)
    ledger.step()
    ledger.scored(1)
    (leased,) = ledger.lease()
    decision = ledger.decide(ExportLedger("policy", ledger.epoch, 1))
    copy = msgspec.msgpack.decode(decision.payload, type=Copy)
    assert copy.meta == ledger.index.meta
    assert {group.group_id for group in copy.groups} == {"cafe0123:1:0#0", leased.group_id}
    assert decision.writes is None


def test_the_copy_is_of_the_last_committed_step_or_refused(drive):
    ledger = drive()
    ledger.step()
    assert ledger.send(ExportLedger("policy", ledger.epoch, 0)).kind == "invalid"
    assert ledger.send(ExportLedger("policy", ledger.epoch + 1, 1)).kind == "fenced"
