"""An algorithm in one file: an advantage and a loss of one's own, and a job that trains with them.

    python examples/my_algorithm.py

docs/my-algorithm.md builds it from an empty file.
"""

from areal_async import advantage, loss, quickstart_job, run


@advantage(needs_group=2)
def harder_first(samples, *, strength=1.0):
    """(R - mean_g) · (1 - strength · mean_g): what few of a task's answers get right counts most."""
    solved = samples.mean(samples.reward)
    return samples.centred(samples.reward) * (1 - strength * solved)


@loss(columns=("prox", "advantage"), figures=("moved_share",))
def faded(logp, units, *, width=0.2):
    """-A · width · tanh((ρ - 1) / width) with ρ = exp(logp - prox): the further a token's probability has
    moved in this step, the less it is moved on; a ratio clip without the edge."""
    moved = (logp - units["prox"]).clamp(-20, 20).exp() - 1
    return -units.advantage * width * (moved / width).tanh(), {"moved_share": moved.abs() > width}


if __name__ == "__main__":
    job = quickstart_job(
        [
            "job=my-algorithm",
            f"trainer.objective.advantage={__file__}:harder_first",
            "trainer.objective.advantage_args={strength: 0.5}",
            f"trainer.objective.loss={__file__}:faded",
            "trainer.minibatches=2",
            "trainer.steps=200",
            "trainer.optimizer.lr=1e-4",
        ]
    )
    running = run(job, overwrite=True)
    for step in running.metrics():
        if step["step"] % 20 == 0:
            moved = step["correction"].get("moved_share", 0.0)
            print(f"step {step['step']:>3}  reward {step['reward_mean']:.3f}  moved {moved:.3f}", flush=True)
    summary = running.wait()
    print(f"held-out accuracy {summary['accuracy_start']:.3f} -> {summary['accuracy_end']:.3f}")
