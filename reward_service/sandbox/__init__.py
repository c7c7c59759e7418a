"""Untrusted programs, isolated from the machine that runs them.

    from areal_async import Program, RunLimits, Sandbox

    with Sandbox.at("isolated") as sandbox:
        outcome = sandbox.run(Program(source=model_answer, stdin=b"3 4\\n", limits=RunLimits(cpu_s=2)))

Promises: `run` takes at most `clock_s`, plus the time to make and end a jail. After that no process of the
program is left, and with isolation no file either. Every outcome says which level of isolation the run had.
"""

from reward_service.sandbox.program import Overloaded as Overloaded
from reward_service.sandbox.program import Program as Program
from reward_service.sandbox.program import PythonMissing as PythonMissing
from reward_service.sandbox.program import RunLimits as RunLimits
from reward_service.sandbox.program import RunOutcome as RunOutcome
from reward_service.sandbox.program import SandboxError as SandboxError
from reward_service.sandbox.sandbox import Sandbox as Sandbox
