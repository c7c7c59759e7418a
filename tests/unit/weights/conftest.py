import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="weights-"))
    yield path
    shutil.rmtree(path)
