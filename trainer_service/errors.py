"""What the trainer raises on purpose."""

from __future__ import annotations

from areal_async.errors import ArealError


class TrainerError(ArealError):
    """Base of the trainer's errors."""


class ObjectiveError(TrainerError):
    """A combination of objective parts that is wrong; the message says why and what to change."""

    restart_helps = False


class BatchError(TrainerError):
    """A batch that cannot be trained: its bytes do not match its manifest, or it is the wrong shape."""


class UntrainableEpisode(BatchError):
    """Units that were not sampled from what is trained. Fatal: the buffer should have refused them."""

    restart_helps = False


class StalenessViolation(TrainerError):
    """A unit older than the bound reached the trainer. Fatal: the buffer's own check has failed."""

    restart_helps = False


class SelfCheckError(TrainerError):
    """The engine's log-probs are not those of the trainer's weights. Sampling again would not change it."""

    restart_helps = False


class ModelError(TrainerError):
    """A model directory that cannot be loaded or sharded."""


class DivergenceError(TrainerError):
    """A loss, a log-prob, a gradient or a weight that is not finite."""

    restart_helps = False


class DiskFull(TrainerError):
    """No room for what had to be written. Starting again at once would only train the same steps again."""

    restart_helps = False


class CheckpointError(TrainerError):
    """A checkpoint that is missing, torn or of another job."""

    restart_helps = False
