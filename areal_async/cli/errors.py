"""How a command fails: one paragraph on standard error and a status, never a traceback.

Status 2: the job file or the command line is wrong, or the run folder cannot be used; nothing was started.
1: the run failed. 130: it was interrupted. With `AREAL_ASYNC_DEBUG=1` errors pass through, traceback and all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from areal_async.config.errors import ConfigError
from areal_async.errors import ArealError, RunFolderError, RunInterrupted

DEBUG_VARIABLE = "AREAL_ASYNC_DEBUG"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn what is raised inside into a paragraph and an exit status."""
    if os.environ.get(DEBUG_VARIABLE) == "1":
        yield
        return
    try:
        yield
    except typer.Exit:
        raise
    except (ConfigError, RunFolderError) as error:
        raise _exit(str(error), 2) from None
    except RunInterrupted as error:
        raise _exit(str(error), 130) from None
    except ArealError as error:
        raise _exit(str(error), 1) from None
    except KeyboardInterrupt:
        raise _exit("interrupted.", 130) from None
    except Exception as error:
        text = (
            f"{type(error).__name__}: {error}. This is a bug of areal-async; {DEBUG_VARIABLE}=1 shows where."
        )
        raise _exit(text, 1) from None


def _exit(text: str, status: int) -> typer.Exit:
    console = Console(stderr=True, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(text, markup=False, highlight=False)
    return typer.Exit(status)
