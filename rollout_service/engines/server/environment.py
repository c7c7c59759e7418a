"""Where a server's own Python environment lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from areal_async.engine_folders import EngineMissing, find_engine_python
from rollout_service.engines.base import EngineError


def find_python(
    engine: str, configured: Path | None = None, *, variables: Mapping[str, str] = os.environ
) -> Path:
    """As `find_engine_python`, but raises `EngineError`."""
    try:
        return find_engine_python(engine, configured, variables=variables)
    except EngineMissing as error:
        raise EngineError(str(error)) from error
