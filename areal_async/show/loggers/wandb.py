"""Weights & Biases. `mode: offline` (or WANDB_MODE=offline) stores everything in `<run>/loggers/wandb`, for
`wandb sync`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from areal_async.service.samples import SampleKind
from areal_async.show.loggers import LoggedRun, missing_package
from areal_async.show.loggers.tables import table_of

_open: set[str] = set()
"""Ids of the open runs of this process. They share wandb's service process."""


class WeightsAndBiases:
    """Unset arguments have the values of wandb's environment variables (WANDB_API_KEY, WANDB_BASE_URL,
    WANDB_MODE …)."""

    def __init__(
        self,
        run: LoggedRun,
        *,
        project: str = "areal-async",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        own = run.state.setdefault("id", secrets.token_hex(8))
        offline = (mode or os.environ.get("WANDB_MODE", "")) == "offline"
        self._offline = offline
        self._table, self._image = wandb.Table, wandb.Image
        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            group=group,
            tags=tags,
            mode=mode,
            id=own,
            name=run.job,
            dir=str(run.folder),
            config=run.config,
            resume=None if offline else "allow",  # Offline, `wandb sync` joins the parts of a run
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        _open.add(self._run.id)
        self._run.define_metric("steps", hidden=True)
        self._run.define_metric("*", step_metric="steps")

    check_job = staticmethod(partial(missing_package, "wandb"))

    def figures(self, steps: int, values: Mapping[str, float]) -> None:
        self._run.log({"steps": steps, **values})

    def samples(self, steps: int, kind: SampleKind, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = table_of(samples, self._image)
        self._run.log({"steps": steps, f"samples/{kind}": self._table(columns=columns, data=rows)})

    def flush(self) -> None:
        """Do nothing, because wandb's own process has already received the values."""

    def close(self, ending: str) -> None:
        """Close the run, and return when all figures are in the files. `finish` returns before wandb's
        service process has written the end of an offline run. Therefore the last run to close waits until
        that process has exited, unless a run of other code uses it."""
        import wandb

        self._run.finish(exit_code=0 if ending == "finished" else 1)
        _open.discard(self._run.id)
        if self._offline and not _open and wandb.run is None:
            wandb.teardown()
