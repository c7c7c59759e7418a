"""Names of a job's policies, and the identity of a version of their weights."""

from __future__ import annotations

import re

import msgspec

POLICY = "policy"  # name of the only policy if the job names none
POLICY_NAME = r"[a-z0-9][a-z0-9_-]{0,31}"  # pattern of a policy's name
_LABEL = re.compile(rf"({POLICY_NAME})-e(0|[1-9][0-9]*)-v(0|[1-9][0-9]*)")


class VersionTag(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Identity of a snapshot: its policy, the epoch of the trainer, and the number of steps that trained the
    weights."""

    policy: str
    epoch: int
    version: int

    @property
    def label(self) -> str:
        """Return the tag as text, for names of folders and of a server's weights: `policy-e1-v7`."""
        return f"{self.policy}-e{self.epoch}-v{self.version}"

    @classmethod
    def parse(cls, label: str) -> VersionTag:
        """Return the inverse of `label`. Raises `ValueError` for an invalid text."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"{label!r} names no version of a policy's weights, such as policy-e1-v7")
        return cls(match[1], int(match[2]), int(match[3]))
