"""`areal-async quickstart`: train a policy from nothing, in two jobs.

It creates the task set, the tokenizer and a random model. The first job warms the model up by SFT. The second
job trains it by asynchronous RL. Both job files stay beside the data, so users can read them and run them
again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rich.console import Console

from areal_async.cli.quickstart.model import split_problems, write_model, write_tasks
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from areal_async.runner.run_job import RunResult, run_job

N_HELD_OUT = 512
FILES, WARM_MODEL = "quickstart-files", "quickstart-warm/model"
JOB_FILES = ("warm_start.yaml", "train.yaml")


def prepare(directory: Path, seed: int) -> None:
    """Write data, random model and the two job files into `directory`. The files depend only on `seed`."""
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = split_problems(seed, N_HELD_OUT)
    write_tasks(train, directory / "train.jsonl", "train")
    write_tasks(held_out, directory / "held_out.jsonl", "held_out")
    write_model(directory / "base", seed)
    for name in JOB_FILES:
        text = resources.files("areal_async.cli.quickstart").joinpath(name).read_text(encoding="utf-8")
        (directory / name).write_text(text, encoding="utf-8")


def quickstart(
    *,
    seed: int,
    out: Path,
    plain: bool = False,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Run both jobs under `out`, and return the result of the RL job. An earlier quickstart there is
    replaced. `overrides` are `key=value` for the RL job. Raises the errors of `run_job`."""
    console = console or Console()
    _warm_up(out, seed, plain=plain, console=console)
    console.print("[bold]3/3[/] asynchronous RL: buffer, rollout, reward, trainer and evaluation as services")
    job = load_job(out / FILES / "train.yaml", [f"seed={seed}", *overrides])
    return run_job(job, overwrite=True, plain=plain, console=console)


def quickstart_job(overrides: Sequence[str] = (), *, out: str | Path = "runs", seed: int = 1) -> JobConfig:
    """Return the quickstart's RL job with overrides `key=value`, for experiments. If its files and its
    warmed-up model do not exist below `out`, they are created (about 20 s). Raises the errors of `run_job`
    and `load_job`."""
    out = Path(out)
    if not (out / WARM_MODEL / "config.json").exists():
        _warm_up(out, seed, plain=True, console=Console())
    return load_job(out / FILES / "train.yaml", [f"seed={seed}", *overrides])


def _warm_up(out: Path, seed: int, *, plain: bool, console: Console) -> None:
    files = out / FILES
    console.print(f"[bold]1/3[/] two-digit arithmetic, tokenizer and a random model → {files}")
    prepare(files, seed)
    console.print("[bold]2/3[/] supervised warm-up, stopped early on purpose")
    warm = load_job(files / "warm_start.yaml", [f"seed={seed}"])
    run_job(warm, overwrite=True, plain=plain, console=console)
