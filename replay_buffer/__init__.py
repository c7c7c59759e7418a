"""The replay buffer: tasks, leases, episodes, verdicts and batches of one job, in Redis.

`ledger` makes decisions as pure functions, and `redis` writes them. `coordinator` keeps both consistent, and
`server` handles the protocol. Other services use its requests (`areal_async.rpc.messages`) and nothing else
from this package."""
