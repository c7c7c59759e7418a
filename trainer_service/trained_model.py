"""The trained model of a job, as a directory that others load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from areal_async.config.job import JobConfig
from areal_async.weights.adapter import BaseWeights, adapter_config, write_merged
from areal_async.weights.manifest import ADAPTER_CONFIG
from areal_async.weights.pieces import whole_tensors
from trainer_service.backends.base import TRAINED_MODEL, TrainingBackend
from trainer_service.durable_files import room_for, write_model
from trainer_service.ranks import Ranks

Files = Mapping[str, bytes | Path]
"""Content of files, or their paths, by the name that they get."""
MODEL_DIR = "model"
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
MODEL_CONFIGS = ("config.json", "generation_config.json")
"""Files that make a directory one of a whole model."""


def companions_of(
    job: JobConfig, backend: TrainingBackend, files: Files, *, identified: bool = True
) -> dict[str, bytes | Path]:
    """Return the files beside published weights: `files` and, if adapters are trained, their configuration
    (see `adapter_config`)."""
    lora = job.trainer.lora
    if not lora.rank:
        return dict(files)
    config = adapter_config(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=list(backend.adapted),
        base=job.model,
        identified=identified,
    )
    return {**files, ADAPTER_CONFIG: config}


def write_trained(out: Path, job: JobConfig, backend: TrainingBackend, ranks: Ranks, files: Files) -> None:
    """Write the trained model into the folder `out`: `model`, as `write_whole` does, and if adapters were
    trained also `adapter`, in peft's form. All ranks call it. Raises `DiskFull`."""
    with room_for("the trained model", out):
        write_whole(out / MODEL_DIR, job, backend, files, ranks)
        if job.trainer.lora.rank:
            write_adapter(out / ADAPTER_DIR, job, backend, files, ranks)


def write_adapter(folder: Path, job: JobConfig, backend: TrainingBackend, files: Files, ranks: Ranks) -> None:
    """Write the trained adapter in peft's form, with those `files` beside it that do not belong to a whole
    model only. All ranks call it."""
    beside = companions_of(job, backend, files, identified=False)
    adapter = {name: content for name, content in beside.items() if name not in MODEL_CONFIGS}
    write_model(folder, partial(backend.export, TRAINED_MODEL), adapter, ranks, weights_file=ADAPTER_FILE)


def write_whole(folder: Path, job: JobConfig, backend: TrainingBackend, files: Files, ranks: Ranks) -> None:
    """Write the trained model as a directory that transformers loads, with `files` beside the weights: each
    rank its own part, or rank 0 its adapters merged with the model that they are of. All ranks call it."""
    lora = job.trainer.lora
    if not lora.rank:
        write_model(folder, partial(backend.export, TRAINED_MODEL), files, ranks)
        return
    adapter = whole_tensors(backend.export(TRAINED_MODEL, gather=True))

    def merge() -> None:
        base = BaseWeights(job.model, getattr(torch, job.trainer.dtype))
        write_merged(base, adapter, lora.alpha / lora.rank, files, folder)
        base.close()

    ranks.on_first(merge)
