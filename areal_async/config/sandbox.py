"""`reward.args` of the rewards that run programs in the sandbox."""

from typing import Literal

from pydantic import Field, field_validator

from areal_async.config.base import Section, refuse_password

Language = Literal["python", "c", "cpp", "rust", "javascript", "java", "auto"]
SandboxLevel = Literal["isolated", "none"]


class SandboxArguments(Section):
    """Where and within which limits programs run."""

    sandbox: SandboxLevel = "isolated"
    """`isolated` (docs/sandbox.md): the job is refused where programs cannot be isolated. `none`: they are
    plain child processes of the service, free to do what it may: no protection."""
    remote: str | None = None
    """URL of a sandbox server to run programs on, instead of this machine."""
    token_env: str | None = None
    """Environment variable that holds the token for `remote`."""
    cpu_s: float = Field(default=2.0, gt=0)
    """CPU time of one run, in seconds."""
    wall_s: float = Field(default=5.0, gt=0)
    """Time of one run by the clock, in seconds."""
    memory_mb: int = Field(default=256, ge=16, le=1 << 24)
    """Memory of all processes of one run."""
    processes: int = Field(default=16, ge=2, le=65_536)
    """Processes and threads of one run."""
    budget_s: float = Field(default=8.0, gt=0)
    """Time for compiling and all runs of one episode, in seconds. What has not run by then has failed. It has
    to end before the reward's `timeout_s`, past which the whole call is a timeout."""

    @field_validator("remote")
    @classmethod
    def _holds_no_password(cls, value: str | None) -> str | None:
        if value is not None:
            refuse_password(value, "token_env")
        return value


class CodeArguments(SandboxArguments):
    extract: Literal["fence", "whole"] = "fence"
    """Where the program is: in the last fenced block of the response, or the whole response."""
    partial: bool = False
    """Whether the score is the share of the cases passed. Otherwise it is 1 when all pass, else 0, and the
    first that fails ends the run."""
    max_cases: int = Field(default=0, ge=0)
    """Run the first so many cases only; 0: all."""
    live_objects: Literal["allow", "refuse"] = "refuse"
    """Whether tests may use objects of the program (instances of its classes, closures, endless iterators),
    which answer for themselves. `refuse`: a task whose tests need them is an error; everything that crosses
    to the tests is plain data. `allow`: the component `live_objects` says where it was so."""


class CodeStdioArguments(CodeArguments):
    language: Language = "python"
    """Language of the programs. `auto`: as the fence of the block says, else Python."""
    compare: Literal["tokens", "lines", "exact"] = "tokens"
    """`tokens`: the words of the output, numbers up to `tolerance`. `lines`: the lines, without white space
    at their ends and empty lines at the end. `exact`: every byte."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Relative and absolute difference of a number that is expected with a decimal point (`tokens`)."""


class CodeTestsArguments(CodeArguments):
    tolerance: float = Field(default=1e-6, ge=0)
    """Relative and absolute difference of decimals in what a function returns."""


class CodeMatrixArguments(SandboxArguments):
    solution_weight: float = Field(default=1.0, ge=0)
    """Weight of how good an episode's program is."""
    tests_weight: float = Field(default=1.0, ge=0)
    """Weight of how well an episode's tests tell right programs from wrong ones."""
    max_tests: int = Field(default=16, ge=1)
    """Tests taken from one episode."""
    live_objects: Literal["allow", "refuse"] = "refuse"
    """Whether tests may use objects of the program (instances of its classes, closures, endless iterators),
    which answer for themselves. `refuse`: a task whose tests need them is an error; everything that crosses
    to the tests is plain data. `allow`: the component `live_objects` says where it was so."""
