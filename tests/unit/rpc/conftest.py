"""Endpoints with short paths: pytest's own directories can exceed what a unix socket allows."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="wire-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def ipc(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/s"
