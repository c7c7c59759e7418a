"""The trainer's errors."""

from __future__ import annotations

from collections.abc import Sequence

from areal_async.base.errors import ArealError


class TrainerError(ArealError):
    """Base of the trainer's errors."""


class FatalError(TrainerError):
    """Base of errors that would occur again after a restart."""

    restart_helps = False


class RankError(TrainerError):
    """Another rank of the trainer failed, or did not join a collective; the message names it. The whole group
    is restarted. `late` are the ranks that have not started."""

    restart_helps = True

    def __init__(self, text: str, late: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.late = tuple(late)


class ObjectiveError(FatalError):
    """A combination of objective parts that is wrong; the message says why and what to change."""


class BatchError(TrainerError):
    """A batch that cannot be trained: its bytes do not match its manifest, or it is the wrong shape."""


class UntrainableEpisode(BatchError):
    """Units were not sampled from the trained policy. Fatal, because the buffer should have refused them."""

    restart_helps = False


class StalenessViolation(FatalError):
    """A unit older than the bound reached the trainer. Fatal: the buffer's own check has failed."""


class SelfCheckError(FatalError):
    """The engine's log-probs do not fit the trainer's weights. Sampling again would not change it."""


class ModelError(TrainerError):
    """A model directory that cannot be loaded or sharded."""


class UnfitModel(ModelError):
    """A model whose packed rows would not have the log-probs of the model."""

    restart_helps = False


class DivergenceError(FatalError):
    """A loss, a log-prob, a gradient or a weight that is not finite."""


class NotFinite(DivergenceError):
    """An advantage, a loss or a log-prob that is not finite, found before the update."""


class GradientNotFinite(NotFinite):
    """A gradient that is not finite, and was cleared; `model` names whose."""

    def __init__(self, text: str, model: str = "") -> None:
        super().__init__(text)
        self.model = model


class NothingToLearn(FatalError):
    """A step without a gradient, where the job asks to end for it."""


class DiskFull(FatalError):
    """The disk is full or accepts no writes. An immediate restart would only train the same steps again."""


class CheckpointError(FatalError):
    """A checkpoint that is missing, torn or of another job."""
