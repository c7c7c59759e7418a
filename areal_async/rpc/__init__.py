"""Typed requests over ZeroMQ between the processes of a run.

`messages` declares every request with its reply; `Client` and `SyncClient` (`client`) send them; `Server`
(`server`) answers each once, by its memory of replies (`reply_book`). Lower layers are the bytes (`frames`),
the sockets (`sockets`), the addresses and admission of peers (`endpoints`) and the credentials of peers
(`secret`).
"""
