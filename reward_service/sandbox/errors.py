"""What can go wrong that is not the program's fault."""

from __future__ import annotations

from areal_async.errors import ArealError


class SandboxError(ArealError):
    """No sandbox, or not one of the level asked for: the verdict is an error of kind `sandbox`, never 0."""

    verdict_kind = "sandbox"


class CannotIsolate(SandboxError):
    """This machine, or that of a sandbox server, cannot isolate programs: `why`, and as `fix` what to
    change."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}. {fix}.")
        self.why, self.fix = why, fix


class CompilerMissing(ArealError):
    """The compiler or runtime of a language is not installed: an error of kind `compile`, never 0."""

    verdict_kind = "compile"
