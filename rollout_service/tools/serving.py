"""A model on an engine of its own, without a run, for `evaluate` and `generate`.

The model is a Hugging Face folder, or a checkpoint of a run, which is exported first. All other settings come
from a job: for a run, the run's own job, and for a folder, a job with defaults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from areal_async.base.errors import RunFolderError
from areal_async.base.mistakes import ConfigError, Mistake, as_typed
from areal_async.base.own_files import write_whole
from areal_async.base.versions import VersionTag
from areal_async.cli.tools import AnswersRequest, CheckpointRequest, EvaluateRequest, module_of
from areal_async.config.load import load_job, resolved
from areal_async.launch.folders import claim_folders
from areal_async.launch.one_host import topology_here
from areal_async.launch.plan import services_of
from areal_async.launch.run_handle import Run
from areal_async.models.files import no_folder, text_part
from areal_async.service.context import ServiceContext
from areal_async.show.progress import progress
from areal_async.storage.urls import is_url

MOST_TOKENS = 8192
"""Default of the longest prompt and answer together, for which engines reserve memory. It is limited by the
model's positions, and `--set rollout.max_model_len=N` changes it."""
MOST_NEW_TOKENS = 512
"""Largest number of tokens of an answer in an evaluation, if neither a run nor an option sets it."""
Asked = EvaluateRequest | AnswersRequest
TRAINED_HERE = 1
"""Number of steps in a job for a model. The model is never trained, but a job must have a number of steps."""


class Target(NamedTuple):
    """The model to sample from."""

    model: Path
    content: dict[str, Any]
    """A job as a mapping, without `model`, `tasks` and `run_dir`."""
    said: str
    """Name of the model in messages: the folder, or the run with the step."""


class ModelFolder:
    """Weights in a Hugging Face folder, with the interface that engines need (`engines.base.Weights`)."""

    def __init__(self, path: Path, policy: str) -> None:
        self.path = path
        self.tag = VersionTag(policy, 0, 0)

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Return the mapped tensors by their names in the files. Raises `ConfigError` if there are none."""
        from safetensors.torch import load_file

        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            problem = "it holds no *.safetensors"
            raise ConfigError(str(self.path), [Mistake("MODEL", problem, "Save the model as safetensors")])
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@contextmanager
def target_of(name: str) -> Iterator[Target]:
    """Yield the target for `MODEL` or `RUN[@STEP]`. The folder of an exported checkpoint exists while the
    context is open. Raises `ConfigError` and `RunFolderError`."""
    given = Path(name)
    if (given / "config.json").is_file():
        yield Target(given.resolve(), {}, name)
        return
    run_name, _, step = name.rpartition("@") if "@" in name else (name, "", "")
    try:
        run = Run.open(run_name)
    except RunFolderError as error:
        if not given.exists() and "@" not in name and not is_url(name):
            problem = f"there is no run {name}, and {no_folder(given)}"
            raise RunFolderError(f"{problem}. Give a run, or a model's folder.") from error
        if "@" in name or not given.is_dir():
            raise
        raise RunFolderError(
            f"{name} is neither a Hugging Face folder (it has no config.json) nor a run: {error}"
        ) from error
    content = resolved(run.job).model_dump(mode="json") if run.job.kind == "rl" else {}
    if not step and run.job.kind == "rl" and (run.folder / "model" / "config.json").is_file():
        yield Target(run.folder / "model", content, f"{run_name}, its last step")
        return
    with tempfile.TemporaryDirectory(prefix="areal-model-") as folder:
        out = Path(folder, "model")
        asked = CheckpointRequest(run=str(run.folder), out=str(out), step=step or "newest", as_json=True)
        with progress(f"making a model of a checkpoint ({asked.step}) of {run_name}"):
            found = _export(asked)
        yield Target(out, content, f"{run_name}, step {found}")


def _export(request: CheckpointRequest) -> int:
    """Write the model of a checkpoint, in a separate process, and return its step. Raises
    `RunFolderError`."""
    command = [sys.executable, "-P", "-m", module_of(request), msgspec.json.encode(request).decode()]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = ended.stderr.strip().removeprefix("error:").strip().replace("--step: ", "")
        raise RunFolderError(said or f"the checkpoint could not be exported: status {ended.returncode}")
    step: int = json.loads(ended.stdout)["step"]
    return step


@contextmanager
def lone_evaluator(
    target: Target, request: Asked, sections: dict[str, dict[str, Any]], tasks: Path | None = None
) -> Iterator[ServiceContext]:
    """Yield the context of an evaluator without a run, in a temporary folder.

    `sections` replace sections of the target's job unless they are None. After that, the sampling parameters
    and fields of the request are applied. If nothing sets a temperature and several samples are requested,
    the temperature is that of `rollout`, or 1. Raises `ConfigError` with every mistake."""
    sampling = {"temperature": request.temperature, "max_new_tokens": request.max_new_tokens}
    with tempfile.TemporaryDirectory(prefix="areal-evaluate-") as folder:
        nothing = Path(folder, "nothing.jsonl")  # A job must name a file to train on
        nothing.write_bytes(msgspec.json.encode({"prompt": "?", "reward_model": {"ground_truth": "?"}}))
        most = MOST_NEW_TOKENS if isinstance(request, EvaluateRequest) else MOST_TOKENS
        content: dict[str, Any] = target.content or _untrained(target.model, most)
        content |= {"job": "evaluate", "kind": "rl", "model": str(target.model), "run_dir": folder}
        content["tasks"] = {"train": str(nothing), "evaluation": str(tasks) if tasks else None}
        content["trainer"] = content.get("trainer", {"steps": TRAINED_HERE}) | {"device": "cpu", "ranks": 1}
        content["observe"] = content.get("observe", {}) | {"metrics_port": 0, "loggers": []}
        content.pop("storage", None)
        for section, fields in sections.items():
            content[section] = content.get(section, {}) | _given(fields)
        evaluation = content["evaluation"]
        several = request.n if isinstance(request, AnswersRequest) else request.samples or 1
        own = evaluation.get("sampling", {})
        if several > 1 and not own.get("temperature"):
            trained_at = content.get("rollout", {}).get("sampling", {}).get("temperature")
            own = own | {"temperature": trained_at or 1.0}
        evaluation["sampling"] = own | _given(sampling)
        try:
            job = load_job(content, request.fields or (), source="the command line", base=Path.cwd())
        except ConfigError as error:
            raise ConfigError(error.source, as_typed(error.mistakes, "--set {}=VALUE".format)) from error
        folders = claim_folders(job, overwrite=True)
        try:
            told = job.model_dump(mode="json")
            topology = topology_here(folders.run_id, folders.host, services_of(job), told, {})
            write_whole(folders.topology, msgspec.json.encode(topology))
            yield ServiceContext.load(folders.topology, "evaluator" if tasks else "rollout-0")
        finally:
            folders.release()


def _untrained(model: Path, most: int) -> dict[str, Any]:
    """Return a job for a model without a run, with answers of at most `most` tokens."""
    positions = text_part(json.loads((model / "config.json").read_bytes())).get("max_position_embeddings")
    content: dict[str, Any] = {"reward": {"name": "exact_match"}, "rollout": {"workers": 1}}
    if isinstance(positions, int):
        length = min(positions, MOST_TOKENS)
        content["rollout"] |= {
            "max_model_len": length,
            "sampling": {"max_new_tokens": max(1, min(most, length // 2))},
        }
    return content


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
