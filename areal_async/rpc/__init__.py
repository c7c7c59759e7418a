"""Typed requests over ZeroMQ between the processes of a run.

`messages` declares every request with its reply; `Client` and `SyncClient` (`client`) send them; `Server`
(`server`) answers each once, by its memory of replies (`reply_book`). Under them lie the bytes (`frames`),
the sockets (`sockets`), the addresses with who is let in (`endpoints`) and what peers show (`secret`)."""
