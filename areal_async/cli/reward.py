"""`areal-async reward …`: rewards outside a job."""

from __future__ import annotations

import typer

from areal_async.cli.reward_new import new
from areal_async.cli.reward_serve import serve
from areal_async.cli.reward_test import rehearse

reward = typer.Typer(help="Write a reward, try it on a file, serve it.", no_args_is_help=True)
reward.command("new")(new)
reward.command("test")(rehearse)
reward.command("serve")(serve)
"""The group; each command is a module of its own."""
