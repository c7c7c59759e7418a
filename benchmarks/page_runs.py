"""Run folders for the page at sizes that no run of an afternoon has, written by what writes those of runs:
many jobs, a long history, and a long episode among many samples."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from areal_async.base.own_files import private_files
from areal_async.config.load import dump_job, load_job
from areal_async.launch.folders import LOCK
from areal_async.service.record import RECORDS, RunLog
from areal_async.service.samples import file_name, lines_of, sample_of, write_samples
from areal_async.trajectory import Call, Episode, EpisodeBuilder
from areal_async.trajectory.layout import SegmentKind

BEGAN_S = 1.79e9
STEP_S = 2.0
WORDS = ("so", "if", "the", "sum", "of", "both", "is", "known", "then", "we", "take", "one", "from", "it")


def run_folder(parent: Path, name: str, steps: int) -> Path:
    """A run that ended, without records."""
    folder = parent / name
    folder.mkdir(parents=True, mode=0o700)
    (folder / LOCK).touch(0o600)
    given = {
        "job": name,
        "run_dir": str(parent),
        "model": "/models/tiny",
        "reward": {"name": "exact_match"},
        "tasks": {"train": "/tasks/train.jsonl"},
        "trainer": {"steps": steps},
    }
    (folder / "job.yaml").write_text(dump_job(load_job(given, source=name, base=parent, files=False)))
    return folder


def write_history(folder: Path, steps: int, seed: int = 0) -> None:
    """`metrics.jsonl` of a run of so many steps, with the fields of a real one."""
    draw = random.Random(seed)
    log = RunLog(folder / RECORDS)
    log.write("start", time_s=BEGAN_S)
    for step in range(steps):
        at_s = BEGAN_S + STEP_S * step
        if step % 5 == 0:
            log.write(
                "load", time_s=at_s, steps=step, cores=64, services=_services(step), counts={"trained": step}
            )
        log.write("step", time_s=at_s + STEP_S, **_step(step, steps, draw))
        if (step + 1) % 50 == 0:
            accuracy = 0.9 - 0.6 * math.exp(-3 * step / steps) + draw.gauss(0, 0.01)
            told = {"accuracy": accuracy, "n": 512, "by_source": {"sums": accuracy}}
            log.write("evaluation", time_s=at_s + STEP_S, policy="policy", version=step + 1, **told)
    log.write("end", time_s=BEGAN_S + STEP_S * steps, ending="finished", wall_s=STEP_S * steps)
    log.close()


def _services(step: int) -> dict[str, Any]:
    done_s = STEP_S * step
    told = {
        "trainer": {
            "busy_s": {"train": 0.8 * done_s, "publish": 0.04 * done_s},
            "cpu_s": done_s,
            "tokens": None,
        }
    }
    for number in range(4):
        busy = {"rollout": (0.7 + 0.05 * number) * done_s}
        told[f"rollout-{number}"] = {"busy_s": busy, "cpu_s": done_s, "tokens": int(4000 * done_s)}
    return told


def _step(step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    part = step / steps
    reward = 0.85 - 0.6 * math.exp(-3 * part) + draw.gauss(0, 0.03)
    ess = 0.98 + draw.gauss(0, 0.005)
    return {
        "policy": "policy", "step": step, "version": step + 1, "epoch": 1, "loss": draw.gauss(0.002, 0.002),
        "grad_norm": 0.3 + abs(draw.gauss(0, 0.1)), "lr": 1e-6, "entropy": 0.6 * math.exp(-part) + 0.1,
        "clip_ratio": abs(draw.gauss(0.003, 0.001)), "kl": 0.02 * part, "episodes": 512, "tokens": 180_000,
        "units": 220_000, "reward_mean": reward, "reward_std": 0.4, "staleness_mean": 1 + draw.random(),
        "staleness_max": draw.randint(2, 4), "share_stale": 0.8, "response_length_mean": 350 + 900 * part,
        "response_length_max": 4096, "prompt_length_mean": 80.0, "rewards": {"answer": reward, "format": 0.9},
        "phases": {"wait": 0.2, "fetch": 0.05, "prepare": 0.1, "columns": 0.3, "update": 1.1, "publish": 0.1},
        "step_s": STEP_S, "wait_s": 0.2, "busy_s": 1.6, "publish_s": 0.1, "correction": {"ess": ess},
        "weights_hash": f"blake3:{step:064x}",
    }  # fmt: skip


def write_episodes(folder: Path, step: int, units: list[int]) -> None:
    """A file of samples of one step: episodes with so many units, two turns and a tool call each."""
    samples = []
    for number, count in enumerate(units):
        draw = random.Random(number)
        advantages = {unit: draw.gauss(0, 1) for unit in range(count + 40)}
        truth: dict[str, Any] = {
            "ground_truth": "42",
            "data_source": "sums",
            "reward": float(number % 2),
            "verdict": "score",
        }
        told: dict[str, Any] = {
            "policy": "policy",
            "step": step,
            "version": step,
            "rewards": {"answer": 0.5, "format": 1.0},
        }
        episode = _episode(number, step, count, draw)
        samples.append(sample_of(episode, _decode, advantages=advantages, **told, **truth))
    with private_files():
        write_samples(folder, file_name("step", step), lines_of(samples))


def _decode(ids: Any) -> str:
    return "".join("\n" if token % 97 == 0 else f" {WORDS[token % len(WORDS)]}" for token in ids)


def _episode(number: int, step: int, units: int, draw: random.Random) -> Episode:
    builder = EpisodeBuilder("job", f"task-{number}", f"task-{number}#0", number)
    parent = builder.prompt([draw.randrange(1, 5000) for _ in range(16)])
    for turn, count in enumerate((units // 2, units - units // 2)):
        ids = [draw.randrange(1, 5000) for _ in range(count)]
        logps = [-draw.expovariate(1.5) for _ in ids]
        versions = [max(0, step - 3) + 3 * i // count for i in range(count)]
        parent = builder.sampled(ids, logps, versions, parent=parent, call=Call(), turn=turn)
        if turn == 0:
            parent = builder.observed(SegmentKind.TOOL, [*range(1, 9)], parent, turn=1)
    return builder.build()
