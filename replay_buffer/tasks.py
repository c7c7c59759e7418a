"""The job's tasks in the order in which they are to be trained."""

from __future__ import annotations

from functools import lru_cache

from areal_async.config.job import JobConfig
from areal_async.tasks import TaskTable, pass_order, read_tasks


class TaskOrder:
    """Goes through the rows of a task table pass by pass, each pass in a seeded order of its own.

    A position counts tasks from the start of the job; what lies at it depends on the file, the seed and the
    position alone, so a cursor is one integer."""

    def __init__(self, table: TaskTable, *, seed: int, shuffle: bool, passes: int | None) -> None:
        self.table = table
        self.passes = passes
        self._order = lru_cache(maxsize=2)(
            lambda pass_index: pass_order(len(table), seed=seed, pass_index=pass_index, shuffle=shuffle)
        )
        self.task = lru_cache(maxsize=4096)(table.task)

    @classmethod
    def of(cls, job: JobConfig) -> TaskOrder:
        """Reads the job's task file; raises `TaskFileError`."""
        tasks = job.tasks
        return cls(read_tasks(tasks.train), seed=job.seed, shuffle=tasks.shuffle, passes=tasks.passes)

    @property
    def dataset_hash(self) -> str:
        return self.table.dataset_hash

    def at(self, position: int) -> tuple[int, int] | None:
        """(row, pass) at `position`; None past the last pass."""
        pass_index, offset = divmod(position, len(self.table))
        if self.passes is not None and pass_index >= self.passes:
            return None
        return self._order(pass_index)[offset], pass_index
