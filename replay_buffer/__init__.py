"""The experience buffer: tasks, leases, episodes, verdicts and batches of one job, in Redis.

`ledger` and `admission` decide, purely; `store` writes; `front` keeps the two in step; `server` speaks the
wire. Other services use `replay_buffer.client` and nothing else of this package."""
