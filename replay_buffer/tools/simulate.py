"""`areal-async simulate`: a prediction for a job, from the real ledger on a simulated clock."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from areal_async.base.mistakes import ConfigError, Mistake
from areal_async.base.yaml_file import dump_yaml
from areal_async.cli.tools import SimulateRequest, facts, print_json, run_tool
from areal_async.config.fields import read_section
from areal_async.config.load import load_job
from areal_async.launch.run_handle import find_run
from areal_async.show.progress import progress
from replay_buffer.simulation.costs import Costs
from replay_buffer.simulation.world import Prediction, simulated
from replay_buffer.tools.measured import measured


def main(request: SimulateRequest) -> None:
    """Print the prediction. Raises `ConfigError` and `RunFolderError`."""
    job = load_job(Path(request.job_file), request.overrides or (), files=False)
    if job.kind != "rl":
        raise ConfigError(
            request.job_file, [Mistake("kind", f"a job of kind {job.kind} generates nothing", "Use rl")]
        )
    costs = costs_of(request)
    begun_s = time.perf_counter()
    with progress("simulating"):
        prediction = simulated(job, costs, steps=request.steps, seed=request.seed)
    took_s = time.perf_counter() - begun_s
    if not prediction.steps:
        problem = "no step is ever done: the limits leave no room for a batch, or everything is dropped"
        raise ConfigError(request.job_file, [Mistake("buffer", problem, "Raise buffer.max_groups")])
    if request.as_json:
        print_json({"prediction": prediction, "costs": costs.model_dump(), "took_s": round(took_s, 2)})
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(facts(told(prediction).items()))
    console.print(f"{prediction.events:,} events in {took_s:.1f} s", style="dim")
    if request.runs:
        console.print("\nWith these costs, which --costs takes too:")
        console.print(dump_yaml(costs.model_dump(exclude_unset=True)), markup=False, end="")


def costs_of(request: SimulateRequest) -> Costs:
    """Return the costs named on the command line."""
    if bool(request.runs) == bool(request.costs):
        fix = "Name a run that measured them, --from RUN, or a file that gives them, --costs YAML"
        problem = "costs are needed, from one place"
        raise ConfigError("the command line", [Mistake("--from, --costs", problem, fix)])
    if request.costs:
        return read_section(Costs, Path(request.costs))
    return measured([find_run(each) for each in request.runs or ()])


def told(prediction: Prediction) -> dict[str, str]:
    """Return the prediction as text."""
    p = prediction
    return {
        "steps": f"{p.steps_per_s:.4g} a second: one takes {p.step_s:.4g} s",
        "throughput": f"{p.episodes_per_s:,.4g} episodes and {p.tokens_per_s:,.5g} sampled tokens a second",
        "staleness": f"{p.staleness_mean:.2f} in the mean, {p.staleness_max} at most",
        "trainer idle": f"{p.trainer_idle:.1%}",
        "engines idle": f"{p.rollout_idle:.1%}; {p.running:,.1f} episodes run in the mean",
        "scoring idle": f"{p.reward_idle:.1%}",
        "wasted": f"{p.wasted:.2%} of the groups are dropped",
    }


if __name__ == "__main__":
    run_tool(SimulateRequest, main)
