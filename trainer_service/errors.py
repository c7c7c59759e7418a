"""The trainer's errors."""

from __future__ import annotations

from collections.abc import Sequence

from areal_async.base.errors import ArealError


class TrainerError(ArealError):
    """Base of the trainer's errors."""


class FatalError(TrainerError):
    """Base of errors that a restart would only repeat."""

    restart_helps = False


class RankError(TrainerError):
    """Another rank of the trainer has failed, or did not take part in a collective. The message has the
    number of that rank, and the whole group is restarted. `late` has the ranks that have not started."""

    restart_helps = True

    def __init__(self, text: str, late: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.late = tuple(late)


class ObjectiveError(FatalError):
    """An invalid combination of objective parts. The message gives the reason and the fix."""


class BatchError(TrainerError):
    """A batch that cannot be trained: its bytes do not match its manifest, or its shape is wrong."""


class UntrainableEpisode(BatchError):
    """Units that were not sampled from the trained policy's distribution. Fatal: the buffer should have
    refused them."""

    restart_helps = False


class StalenessViolation(FatalError):
    """A unit older than the bound reached the trainer. Fatal: the buffer's own check has failed."""


class SelfCheckError(FatalError):
    """The engine's log-probs do not match the trainer's weights. Fatal: new samples would have the same
    error."""


class ModelError(TrainerError):
    """A model directory that cannot be loaded or sharded."""


class UnfitModel(ModelError):
    """A model that computes wrong log-probs for packed rows."""

    restart_helps = False


class DivergenceError(FatalError):
    """A loss, a log-prob, a gradient or a weight that is not finite."""


class NotFinite(DivergenceError):
    """An advantage, a loss or a log-prob that is not finite, found before the update."""


class GradientNotFinite(NotFinite):
    """A gradient that is not finite and was cleared. `model` is the name of its model."""

    def __init__(self, text: str, model: str = "") -> None:
        super().__init__(text)
        self.model = model


class NothingToLearn(FatalError):
    """A step without a gradient, in a job that must stop then."""


class DiskFull(FatalError):
    """A disk that is full or accepts no writes. An immediate restart would only train the same steps
    again."""


class CheckpointError(FatalError):
    """A checkpoint that is missing, incomplete or from another job."""
