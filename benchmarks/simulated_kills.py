"""Effective training time under kills of any role, on a simulated clock with measured costs.

    python benchmarks/simulated_kills.py RESULT.json [--steps 300] [--every 20] [--each] [--out FILE]

RESULT.json is a result of `benchmarks/effective_time.py`. It has the costs of the job's parts, measured in
the undisturbed run, and the seconds from a kill of each role until the successor serves. The job is simulated
without kills and with kills, by `replay_buffer/simulation/` and the real ledger. A kill hits each of the
roles equally often, in random order. Times between two kills are exponential with mean `--every`, but a kill
waits until the last victim serves again.

    worker      The running requests are lost. After the outage the ledger ends the worker's leases
                (`Arrived`). The samples that were not sent are leased again and generated from their first
                token.
    reward      Verdicts wait for the end of the outage. The claims end (`Arrived`) and are taken again.
    buffer      No message is answered until the end of the outage. All clients then continue.
    redis       The same, with the outage of Redis.
    trainer     The step in progress is lost. After the outage the trainer opens a new epoch at its last
                state, and gets that step's batch again. A state is complete `--state` seconds after a step's
                commit.

The trainer has a core of its own, as in `effective_time.py`. All other processes share the other core. An
outage occupies that core as one more process, for the work of the start.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from effective_time import prepare

from areal_async.config.load import load_job
from areal_async.rpc.messages import Arrived
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Versions
from replay_buffer.ledger.rules import Rules
from replay_buffer.simulation.costs import Costs
from replay_buffer.simulation.engine import SimulatedAnswer, SimulatedEngine
from replay_buffer.simulation.job import SCORER, SimulatedJob
from replay_buffer.simulation.world import MeasuredWorld, Shape

WARM_UP = 20
ROLES = ("rollout-0", "reward", "buffer", "redis", "trainer")


class KilledJob(SimulatedJob):
    """A job whose roles are killed."""

    def __init__(self, rules: Rules, world: KilledWorld, state_ms: float, checkpoint_every: int) -> None:
        super().__init__(rules, world, world.clock, checkpoint_every=checkpoint_every)
        self._state_ms = state_ms
        self._committed_ms = [0.0]  # Commit time of each step
        self.life = 0  # Starts of the trainer
        self.down: set[str] = set()
        self._held_back: list[Callable[[], object]] = []  # Messages that wait for the buffer
        self._begun: dict[str, int] = {}  # Trainer epoch of the first unit, by group
        self.redone = 0

    # --- kills ---

    def kill(self, role: str, outage_ms: float) -> None:
        """Kill `role`. Its successor serves after `outage_ms`."""
        self.down.add(role)
        self.clock.demand(1)
        if role.startswith("rollout"):
            self._killed_world.lose(int(role.partition("-")[2]))
        elif role == "trainer":
            self.life += 1
            self._asked_ms = self._unpublished = None
        self.clock.after(outage_ms, partial(self._back, role))

    def _back(self, role: str) -> None:
        self.clock.demand(-1)
        self.down.remove(role)
        if role.startswith("rollout"):
            self._when_buffer_serves(partial(self._worker_back, int(role.partition("-")[2])))
        elif role == "reward":
            self._when_buffer_serves(self._reward_back)
        elif role == "trainer":
            self._when_buffer_serves(self._trainer_back)
        else:
            held, self._held_back = self._held_back, []
            for message in held:
                message()
            self._edges |= {"lease", "claim", "batch"}
        self._let_go_on()

    def _when_buffer_serves(self, message: Callable[[], object]) -> None:
        if self.down & {"buffer", "redis"}:
            self._held_back.append(message)
        else:
            message()

    def _worker_back(self, worker: int) -> None:
        for group_id in [group for group, (_, mine, _) in self._leases.items() if mine == worker]:
            del self._leases[group_id]
        self._send(Arrived(f"rollout-{worker}"))
        self.serving[worker] = self.v_train
        self._refused[worker] = False
        self.lease(worker)

    def _reward_back(self) -> None:
        self._send(Arrived(SCORER))
        self._claims.clear()
        self._claim()
        self._killed_world.reward_back()

    def _trainer_back(self) -> None:
        step = self.v_train
        if step and self.clock.now_ms - self._committed_ms[step] < self._state_ms:
            step -= 1  # The newest state was not complete
            self.redone += 1
        epoch = self.index.consumer(self.policy).epoch
        reply = self._send(OpenedWith(self.policy, "trainer", step, memory_epoch=epoch))
        assert getattr(reply, "epoch", 0) == epoch + 1, reply
        del self._committed_ms[step + 1 :]
        self._step, self._asked, self._asked_ms = step, -1, self.clock.now_ms
        self._ask()

    @property
    def _killed_world(self) -> KilledWorld:
        assert isinstance(self._world, KilledWorld)
        return self._world

    # --- messages, which wait for the buffer ---

    def _lease_all(self) -> None:
        if not self.down & {"buffer", "redis"}:
            super()._lease_all()

    def lease(self, worker: int) -> None:
        if not self.down & {"buffer", "redis", f"rollout-{worker}"}:
            super().lease(worker)

    def begun(self, group_id: str) -> None:
        """Record the trainer epoch of the weights that begin a group."""
        self._begun[group_id] = self.index.consumer(self.policy).epoch

    def generated(self, group_id: str) -> None:
        self._when_buffer_serves(partial(self._generated, group_id))

    def _generated(self, group_id: str) -> None:
        lease, worker, first = self._leases.pop(group_id)
        versions = {self.policy: Versions(first, first, self._begun.pop(group_id))}
        put = GroupArrivals(lease.lease_id, group_id, (Arrival(0, 100, 8, 4, versions),))
        self._send(StoreEpisodes((put,)))
        self.lease(worker)

    def _claim(self) -> None:
        if not self.down & {"buffer", "redis", "reward"}:
            super()._claim()

    def scored(self, group_id: str, *, kept: bool = True) -> None:
        self._when_buffer_serves(partial(super().scored, group_id, kept=kept))

    def _ask(self) -> None:
        if not self.down & {"buffer", "redis"}:
            super()._ask()

    # --- the trainer, whose events end with its process ---

    def trained_by(self, life: int) -> None:
        if life == self.life:
            self.trained()

    def _published(self, step: int, beside_ms: float) -> None:
        life = self.life
        self._step, self._asked_ms = step + 1, self.clock.now_ms
        self.clock.after(beside_ms, lambda: self._when_buffer_serves(partial(self._commit, life, step)))
        self._ask()

    def _commit(self, life: int, step: int) -> None:
        if life == self.life:
            super()._committed(step)
            self._committed_ms.append(self.clock.now_ms)

    def _serve(self, worker: int, version: int) -> None:
        if f"rollout-{worker}" not in self.down:
            super()._serve(worker, version)


class KilledEngine(SimulatedEngine):
    """An engine whose process can be killed."""

    def abandon(self) -> None:
        """Drop all requests."""
        self._move()
        self._waiting.clear()
        self._running.clear()
        self._go_on()


class KilledWorld(MeasuredWorld):
    """A world whose trainer has a core of its own, and whose worker and reward service can be killed."""

    job: KilledJob

    def __init__(self, rules: Rules, shape: Shape, costs: Costs, *, state_ms: float, seed: int) -> None:
        super().__init__(rules, shape, costs, seed=seed)
        self._lives = [0] * shape.workers
        self._engines = [self._new_engines() for _ in range(shape.workers)]
        self._held: list[str] = []  # Groups, once for each episode that the dead reward service did not score
        self.job = KilledJob(rules, self, state_ms, shape.checkpoint_every)

    @property
    def clock(self) -> Any:
        return self._clock

    def lose(self, worker: int) -> None:
        """Abandon all requests and all work of a worker."""
        self._count(0)
        self._running[worker] = 0
        self._lives[worker] += 1
        for engine in self._engines[worker]:
            assert isinstance(engine, KilledEngine)
            engine.abandon()
        self._engines[worker] = self._new_engines()
        self._loops[worker] = self._loop(worker)

    def _new_engines(self) -> list[SimulatedEngine]:
        slots, replicas = self._shape.max_concurrent, self._shape.replicas
        return [KilledEngine(self._clock, self._costs.engine, slots) for _ in range(replicas)]

    def generate(self, worker: int, group_id: str, version: int) -> None:
        self.job.begun(group_id)
        if group_id not in self._left:
            super().generate(worker, group_id, version)
            return
        # The longest answers are those that the worker had not sent.
        rng = random.Random(f"{self._seed}:{group_id}")
        prompt = self._costs.prompt_tokens.draw(rng)
        longest, size = self._shape.longest_answer, self._shape.group_size
        tokens = [max(1.0, min(self._costs.answer_tokens.draw(rng), longest)) for _ in range(size)]
        missing = sorted(tokens)[-self._left[group_id][0] :]
        self._count(0)
        self._running[worker] += len(missing)
        answered = partial(self._answered, worker, group_id, self._scoring_ms(rng))
        engine = min(self._engines[worker], key=lambda one: one.load)
        answers = [SimulatedAnswer(length, prompt, answered) for length in missing]
        engine.submit(answers, shared_prompt=prompt)

    def _scoring_ms(self, rng: random.Random) -> float:
        return 1000 * self._costs.reward.episode_s.draw(rng)

    def _answered(self, worker: int, group_id: str, scoring_ms: float) -> None:
        sent = partial(self._sent_by, self._lives[worker], worker, group_id, scoring_ms)
        self._loops[worker].put(1000 * self._costs.engine.episode_s, sent)

    def _sent_by(self, life: int, worker: int, group_id: str, scoring_ms: float) -> None:
        if life == self._lives[worker]:
            self._sent(worker, group_id, scoring_ms)

    def _episode_scored(self, group_id: str) -> None:
        if "reward" in self.job.down:
            self._held.append(group_id)
        else:
            super()._episode_scored(group_id)

    def reward_back(self) -> None:
        held, self._held = self._held, []
        rng = random.Random(self._seed)
        for group_id in held:
            self._rewards.put(self._scoring_ms(rng), partial(self._episode_scored, group_id))

    def train(self, step: int, group_ids: Sequence[str]) -> None:
        costs = self._costs.trainer
        tokens = sum(self._tokens[group_id] for group_id in group_ids)
        compute_ms = 1000 * (costs.step_s + tokens * costs.token_s)
        after_ms = self._batch_ms(len(group_ids)) + compute_ms
        self._clock.after(after_ms, partial(self.job.trained_by, self.job.life))


def simulate(
    rules: Rules,
    shape: Shape,
    costs: Costs,
    outages_s: Mapping[str, float],
    *,
    steps: int,
    every_s: float | None,
    state_s: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Return seconds per step and the number of kills of each role. No role is killed if `every_s` is
    None."""
    (name,) = rules.consumers
    endless = replace(rules, consumers={name: replace(rules.consumers[name], steps=1 << 40)})
    world = KilledWorld(endless, shape, costs, state_ms=1000 * state_s, seed=seed)
    job, rng = world.job, random.Random(f"kills:{seed}")
    kills = dict.fromkeys(outages_s, 0)
    order: list[str] = []

    def strike() -> None:
        if job.down:
            world.clock.after(100, strike)  # The last victim does not serve yet
            return
        if not order:
            order.extend(rng.sample(sorted(outages_s), len(outages_s)))
        role = order.pop()
        kills[role] += 1
        job.kill(role, 1000 * outages_s[role])
        wait()

    def wait() -> None:
        if every_s is not None:
            world.clock.after(1000 * rng.expovariate(1 / every_s), strike)

    job.run(WARM_UP, 0)
    wait()
    figures = job.run(steps, job.v_train)
    dropped = {reason: n for reason, n in job.index.meta.counts.items() if reason.startswith("dropped:")}
    return {
        "step_s": figures.elapsed_ms / 1000 / figures.steps,
        "trainer_idle": figures.trainer_idle,
        "staleness_mean": figures.mean_staleness,
        "kills": kills,
        "steps_done_again": job.redone,
        "groups_dropped": dropped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between kills")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="also kill each role alone")
    parser.add_argument("--state", type=float, default=0.0, help="seconds from a commit to its state")
    parser.add_argument("--set", nargs="+", default=[], metavar="ROLE=SECONDS", help="other outages")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = json.loads(options.result.read_text())
    costs = Costs.model_validate(told["costs"])
    costs = costs.model_copy(update={"machine": costs.machine.model_copy(update={"cores": 1.0})})
    with tempfile.TemporaryDirectory(prefix="simulated-kills-") as folder:
        job = load_job(prepare(Path(folder), told["groups"], noise=False), ["trainer.steps=100000"])
    rules, shape = Rules.of(job), Shape.of(job)
    outages_s = {role: told["roles"][role]["serves_s"] for role in ROLES}
    outages_s |= {role: float(value) for role, _, value in (each.partition("=") for each in options.set)}
    given = {"steps": options.steps, "state_s": options.state}
    kinds = {"any role": outages_s}
    if options.each:
        kinds |= {role: {role: outages_s[role]} for role in ROLES}
    bases = [
        simulate(rules, shape, costs, {}, every_s=None, seed=seed, **given) for seed in range(options.seeds)
    ]
    rows: dict[str, Any] = {"undisturbed": bases}
    print(f"undisturbed: step {bases[0]['step_s']:.2f} s, trainer idle {bases[0]['trainer_idle']:.3f}")
    for name, killed in kinds.items():
        runs = [
            simulate(rules, shape, costs, killed, every_s=options.every, seed=seed, **given)
            for seed in range(options.seeds)
        ]
        kills = sum(sum(run["kills"].values()) for run in runs)
        wall_s = sum(run["step_s"] for run in runs) * options.steps
        base_s = sum(base["step_s"] for base in bases) * options.steps
        figures = {
            "effective": base_s / wall_s,
            "kills": kills,
            "one_kill_every_s": wall_s / kills,
            "lost_s_per_kill": (wall_s - base_s) / kills,
        }
        rows[name] = figures | {"runs": runs}
        print(f"{name:>11}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures.items()), flush=True)
    if options.out:
        record = {"every_s": options.every, **given, "outages_s": outages_s, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
