"""Where the Python environment of an engine's server lies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from areal_async.errors import ArealError

VARIABLE = "AREAL_ASYNC_ENGINES"
"""Environment variable: a folder with one environment for each engine."""
PROJECT_FOLDER = Path(__file__).resolve().parents[1]
"""Of a checkout; `make engines` makes its environments there."""


class EngineMissing(ArealError):
    """No environment has the server of an engine: the text says where it was looked for, and what to do."""


def find_engine_python(
    engine: str, configured: Path | None = None, *, variables: Mapping[str, str] = os.environ
) -> Path:
    """The Python that has the server `engine`: of `configured` (rollout.server.environment), else of
    `$AREAL_ASYNC_ENGINES/<engine>`, else of `.engines/<engine>` in the working folder or in the project's.

    Raises `EngineMissing`."""
    if configured is not None:
        places, named = [configured], "rollout.server.environment"
    elif variables.get(VARIABLE):
        places, named = [Path(variables[VARIABLE]) / engine], f"the variable {VARIABLE}"
    else:
        places = list(dict.fromkeys(folder / ".engines" / engine for folder in (Path.cwd(), PROJECT_FOLDER)))
        named = "the default"
    for place in places:
        python = place / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    raise EngineMissing(
        f"{named} names {' and '.join(map(str, places))}, which has no Python environment with {engine}. "
        f"Make one with `make engines`, or set rollout.server.environment to one that has it."
    )
