"""Typed requests over ZeroMQ between the processes of a run.

`messages` declares every request with its reply. `Client` and `SyncClient` (`client`) send requests. `Server`
(`server`) answers each request once and remembers its replies (`reply_book`). The lower layers are the format
of messages (`frames`), the sockets (`sockets`), the addresses and their access rules (`endpoints`), and the
keys with which a peer proves its role (`secret`).
"""
