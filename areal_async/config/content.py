"""Local copies of content that a job names by URL, and the store for results that must survive the loss of
the host.

A job's `model`, `tasks.train` and `tasks.evaluation` always hold local paths, also if the job file has URLs
(`urls.py`). `materialise` copies the content to these paths. Each host calls it before it starts a process of
the job.

The *store* of a job is `<checkpoint.store>/<job>`. If `run_dir` is a URL, the store is the run's folder at
that URL. The trainer writes `checkpoints/step-000050/…`, `model/` and `adapter/` below the store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from areal_async.base.cache import CACHE_VARIABLE
from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.config.job import JobConfig
from areal_async.storage.hub import bring, is_of_hub
from areal_async.storage.remote import StorageError
from areal_async.storage.transfer import fetch
from areal_async.storage.urls import joined, protocol_problem, url_of

OF_TRAINER = (
    "trainer.reference.model",
    "trainer.critic.model",
    "trainer.teacher.model",
    "trainer.process_reward.model",
)
"""Fields with the models that the trainer holds in addition to the policy."""
CONTENT = ("model", "tasks.train", "tasks.evaluation", *OF_TRAINER)
"""Fields of a job whose content may be in a store."""
BY_TRAINER = ("checkpoints", "model", "adapter")
"""Folders of a run that its trainer copies to the job's store."""


def materialise(job: JobConfig, *, source: str = "job") -> None:
    """Copy everything that `job` names by URL to this host. Raises `ConfigError` with the reason of every
    failure."""
    if mistakes := content_mistakes(job):
        raise ConfigError(source, mistakes)


def content_mistakes(job: JobConfig, fields: Collection[str] = CONTENT) -> list[Mistake]:
    """Copy the content of these fields to this host. Return the failures as mistakes in the job file."""
    places = {"run_dir": url_of(job.run_dir), "checkpoint.store": job.checkpoint.store}
    mistakes = [
        Mistake(field, *problem)
        for field, url in places.items()
        if url is not None and (problem := protocol_problem(url)) is not None
    ]
    for field in [field for field in CONTENT if field in fields]:
        path: Path | None = attrgetter(field)(job)
        url = url_of(path) if path is not None else None
        if path is None or url is None:
            continue
        try:
            if is_of_hub(url):
                bring(url, path, partial(_tell, url))
            else:
                fetch(url, path, begun=partial(_tell, url))
        except StorageError as error:
            what, _, fix = str(error).rstrip(".").rpartition(". ")
            mistakes.append(Mistake(field, what, fix))
        except OSError as error:
            what = f"{url} cannot be written to {path.parent}: {error.strerror or error}"
            fix = f"Free room, or name another cache folder ({CACHE_VARIABLE})"
            mistakes.append(Mistake(field, what, fix))
    return mistakes


def in_urls(mistakes: Iterable[Mistake], job: JobConfig) -> list[Mistake]:
    """Return the mistakes with URLs in place of the local paths."""
    paths = (*attrgetter(*CONTENT)(job), job.run_dir)
    names = {str(path): url for path in paths if path is not None and (url := url_of(path)) is not None}

    def told(text: str) -> str:
        for path, url in names.items():
            text = text.replace(path, url)
        return text

    return [replace(each, problem=told(each.problem), fix=told(each.fix)) for each in mistakes]


def _tell(url: str, size_bytes: int | None = None) -> None:
    size = f" ({size_bytes} bytes)" if size_bytes is not None else ""
    print(f"fetching {url}{size}", file=sys.stderr, flush=True)


def run_url(job: JobConfig) -> str | None:
    """Return the URL of the run's mirror, or None if the run exists only on this host."""
    return url_of(job.run_dir / job.job)


def store_url(job: JobConfig) -> str | None:
    """Return the URL of the job's store, or None."""
    if job.checkpoint.store is not None:
        return joined(job.checkpoint.store, job.job)
    return run_url(job)
