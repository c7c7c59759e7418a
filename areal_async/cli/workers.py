"""`areal-async scale | drain`: workers join and leave a run while it goes on."""

from __future__ import annotations

from pathlib import Path

from areal_async.errors import ArealError, FaultError
from areal_async.launch.errors import RunFolderError
from areal_async.launch.runs import find_run
from areal_async.rpc.control_messages import DrainWorker, ScaleWorkers, WorkersChanged

ANSWER_S = 30.0
"""Beyond the time that a drain may take."""


class WorkersError(ArealError):
    """The supervisor did not do what was asked."""


def ask(target: Path, request: ScaleWorkers | DrainWorker) -> WorkersChanged:
    """Have the supervisor of the run at `target` change its workers, and return once it has. Raises
    `RunFolderError` where nothing runs, `WorkersError` with its reason where it refuses."""
    run = find_run(target)
    if run.places is None:
        raise RunFolderError(
            f"the run in {run.folder} is not running. `areal-async resume {target} rollout.workers=N` "
            "goes on with it with N workers."
        )
    try:
        return run.ask(request, timeout_s=request.limit_ms / 1000 + ANSWER_S)
    except FaultError as error:
        raise WorkersError(f"nothing was changed: {error.message}.") from error
