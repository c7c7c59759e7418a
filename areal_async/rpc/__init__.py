"""Typed requests over ZeroMQ between the processes of a run.

`messages` declares every request with its reply. `Client` and `SyncClient` (`client`) send requests. `Server`
(`server`) answers each request once and remembers its replies (`reply_book`). Lower layers are the bytes
(`frames`), the sockets (`sockets`), the addresses and their access rules (`endpoints`), and the peers' proofs
(`secret`).
"""
