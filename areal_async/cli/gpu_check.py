"""`areal-async gpu check`: measures this machine's GPU with the programs of a job, and judges each figure.

Each part is a process of its own with a share of the time that is left. A part that fails, hangs or runs out
of memory is reported with the end of its log, and the other parts still run.

- `machine`: versions, driver, and the rates of a copy and of a matrix product.
- `logprobs`: log-probs in bf16 on the device against fp32 on the CPU.
- `steps`: training steps on ragged groups in bf16. The model has 1.7 or 0.6 billion parameters, by the
  GPU's memory.
- `local`, `sglang`, `vllm`: a job of four steps whose engine and trainer share the GPU in turns. The
  trainer's self-check compares log-probs at the start and after an update of the weights.
- `decode-sglang`, `decode-vllm`: the server's rate beside the memory's bandwidth.
- `ranks`, `nccl`: with two GPUs, a job on two ranks, and one that sends weights by NCCL.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from areal_async.base.events import FOLDER
from areal_async.base.mistakes import Mistake
from areal_async.base.own_files import write_whole
from areal_async.config.engines import LOGPROB_BOUNDS, EngineMissing, find_engine_python

SHARES = {
    "machine": 0.5,
    "logprobs": 1.5,
    "steps": 2.5,
    "local": 1.5,
    "sglang": 3.0,
    "vllm": 3.0,
    "decode-sglang": 1.5,
    "decode-vllm": 1.5,
    "ranks": 2.0,
    "nccl": 2.0,
}
"""The parts in their order, each with its weight in the time that is left."""
LEAST_S = 45.0
"""Least seconds of a part while as many are left: the imports and the start of a server take most of it."""
ENDING_S = 5.0
"""Seconds in which a part that is told to end must have ended."""
LOG_LINES = 12
GIB = 1 << 30
LEAST_GIB = {"large": 60, "small": 20}
"""Size of the model -> least memory of the GPU, in GiB: enough for a training step and a sleeping server."""
PROMPTS = 64
MEMORY: Mapping[str, Mapping[str, float]] = {
    "local": {},
    "sglang": {"mem-fraction-static": 0.3},
    "vllm": {"gpu-memory-utilization": 0.35},
}
"""Engine -> server arguments for a share of the GPU's memory."""
REWARD = '''from areal_async import RewardInput, Score, reward


@reward
def score(given: RewardInput) -> Score:
    """Return a score that depends on the answer alone, so that answers of a group differ."""
    return Score(len(given.response) % 7 / 6)
'''


def device_mistake(device: str) -> Mistake | None:
    """Return the reason why a device cannot be checked, with a fix; None if it can."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        return Mistake("--device", f"{device!r} is no device", "Name one such as cuda:0")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type != "cuda" or (wanted.index or 0) < seen:
        return None
    if seen:
        return Mistake("--device", f"torch sees {seen} GPU(s), and no {device}", "Name a lower number")
    fix = "Run `make install-gpu` where nvidia-smi shows a GPU, or try the command: --device cpu --tiny"
    return Mistake("--device", f"torch {torch.__version__} sees no GPU", fix)


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `trainer_service.tools.step_check`."""

    measure: Literal["machine", "model", "steps", "logprobs"]
    folder: Path
    """Folder of the check, with the model in `model/`."""
    out: Path
    """File for the figures, as JSON."""
    device: str
    dtype: str
    size: Literal["large", "small", "tiny"] = "large"
    """Size of the model and of a step."""


