"""The replay buffer: tasks, leases, episodes, verdicts and batches of one job, in Redis.

`ledger` makes decisions as pure functions, and `redis` stores them. `coordinator` keeps the two consistent,
and `server` handles the protocol. Other services only send the buffer's requests (`areal_async.rpc.messages`)
and import nothing from this package."""
