"""A terminal, or what stands for one, that may go before the program is done."""

from __future__ import annotations

import os

from rich.console import Console


class RunConsole(Console):
    """Once nobody reads it any more (`… | head`) nothing is shown, and nothing fails for it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())  # or what the file still holds fails at the exit
