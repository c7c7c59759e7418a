"""The ledger: the state of every task, group and episode of a job, as a pure state machine.

`decide(index, command, now_ms)` reads the index (the records in memory) and returns a `Decision`: the reply,
and the writes that must precede the reply. It changes nothing, reads no clock and does no I/O. Only
`index.apply(writes)` changes the index, and the same writes go to Redis in one script call. So the index
always matches the content of Redis. After a crash, clients can send every unanswered message again.

Every group follows

    QUEUED → LEASED → GENERATED → SCORED → BATCHED(step) → TRAINED(step) → COMMITTED(checkpoint)

Other transitions of a group:

- LEASED → QUEUED: a lease ends early.
- QUEUED → GENERATED: a partial group continues without its missing samples.
- TRAINED → SCORED: the group may be used again (`max_reuse`).
- SCORED → TRAINED: the group may no longer be used again.
- TRAINED → BATCHED: a trainer resumes from a checkpoint.
- any state before the first TRAINED → DROPPED(reason).

Each episode of a group follows

    MISSING → STORED → CLAIMED → VERDICT

with two other transitions. CLAIMED → STORED: a claim ends without a score. MISSING → ABSENT: the policy for
groups (`group_policy`) gives the episode up. A group is GENERATED when no sample is MISSING. It is SCORED
when each sample is VERDICT or ABSENT. The ledger counts each transition by its reason.

Messages of an outdated sender are refused: episodes by their lease id, verdicts by their claim id, and the
trainer's messages by its epoch. Every message may be repeated. Time is the ledger's clock, an argument of
every decision. The command `ExpireDeadlines`, due at `index.next_deadline_ms`, ends each lease, claim and
group whose deadline has passed. Two things are decided elsewhere: whether bytes reached Redis
(`redis.store`), and how long a request waits (`coordinator`).
"""
