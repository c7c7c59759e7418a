"""What areal-async does on one GPU, within a time limit: one JSON file and one picture.

    python benchmarks/gpu.py --minutes 8 [--out DIR] [--device cuda:0] [--parts train-none,decode]
    python benchmarks/gpu.py --device cpu --tiny --minutes 3

Needs Python, torch with CUDA and transformers; what else is missing is taken from `wheelhouse/` (`make
wheelhouse`) without a network. Each part is a process of its own with a share of the time that is left, and
20 s at least while there are as many: one that fails, hangs or runs out of memory is recorded with its error,
and the rest goes on. After each part `gpu.json` is written, and what a part had found when its time was up is
kept.

- `train-none`, `train-selective`, `train-full`: a random Qwen2.5-1.5B in bf16, rows of 8k tokens, by
  recomputation: tokens/s, MFU, peak memory beside the plan's figure. `train-offload`: `full`, with AdamW's
  moments on the host. `train-megatron`: as `train-none`, by Megatron-Core, on CUDA alone.
- `decode`: tokens/s of the local engine, beside what the memory's bandwidth allows.
- `update`: how long publication and an update of the engine take, and how long generation stands still.
- `nccl`: broadcasts in buckets between two processes on the one device, as weights go to engines.
- `quickstart`: both jobs of the quickstart with trainer and engines on the device.

MFU is model FLOPs over peak FLOPs (Chowdhery et al., arXiv:2204.02311, appendix B): 6 per weight of a product
and token, and 6 · layers · query width · length for attention, whose causal half is not counted (Dao,
arXiv:2307.08691, section 4.1); the output layer counts for the tokens that it is applied to.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARES = {
    "model": 1.0,
    "train-none": 1.2,
    "train-megatron": 1.2,
    "train-full": 1.2,
    "decode": 1.5,
    "update": 1.0,
    "nccl": 0.6,
    "train-selective": 1.0,
    "train-offload": 1.0,
    "quickstart": 4.0,
}
"""The parts in their order, with their weights in the time that is left."""
ENDING_S = 5.0
"""Seconds that are kept for the picture, and in which a part that is told to end must have ended."""
LEAST_S = 20.0
"""Seconds that a part has at least, while there are as many: imports take some, and `nccl` imports twice."""


def device_error(device: str) -> str:
    """Why nothing can be measured on this device, and what to do; empty if all is well."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        return f"{device!r} is not a device: name one as cuda:0, or cpu."
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type != "cuda" or (wanted.index or 0) < seen:
        return ""
    if seen:
        return f"There is no {device}: torch sees {seen} GPU(s), from cuda:0 to cuda:{seen - 1}."
    return (
        f"torch {torch.__version__} sees no GPU: run this where `nvidia-smi` shows one, with a build of torch"
        " for CUDA that suits its driver, or try the script itself with --device cpu --tiny."
    )


def time_for(parts: list[str], left_s: float) -> float:
    """Seconds for the first of `parts`, when the time that is left is for all of them."""
    share = SHARES[parts[0]] / sum(SHARES[name] for name in parts)
    return max(left_s * share, min(left_s, LEAST_S))


def wheels_missing(wheelhouse: Path) -> list[Path]:
    """The wheels of packages that this Python does not have."""
    have = {_plain(name) for found in importlib.metadata.distributions() if (name := found.metadata["Name"])}
    return [path for path in sorted(wheelhouse.glob("*.whl")) if _plain(path.name.split("-")[0]) not in have]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def python_path(wheelhouse: Path, target: Path) -> str:
    """Where the parts import from: this checkout, and the missing packages, which are put into `target`."""
    missing = wheels_missing(wheelhouse)
    if missing:
        print(f"taking {len(missing)} packages from {wheelhouse}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--target", target, *missing], check=True, timeout=300)
    return os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), str(target)])


def run_part(
    name: str, limit_s: float, found: Path, options: argparse.Namespace, scratch: Path, env: dict[str, str]
) -> dict[str, Any]:
    """Run one part within `limit_s` and return what it found."""
    command = [sys.executable, "-P", "-m", "gpu_parts", name, "--out", str(found), "--scratch", str(scratch)]
    begun_s = time.monotonic()
    command += ["--device", options.device, "--until", str(begun_s + limit_s)]
    command += ["--tiny"] if options.tiny else []
    log = scratch / f"{name}.log"
    status = "ok"
    with log.open("wb") as output:
        part = subprocess.Popen(
            command, env=env, cwd=scratch, stdout=output, stderr=output, start_new_session=True
        )
        try:
            part.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = "time was up"
        finally:
            _end(part)
    result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    if status == "ok" and part.returncode:
        status = "failed"
    if status != "ok":
        result["log"] = log.read_text(errors="replace").splitlines()[-12:]
    return {"status": status, "took_s": round(time.monotonic() - begun_s, 1), **result}


def _end(part: subprocess.Popen[bytes]) -> None:
    """End a part with every process that it started: they are of one session."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(part.pid, number)
        with suppress(subprocess.TimeoutExpired):
            part.wait(ENDING_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps, to try the script")
    parser.add_argument("--parts", default="", help="only these, separated by commas")
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "wheelhouse")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.minutes - ENDING_S
    wanted = options.parts.split(",") if options.parts else list(SHARES)
    if unknown := set(wanted) - SHARES.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    if error := device_error(options.device):
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [name for name in SHARES if name in wanted or (name == "model" and wanted != ["quickstart"])]
    results: dict[str, Any] = {"minutes": options.minutes, "device": options.device, "tiny": options.tiny}
    results["parts"] = {}
    shared = Path("/dev/shm") if options.device == "cpu" or _has_room(Path("/dev/shm")) else None
    scratch = Path(tempfile.mkdtemp(prefix="areal-gpu-", dir=shared))
    try:
        target = scratch / "packages"
        path = python_path(options.wheelhouse, target)
        sys.path[:0] = path.split(os.pathsep)
        env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        for index, name in enumerate(parts):
            left = until_s - time.monotonic()
            if left < ENDING_S:
                results["parts"][name] = {"status": "not begun: time was up"}
                continue
            found = run_part(
                name, time_for(parts[index:], left), scratch / f"{name}.json", options, scratch, env
            )
            results["parts"][name] = found
            _write(options.out / "gpu.json", results)
            told = {key: value for key, value in found.items() if key not in ("log", "runs")}
            print(f"{name}: {json.dumps(told)}", flush=True)
        _write(options.out / "gpu.json", results)
        from gpu_picture import draw

        draw(results, options.out / "gpu.png")
        print(f"{options.out / 'gpu.json'} and {options.out / 'gpu.png'} are written", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0 if any(found["status"] == "ok" for found in results["parts"].values()) else 1


def _has_room(folder: Path) -> bool:
    """Whether a folder of shared memory has room for the model and its snapshots."""
    return folder.is_dir() and shutil.disk_usage(folder).free > 24 << 30


def _write(path: Path, results: dict[str, Any]) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(results, indent=2) + "\n")
    whole.replace(path)


if __name__ == "__main__":
    sys.exit(main())
