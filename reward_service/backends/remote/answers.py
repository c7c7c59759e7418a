"""Verdicts from a server that may be anyone's: what cannot be one is an error, never 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from areal_async.rpc.verdicts import Failure, Verdict
from reward_service.backends.remote.transport import Form
from reward_service.checking import as_verdict, clip
from reward_service.sdk import RewardInput


def read_verdicts(
    answered: Sequence[msgspec.Raw], form: Form, inputs: Sequence[RewardInput]
) -> list[Verdict]:
    """The verdict for each of `inputs`, checked as those of the pool are. One that is none is an error of the
    kind `remote`, and spoils no other. Of the same length as `inputs`."""
    verdicts: list[Verdict] = []
    for raw, given in zip(answered, inputs, strict=True):
        try:
            verdict = form.verdicts.decode(raw)
        except msgspec.MsgspecError as error:
            verdicts.append(Failure("remote", clip(f"the server's verdict is none: {error}")))
        else:
            verdicts.append(as_verdict(verdict, given))
    return verdicts
