from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores import S3Server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("AREAL_ASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["s3", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty place in a store of each kind."""
    match request.param:
        case "s3":
            server: S3Server = request.getfixturevalue("s3")
            return server.bucket()
        case "file":
            return f"file://{tmp_path}/store"
        case _:
            return f"memory://{tmp_path.name}/store"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like a model's: small files, one of several requests, one empty, one in a folder below."""
    folder = tmp_path / "model"
    (folder / "below").mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden": 3}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (9 << 12))
    (folder / "below" / "empty").write_bytes(b"")
    return folder
