"""Addresses of this host and of servers. The address of a server may change while clients are connected to
it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from areal_async.base.errors import EndpointError

LOOPBACK = "127.0.0.1"
"""Address of this host that only processes of the same host can reach."""
SOCKET_PATH_LIMIT = 107
"""Longest unix socket path in bytes, without its final NUL (`sockaddr_un.sun_path` holds 108)."""


def interface_of(*hosts: str) -> str:
    """Return the name of this machine's network interface that has the first usable address of `hosts`.
    Raises `EndpointError` if no interface has any of them."""
    for host in hosts:
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.family == socket.AF_INET and each.address == host for each in addresses):
                return name
    raise EndpointError(
        f"no network interface of this machine has the address {' or '.join(filter(None, hosts))}"
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(eq=False)
class Address:
    """The endpoint of one server, and the server's name, which selects its key (see `rpc/secret.py`). Any
    thread may `move` it."""

    endpoint: str
    server: str = ""

    def __str__(self) -> str:
        return self.endpoint

    def move(self, endpoint: str) -> None:
        """Change the endpoint. Clients of this address soon connect to the new endpoint, at the latest before
        their next request."""
        self.endpoint = endpoint
