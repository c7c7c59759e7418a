from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.config.job import JobConfig


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    """A small job whose model and tasks are not there."""
    return JobConfig.model_validate(
        {
            "job": "test",
            "run_dir": tmp_path / "runs",
            "model": tmp_path / "model",
            "tasks": {"train": tmp_path / "train.jsonl"},
            "observe": {"metrics_port": 0},
            "supervisor": {"ready_s": 300, "restarts": 0},
        }
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 4 MiB, which is unmounted also if this process is killed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0:
        pytest.skip("needs the right to mount a tmpfs")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    # The shell reads to the end of its input, which comes when this process ends, however it ends.
    last = ["sh", "-c", 'read -r line; umount -l "$1"', "sh", disk]
    with subprocess.Popen(last, stdin=subprocess.PIPE, start_new_session=True) as unmounts:
        yield disk
    assert unmounts.returncode == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: the Debian package openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return cert, key
