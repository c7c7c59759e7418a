"""The ledger: what became of every task, group and episode of a job, as a pure state machine.

Contract. `decide(index, command, now_ms)` looks at the index and returns a `Decision`: the reply, and the
writes that make it true. It changes nothing, reads no clock and does no I/O; `index.apply(writes)` is the
only way the index changes, and the same writes go to Redis in one script call. So the index is always a
function of what Redis holds, and a crash between two decisions leaves a state from which any message can be
asked again.

Every group follows

    QUEUED → LEASED → GENERATED → SCORED → BATCHED(step) → TRAINED(step) → COMMITTED(checkpoint)

with LEASED → QUEUED when a lease ends early, QUEUED → GENERATED where a partial group goes on, TRAINED →
SCORED while a group may be used again (`max_reuse`), SCORED → TRAINED when it no longer may, BATCHED ←
TRAINED when a trainer comes back from a checkpoint, and → DROPPED(reason) from any state before it is
TRAINED for the first time. Each episode of a group follows

    MISSING → STORED → CLAIMED → VERDICT

with CLAIMED → STORED when a claim ends without a score, and MISSING → ABSENT when it is given up by the
policy of groups. A group is GENERATED when no sample is MISSING, and SCORED when each is VERDICT or
ABSENT. Each transition is counted by its reason.

What is fenced: results by lease id, verdicts by claim id, the trainer's messages by its epoch; every message
may be repeated. Time is Redis's, an argument of every decision: what has reached its deadline (a lease, a
claim, a group) is ended by `ExpireDeadlines`, due at `index.next_deadline_ms`. What is not decided here:
whether bytes reached Redis (`redis.store`), and waiting (`coordinator`).
"""
