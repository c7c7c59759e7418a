"""The address of a server, which may change while its clients live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Address:
    """The endpoint of one server, and the name of its key (see `secret.py`). Any thread may `move` it."""

    endpoint: str
    server: str = ""

    def __str__(self) -> str:
        return self.endpoint

    def move(self, endpoint: str) -> None:
        """Change the endpoint. Clients of this address connect there before their next request, and within
        moments in any case."""
        self.endpoint = endpoint
