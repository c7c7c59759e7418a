"""The trained model of a job, written as a directory that other programs load."""

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
from trainer_service.checkpoint_store import push_trained
from trainer_service.durable_files import room_for, write_model
from trainer_service.ranks import Ranks

Files = Mapping[str, bytes | Path]
"""Contents or paths of files, by their names in the output."""
MODEL_DIR = "model"
ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
MODEL_CONFIGS = ("config.json", "generation_config.json")
"""Files that only a directory of a whole model has."""


def companions_of(
    job: JobConfig, backend: TrainingBackend, files: Files, *, identified: bool = True
) -> dict[str, bytes | Path]:
    """Return the files besides published weights: `files`, and the configuration of adapters if they are
    trained (see `adapter_config`)."""
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
    """Write the trained model into the folder `out`: `model` by `write_whole`, and also `adapter`, in peft's
    format, if adapters were trained. Both are pushed to the job's store. All ranks call it. Raises
    `DiskFull`."""
    with room_for("the trained model", out):
        write_whole(out / MODEL_DIR, job, backend, files, ranks)
        if job.trainer.lora.rank:
            write_adapter(out / ADAPTER_DIR, job, backend, files, ranks)
    ranks.on_first(lambda: push_trained(out, job))


def write_adapter(folder: Path, job: JobConfig, backend: TrainingBackend, files: Files, ranks: Ranks) -> None:
    """Write the trained adapter in peft's format, with those of `files` that do not describe a whole model.
    All ranks call it."""
    beside = companions_of(job, backend, files, identified=False)
    adapter = {name: content for name, content in beside.items() if name not in MODEL_CONFIGS}
    write_model(folder, partial(backend.export, TRAINED_MODEL), adapter, ranks, weights_file=ADAPTER_FILE)


def write_whole(folder: Path, job: JobConfig, backend: TrainingBackend, files: Files, ranks: Ranks) -> None:
    """Write the trained model as a directory that transformers loads, with `files` next to the weights.

    Each rank writes its own part. With adapters, rank 0 merges them into their base model and writes it. All
    ranks call it."""
    lora = job.trainer.lora
    if not lora.rank:
        write_model(folder, partial(backend.export, TRAINED_MODEL), files, ranks)
        return
    adapter = whole_tensors(backend.export(TRAINED_MODEL, gather=True))

    def merge() -> None:
        base = BaseWeights(job.model, getattr(torch, job.trainer.resolved_dtype))
        write_merged(base, adapter, lora.alpha / lora.rank, files, folder)
        base.close()

    ranks.on_first(merge)
