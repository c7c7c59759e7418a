"""What can go wrong between the buffer and Redis."""

from __future__ import annotations

from areal_async.errors import ArealError


class StoreError(ArealError):
    """Base of the errors of the store."""


class StoreUnavailable(StoreError):
    """Redis does not answer, or refused a write. What was not acknowledged may or may not be written; after
    a rebuild of the index the same message can be asked again."""

    restart_helps = True


class StoreFenced(StoreError):
    """Another front has taken over the job. This one must end."""


class StoreUnusable(StoreError):
    """This Redis cannot hold the ledger as configured, or what it holds is not this job's."""
