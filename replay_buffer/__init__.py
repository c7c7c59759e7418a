"""The experience buffer: tasks, leases, episodes, verdicts and batches of one job, in Redis.

`ledger` decides, purely; `redis` writes; `coordinator` keeps the two in step; `server` speaks the wire.
Other services use its requests (`areal_async.rpc.messages`) and nothing of this package."""
