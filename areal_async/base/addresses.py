"""Addresses of this host."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from areal_async.base.errors import EndpointError

LOOPBACK = "127.0.0.1"
"""Address at which only its own processes reach a host."""
SOCKET_PATH_LIMIT = 107
"""Bytes in a unix socket path, without its ending NUL (`sockaddr_un.sun_path` holds 108)."""


def interface_of(*hosts: str) -> str:
    """Return the name of this machine's network interface with the first of these addresses that one has.
    Raises `EndpointError`."""
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