class DecodePart(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `rollout_service.tools.decode_check`."""

    job_file: Path
    out: Path
    in_flight: int
    new_tokens: int


@dataclass(frozen=True)
class Bound:
    """A figure of a part and what it must be. `advice` says what to change if it is not."""

    part: str
    figure: str
    kind: Literal["at most", "at least", "is"]
    bound: Any
    advice: str

    def holds(self, value: Any) -> bool:
        if self.kind == "is":
            return bool(value == self.bound)
        return bool(value <= self.bound if self.kind == "at most" else value >= self.bound)


GAP = LOGPROB_BOUNDS["bfloat16", "dense"]
NUMERICS = "The device computes other log-probs than a CPU: report the block with the model's family."
LOOK = "Look at the part's log: --keep DIR keeps it."
SERVED = "The server and the trainer disagree about the same weights: see docs/troubleshooting.md."
BOUNDS = (
    Bound("logprobs", "mean_nats", "at most", GAP.mean, NUMERICS),
    Bound("logprobs", "p999_nats", "at most", GAP.p999, NUMERICS),
    Bound("steps", "loss_is_finite", "is", True, NUMERICS),
    Bound(
        "steps", "mfu", "at least", 0.3, "Set trainer.backend_args.compile: on, and look at slowest_kernels."
    ),
    Bound("steps", "syncs_per_micro_batch", "at most", 3.0, "sync_places names the lines that wait."),
    Bound("steps", "launches_per_layer", "at most", 200.0, "Set trainer.backend_args.compile: on."),
    Bound("steps", "cudnn_plans", "at most", 0, "Set TORCH_CUDNN_SDPA_DEPRIORITIZED=1."),
    Bound(
        "steps",
        "peak_over_plan",
        "at most",
        1.06,
        "`areal-async plan` promises too little: report the block.",
    ),
    *(Bound(name, "steps", "at least", 4, LOOK) for name in ("local", "sglang", "vllm", "ranks", "nccl")),
    *(Bound(name, "checks_passed", "at least", 2, SERVED) for name in ("local", "sglang", "vllm", "nccl")),
    *(Bound(name, "turns", "at least", 1, LOOK) for name in ("local", "sglang", "vllm")),
    *(Bound(name, "released_share", "at least", 0.7, LOOK) for name in ("local", "sglang", "vllm")),
    *(Bound(f"decode-{name}", "share_of_bandwidth", "at least", 0.5, LOOK) for name in ("sglang", "vllm")),
)


@dataclass
class PartOutcome:
    """Result of one part. `why` is the reason if it did not run or failed."""

    status: Literal["ok", "failed", "not run"]
    took_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    log: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GpuCheck:
    """A check of one device within a time limit."""

    folder: Path
    device: str
    until_s: float
    tiny: bool = False

    @property
    def on_gpu(self) -> bool:
        return self._kind == "cuda"

    @property
    def _kind(self) -> str:
        return self.device.partition(":")[0]

    def run(self, parts: Sequence[str], told: Callable[[str, PartOutcome], None]) -> dict[str, PartOutcome]:
        """Run the parts in order and return their outcomes. `told` is called after each part."""
        found: dict[str, PartOutcome] = {}
        for index, name in enumerate(parts):
            left_s = self.until_s - time.monotonic()
            why = self._refused(name)
            if not why and left_s < ENDING_S:
                why = "the time was up: give more with --minutes"
            if why:
                found[name] = PartOutcome("not run", why=why)
            else:
                later = [each for each in parts[index + 1 :] if not self._refused(each)]
                found[name] = self._part(name, time_for([name, *later], left_s))
            told(name, found[name])
        return found

    def _refused(self, name: str) -> str:
        """Return the reason why a part cannot run; empty if it can."""
        if name != "machine" and self._size() is None:
            return f"the GPU has less than {LEAST_GIB['small']} GiB: add --tiny for a tiny model"
        try:
            if name in ("ranks", "nccl") and self._rates()["gpus"] < 2:
                return "it needs two GPUs"
        except PartFailed as error:
            return str(error)
        engine = "sglang" if name in ("ranks", "nccl") else name.removeprefix("decode-")
        if engine in ("sglang", "vllm"):
            try:
                find_engine_python(engine)
            except EngineMissing as error:
                return str(error)
        return ""

    def _size(self) -> Literal["large", "small", "tiny"] | None:
        """Return the size of model for the GPU's memory; None if none fits. If the part `machine` failed, the
        memory is not known, and the size is `small`."""
        if self.tiny:
            return "tiny"
        try:
            gib = self._rates().get("memory_gib", math.inf)
        except PartFailed:
            return "small" if self.on_gpu else "large"
        if gib >= LEAST_GIB["large"]:
            return "large"
        return "small" if gib >= LEAST_GIB["small"] else None

    def _part(self, name: str, limit_s: float) -> PartOutcome:
        begun_s = time.monotonic()
        until_s = begun_s + limit_s
        try:
            if name == "machine":
                figures = self._measured(name, self.device, until_s)
                if size := self._size():
                    figures["model"] = size
                    self._make_model(until_s)
            elif name == "steps":
                figures = self._measured(name, self.device, until_s)
            elif name == "logprobs":
                figures = self._gap(until_s)
            elif name.startswith("decode-"):
                figures = self._decoded(name.removeprefix("decode-"), until_s)
            else:
                figures = self._job(name, until_s)
        except PartFailed as error:
            why = str(error) or f"it took longer than {limit_s:.0f} s: give more with --minutes"
            return PartOutcome("failed", time.monotonic() - begun_s, why=why, log=error.log)
        return PartOutcome("ok", time.monotonic() - begun_s, figures)

    def _measured(self, measure: Any, device: str, until_s: float) -> dict[str, Any]:
        """Return the figures of a measurement by the trainer, after its model has been made."""
        if measure not in ("machine", "model"):
            self._make_model(until_s)
        out = self.folder / f"{measure}-{device.partition(':')[0]}.json"
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
        size = self._size() or "small"
        part = StepPart(measure=measure, folder=self.folder, out=out, device=device, dtype=dtype, size=size)
        self._program("trainer_service.tools.step_check", part, until_s)
        figures: dict[str, Any] = json.loads(out.read_bytes())
        return figures

    def _make_model(self, until_s: float) -> None:
        if not (self.folder / "model").exists():
            self._measured("model", self.device, until_s)

    def _gap(self, until_s: float) -> dict[str, Any]:
        """Return the differences of log-probs between the device and the CPU, in nats."""
        import numpy as np

        files = [self._measured("logprobs", device, until_s)["file"] for device in (self.device, "cpu")]
        on_device, on_cpu = (np.load(self.folder / name) for name in files)
        gaps = np.abs(on_device - on_cpu)
        gaps = np.nan_to_num(gaps, nan=np.inf)
        return {
            "units": len(gaps),
            "mean_nats": float(gaps.mean()),
            "p999_nats": float(np.quantile(gaps, 0.999)),
            "max_nats": float(gaps.max()),
        }

    def _decoded(self, engine: str, until_s: float) -> dict[str, Any]:
        out = self.folder / f"decode-{engine}.json"
        in_flight, new_tokens = (4, 16) if self.tiny else (PROMPTS, 256)
        part = DecodePart(
            job_file=self._write_job(engine, until_s), out=out, in_flight=in_flight, new_tokens=new_tokens
        )
        self._program("rollout_service.tools.decode_check", part, until_s)
        figures: dict[str, Any] = json.loads(out.read_bytes())
        read = figures["tokens_per_s"] / in_flight * figures["bytes_per_step"]
        return figures | {"share_of_bandwidth": read / self._rates()["copied_bytes_per_s"]}

    def _rates(self) -> dict[str, Any]:
        """Return the figures of the part `machine`. Raises `PartFailed` if it has none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"machine-{self._kind}.json").read_bytes())
        except FileNotFoundError as error:
            raise PartFailed("the part machine has no figures", []) from error
        return found

    def _job(self, name: str, until_s: float) -> dict[str, Any]:
        """Run a job and return figures of its records."""
        job_file = self._write_job(name, until_s)
        command = ["areal_async", "run", str(job_file), "--plain", "--overwrite"]
        run_part(command, self.folder / f"{name}.log", until_s)
        return figures_of_run(self.folder / "runs" / f"gpu-check-{name}")

    def _write_job(self, name: str, until_s: float) -> Path:
        """Write the job of a part, its model, its tasks and its reward."""
        self._make_model(until_s)
        path = self.folder / f"{name}.yaml"
        (self.folder / "reward.py").write_text(REWARD)
        truth = {"style": "rule", "ground_truth": ""}
        prompts = [f"{number}+{number}=" for number in range(PROMPTS)]
        tasks = [{"data_source": "check", "prompt": each, "reward_model": truth} for each in prompts]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        write_whole(path, yaml.safe_dump(job_of(name, self)).encode())
        return path

    def _program(self, module: str, request: msgspec.Struct, until_s: float) -> None:
        text = msgspec.json.encode(request, enc_hook=str).decode()
        run_part([module, text], self.folder / f"{module.rpartition('.')[2]}.log", until_s)


