"""MLflow: its tracking server, or by default a database in `<run>/loggers/mlflow`."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from areal_async.service.samples import SampleKind
from areal_async.show.loggers import LoggedRun, missing_package
from areal_async.show.loggers.tables import table_of

MOST_PARAMETERS = 100  # Limit for one request
MOST_CHARACTERS = 500  # Limit for a parameter's value
MOST_TABLES = 60  # Limit for the names in the tag, because MLflow limits its length
ENDINGS = {"finished": "FINISHED", "interrupted": "KILLED"}
TABLES = "mlflow.loggedArtifacts"  # MLflow's run page finds the tables by this tag


class MLflow:
    """`tracking_uri` is the URI of a server or a database. By default it is MLFLOW_TRACKING_URI, or a
    database in the run's folder."""

    def __init__(self, run: LoggedRun, *, tracking_uri: str = "", experiment: str = "areal-async") -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._state = Metric, run.state
        where = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        artifacts = None
        if not where:
            own = run.folder / "mlflow"
            own.mkdir(mode=0o700, exist_ok=True)
            where, artifacts = f"sqlite:///{own / 'mlflow.db'}", (own / "artifacts").as_uri()
        self._client: Any = MlflowClient(tracking_uri=where)
        if "id" not in run.state:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment, artifacts)
            run.state["id"] = self._client.create_run(number, run_name=run.job).info.run_id
            parameters = [Param(name, text[:MOST_CHARACTERS]) for name, text in _flat(run.config) if text]
            for begin in range(0, len(parameters), MOST_PARAMETERS):
                self._client.log_batch(run.state["id"], params=parameters[begin : begin + MOST_PARAMETERS])
        self._id = run.state["id"]
        self._client.set_terminated(self._id, "RUNNING")

    check_job = staticmethod(partial(missing_package, "mlflow"))

    def figures(self, steps: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now_ms, steps) for name, value in values.items()]
        )

    def samples(self, steps: int, kind: SampleKind, samples: Sequence[Mapping[str, Any]]) -> None:
        name, number = f"samples/{kind}-{steps:08d}.json", itertools.count()

        def shown(picture: Any) -> dict[str, str]:
            path = f"table_images/{name.removesuffix('.json')}/{next(number)}.png"
            self._client.log_image(self._id, picture, path)
            return {"type": "image", "filepath": path, "compressed_filepath": path}

        columns, rows = table_of(samples, shown)
        self._client.log_dict(self._id, {"columns": columns, "data": rows}, name)
        tables = [*self._state.get("tables", ()), {"path": name, "type": "table"}][-MOST_TABLES:]
        self._state["tables"] = tables
        self._client.set_tag(self._id, TABLES, json.dumps(tables))

    def flush(self) -> None:
        """Do nothing, because each call waits for the answer to its request."""

    def close(self, ending: str) -> None:
        self._client.set_terminated(self._id, ENDINGS.get(ending, "FAILED"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value)
