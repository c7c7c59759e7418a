"""The one CURVE key pair of a job's hosts, in a file that only its owner may read.

    python -m areal_async.weights.keys FILE

makes one. Whoever has the file is let in, and may read and serve the weights; nobody else is. Two lines:
public and secret key, Z85.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from areal_async.errors import EndpointError
from areal_async.rpc.endpoints import CurveKeys

KEY_BYTES = 40


def make_keys(path: Path) -> None:
    """Write a new pair to `path`, which must not exist."""
    keys = CurveKeys.generate()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(keys.public + b"\n" + keys.secret + b"\n")


def read_keys(path: Path) -> CurveKeys:
    """Raises `EndpointError` for a file that is no key pair, or that others may read."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise EndpointError(f"{path} can be read by others: `chmod 600` it, or make a new key")
        lines = path.read_bytes().split()
    except OSError as error:
        raise EndpointError(f"the keys of weights.channel_args.key_file cannot be read: {error}") from error
    if [len(line) for line in lines] != [KEY_BYTES, KEY_BYTES]:
        raise EndpointError(f"{path} is no key pair: make one with `python -m areal_async.weights.keys`")
    return CurveKeys(lines[0], lines[1], (lines[0],))


if __name__ == "__main__":
    made = Path(sys.argv[1])
    make_keys(made)
    print(
        f"{made} holds a new CURVE key pair, for its owner alone. Give weights.channel_args.key_file a copy "
        "on each host."
    )
