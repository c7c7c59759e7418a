"""`python -m reward_service.sandbox`: report whether this machine can isolate programs."""

from __future__ import annotations

import sys

from reward_service.sandbox import Sandbox, SandboxError
from reward_service.sandbox.program import CannotIsolate


def main() -> int:
    try:
        with Sandbox.at("isolated") as sandbox:
            print(f"isolated   works: {', '.join(sandbox.guards)}")
    except CannotIsolate as error:
        print(f"{error.why}\n{error.fix}", file=sys.stderr)
        return 1
    except (SandboxError, OSError) as error:
        print(f"{error}\nSee docs/sandbox.md", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
