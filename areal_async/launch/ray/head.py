"""Check that a Ray head answers. If Ray itself connected to a head that does not answer, it might wait
forever and give no reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress

from areal_async.base.errors import RunError

ASK = (sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address")


def check_head(
    address: str, *, connect_s: float = 10.0, answer_s: float = 60.0, ask: tuple[str, ...] = ASK
) -> None:
    """Raise `RunError` unless a Ray head answers at `address`: `HOST:PORT`, or `auto` for this machine's
    head."""
    host, _, port = address.rpartition(":")
    started = "start the cluster (`ray start --head`), or correct ray.address in the cluster file"
    deadline_s = time.monotonic() + connect_s  # the head may be starting
    while port.isdecimal() and not _listens(host.strip("[]"), int(port)):
        if time.monotonic() > deadline_s:
            raise RunError(f"nobody listens at {address}: {started}")
        time.sleep(0.5)
    try:  # Ray waits up to 45 s for a silent head
        asked = subprocess.run([*ask, address], capture_output=True, text=True, timeout=answer_s, check=False)
        said = (asked.stderr.strip() or asked.stdout.strip() or "no reason given").splitlines()[-1][:200]
        if asked.returncode == 0:
            return
    except subprocess.TimeoutExpired:
        said = f"silent for {answer_s:g} s"
    unset = "" if os.environ.get("RAY_USE_TLS") == "1" else " (RAY_USE_TLS is not set)"
    raise RunError(
        f"{address} does not answer as a Ray head: {said.rstrip('.')}. `. keys/nodes/HOST/env.sh` in this "
        f"shell{unset}, with the keys that the head was started with; or {started}"
    )


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5.0):
        return True
    return False