def job_of(name: str, check: GpuCheck) -> dict[str, Any]:
    """Return the content of a part's job file."""
    engine = name if name in MEMORY else "sglang"
    answer = 16 if check.tiny else 128
    content: dict[str, Any] = {
        "job": f"gpu-check-{name}",
        "model": "model",
        "run_dir": "runs",
        "tasks": {"train": "tasks.jsonl"},
        "reward": {"name": "reward.py:score"},
        "rollout": {
            "engine": engine,
            "device": check.device,
            "group_size": 4,
            "max_concurrent": 16 if check.tiny else 64,
            "max_model_len": 64 + answer,
            "sampling": {"temperature": 1.0, "max_new_tokens": answer},
            "server": {"arguments": MEMORY[engine] if check.on_gpu else {}},
        },
        # Without staleness, the second batch is of updated weights, so the second self-check always runs.
        "buffer": {"batch_groups": 4, "max_staleness": 0},
        "trainer": {
            "steps": 4,
            "device": check.device,
            "optimizer": {"lr": 1.0e-5},
            "objective": {"preset": "grpo"},
        },
        "observe": {"metrics_port": 0, "event_log": True},
    }
    if name in ("ranks", "nccl"):
        content["rollout"]["device"] = "cuda:1"
        content["trainer"] |= {"device": "cuda:0", "ranks": 2 if name == "ranks" else 1}
        content["weights"] = {"channel": "nccl" if name == "nccl" else "auto"}
    elif check.on_gpu:
        content["placement"] = {"share": "time"}
    return content


