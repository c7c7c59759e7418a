"""What the buffer's log says of verdicts that were no score."""

from __future__ import annotations

from areal_async.rpc.verdicts import Failure, Timeout
from replay_buffer.server import REPEAT_MS, NoScoreLog


def said_by():
    """A log, and what it says."""
    lines = []

    def say(event, *, kind, count, episode_id, message):
        assert event == "verdicts without a score"
        lines.append((kind, count, message))

    return NoScoreLog(say), lines


def fail(ledger, verdict):
    ledger.judge(ledger.claim(), verdict)


def test_each_kind_is_said_at_once_and_then_now_and_then(drive):
    ledger = drive(group_size=1, retries=10**6)
    log, said = said_by()
    log.look(ledger.index.meta, ledger.now_ms)
    (group,) = ledger.lease()
    ledger.put(group)
    for number in range(5):
        fail(ledger, Failure("exception", f"no {number}"))
        ledger.now_ms += 1000
        log.look(ledger.index.meta, ledger.now_ms)
    fail(ledger, Timeout(100))
    log.look(ledger.index.meta, ledger.now_ms)
    assert said == [("error:exception", 1, "no 0"), ("timeout", 1, "no answer within 0.1 s")]
    ledger.now_ms += REPEAT_MS
    log.look(ledger.index.meta, ledger.now_ms)
    assert said[2:] == [("error:exception", 5, "no 4")]
    ledger.now_ms += 10 * REPEAT_MS
    log.look(ledger.index.meta, ledger.now_ms)
    assert len(said) == 3, "nothing new, nothing said"


def test_a_buffer_that_starts_does_not_say_what_was_said_before(drive):
    ledger = drive(group_size=1, retries=9)
    (group,) = ledger.lease()
    ledger.put(group)
    fail(ledger, Failure("exception", "old"))
    log, said = said_by()
    log.look(ledger.index.meta, ledger.now_ms)
    assert said == []
    fail(ledger, Failure("exception", "new"))
    log.look(ledger.index.meta, ledger.now_ms)
    assert said == [("error:exception", 2, "new")]
