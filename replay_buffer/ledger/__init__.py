"""The ledger: the state of every task, group and episode of a job, as a pure state machine.

Contract. `decide(index, command, now_ms)` looks at the index and returns a `Decision`: the reply, and the
writes that make it true. It changes nothing, reads no clock and does no I/O. Only `index.apply(writes)`
changes the index, and the same writes go to Redis in one script call. So the index is always a function of
the records in Redis, and after a crash between two decisions any message can be sent again.

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

Results are fenced by lease id, verdicts by claim id, and the trainer's messages by its epoch; every message
may be repeated. Time is an argument of every decision. `ExpireDeadlines`, due at `index.next_deadline_ms`,
ends leases, claims and groups that have reached their deadlines. Other modules decide whether bytes reached
Redis (`redis.store`), and handle waiting (`coordinator`).
"""