def figures_of_run(run: Path) -> dict[str, Any]:
    """Return figures of a run's records and events."""
    records = _lines(run / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    checks = [record for record in records if record["kind"] == "self_check"]
    events = [event for path in sorted((run / FOLDER).glob("*.jsonl")) for event in _lines(path)]
    turns = [event for event in events if event["event"] == "engine_turn"]
    found: dict[str, Any] = {
        "steps": len(steps),
        "step_s": max((record["step_s"] for record in steps), default=None),
        "checks_passed": sum(bool(record["passed"]) for record in checks),
        "turns": len(turns) or None,
    }
    if turns and (awake := turns[-1]["awake_bytes"]):
        found["awake_gib"] = awake / GIB
        if (asleep := turns[-1]["asleep_bytes"]) is not None:
            found["released_share"] = 1 - asleep / awake
        found["switches_s"] = turns[-1]["switches_s"]
    return found | {f"check_{number}_mean_nats": each["mean"] for number, each in enumerate(checks)}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class PartFailed(Exception):
    """A part that failed, with the end of its log. The message is empty if its time was up."""

    def __init__(self, why: str, log: list[str]) -> None:
        super().__init__(why)
        self.log = log


def run_part(command: Sequence[str], log: Path, until_s: float) -> None:
    """Run a module of this Python in a process group of its own until it ends. Raises `PartFailed`."""
    limit_s = max(0.0, until_s - time.monotonic())
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdout=output,
            stderr=output,
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PartFailed("", _tail(log)) from None
        finally:
            _end(process)
    if process.returncode:
        raise PartFailed(f"it ended with status {process.returncode}", _tail(log))


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-LOG_LINES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with every process that it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)


def time_for(parts: Sequence[str], left_s: float) -> float:
    """Return the seconds for the first of `parts` if `left_s` are left for all of them."""
    share = SHARES[parts[0]] / sum(SHARES[name] for name in parts)
    return max(left_s * share, min(left_s, LEAST_S))


def judged(found: Mapping[str, PartOutcome]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the block as (mark, text). The mark is `ok`, `OUT`, `FAILED` or `-`."""
    for name, outcome in found.items():
        if outcome.status != "ok":
            yield "FAILED" if outcome.status == "failed" else "-", f"{name}: {outcome.status}: {outcome.why}"
            yield from (("", f"    {line}") for line in outcome.log)
            continue
        bounds = {bound.figure: bound for bound in BOUNDS if bound.part == name}
        figures = {name: value for name, value in outcome.figures.items() if value is not None}
        for figure, value in figures.items():
            text = f"{name}: {figure} {shown(value)}"
            bound = bounds.get(figure)
            if bound is None:
                yield "", text
            elif bound.holds(value):
                yield "ok", f"{text} ({bound.kind} {shown(bound.bound)})"
            else:
                yield "OUT", f"{text} ({bound.kind} {shown(bound.bound)}). {bound.advice}"
        for figure in [each for each in bounds if each not in figures]:
            yield "-", f"{name}: {figure} not measured"


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
