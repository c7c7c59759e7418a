"""What a step of the local engine consists of, and whether CUDA graphs or `torch.compile` make it shorter.

    python benchmarks/decode_step.py --device cuda:0 --json benchmarks/results/decode_step.json
    python benchmarks/decode_step.py --models tiny --in-flight 64 --seconds 1

Models with random weights: the quickstart's in float32, and one in the shape of Qwen2.5-0.5B in bfloat16. No
two prompts are equal, and no answer ends by itself. For each number of running requests:

- `step_ms`: a step of the engine, as it is and on a GPU without its graphs too (`eager`), and tokens/s;
- its parts, each waited for by itself, so that they add up to a little more: the model's `forward`, the
  output layer (`logits`), `sampling`, and all the `rest` in Python; `kernel_ms` and `kernels` are what the
  GPU runs in a step, `recorded` how many shapes have a graph;
- `forward_ms`: the forward pass alone over the same cache, as it is, as a CUDA graph, compiled by
  `torch.compile` as it is and with `mode="reduce-overhead"`, and compiled and recorded as a graph; with the
  seconds that compiling this one shape took, and the largest difference of a log-prob.

A file given with `--json` keeps the measurements that are in it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from areal_async.cli.quickstart.model import make_tokenizer, write_model
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest
from rollout_service.engines.local import core as core_module
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.kv import Decode
from rollout_service.engines.local.model import LocalModel

QWEN_05B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
LENGTHS = {"tiny": (7, 57), "0.5b": (128, 128)}
"""Tokens of a prompt and of its answer."""
DTYPES = {"tiny": "float32", "0.5b": "bfloat16"}


def make_model(name: str, directory: Path, device: str) -> None:
    if name == "tiny":
        return write_model(directory, seed=0)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**QWEN_05B, eos_token_id=1, pad_token_id=0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


class Bench:
    """An engine core with `running` requests that go on."""

    def __init__(self, name: str, directory: Path, device: str, running: int) -> None:
        self.prompt, self.new = LENGTHS[name]
        self.running = running
        model = LocalModel(directory, device=device, dtype=DTYPES[name])
        self.core = EngineCore(model, slots=running, max_model_len=self.prompt + self.new)
        self.core._eos[:] = False
        self.cuda = model.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def fill(self) -> int:
        """Have all requests running; how many steps they all still go on."""
        self.core.abort([r.request_id for r in self.core._table.requests if r is not None])
        for i in range(self.running):
            ids = np.random.default_rng(i).integers(3, 16, self.prompt).astype(np.int32)
            sampling = Sampling(max_new_tokens=self.new, seed=i)
            self.core.submit(self.core.checked(GenerateRequest(str(i), ids, sampling)))
        while self.core.waiting:
            self.core.step()
        longest = int(self.core._table.length[self.core._active].max())
        return self.prompt + self.new - longest - 1

    def steps(self, seconds: float) -> list[float]:
        """Milliseconds of each step, for so long."""
        took: list[float] = []
        while sum(took) < 1000 * seconds:
            for _ in range(self.fill()):
                begun_s = time.perf_counter()
                self.core.step()
                took.append(1000 * (time.perf_counter() - begun_s))
        return took

    def step(self, seconds: float) -> dict[str, Any]:
        """What a step takes, and its parts."""
        self.steps(0.01)
        self.steps(0.01)  # a graph is recorded at the second pass of a shape
        step_ms = statistics.median(self.steps(seconds))
        found = {
            "step_ms": round(step_ms, 3),
            "tokens_per_s": round(1000 * self.running / step_ms),
            **self.parts(),
        }
        return found | self.kernels() if self.cuda else found

    def recorded(self) -> int:
        graphs = self.core._graphs
        return 0 if graphs is None else sum(graph is not None for graph in graphs._graphs.values())

    def parts(self) -> dict[str, float]:
        spent: dict[str, list[float]] = {"forward_ms": [], "logits_ms": [], "sampling_ms": []}

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any) -> Any:
                self.synchronize()
                begun_s = time.perf_counter()
                result = call(*args)
                self.synchronize()
                spent[name].append(1000 * (time.perf_counter() - begun_s))
                return result

            return inner

        left = self.fill()
        kept = self.core._hidden, self.core.model.logits, core_module.draw
        steps_ms = []
        try:
            self.core._hidden = timed("forward_ms", kept[0])  # type: ignore[method-assign]
            self.core.model.logits = timed("logits_ms", kept[1])  # type: ignore[method-assign]
            core_module.draw = timed("sampling_ms", kept[2])
            for _ in range(left):
                begun_s = time.perf_counter()
                self.core.step()
                steps_ms.append(1000 * (time.perf_counter() - begun_s))
        finally:
            self.core._hidden = kept[0]  # type: ignore[method-assign]
            self.core.model.logits = kept[1]  # type: ignore[method-assign]
            core_module.draw = kept[2]
        rest = [step - sum(parts) for step, *parts in zip(steps_ms, *spent.values(), strict=True)]
        spent["rest_ms"] = rest
        return {name: round(statistics.median(values), 3) for name, values in spent.items()}

    def kernels(self) -> dict[str, float]:
        """What the GPU runs in a step, its copies included."""
        steps = min(self.fill(), 10)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self.core.step()
            self.synchronize()
        events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
        return {
            "kernel_ms": round(sum(event.self_device_time_total for event in events) / 1000 / steps, 3),
            "kernels": round(sum(event.count for event in events) / steps),
        }

    def forwards(self, seconds: float) -> dict[str, Any]:
        """The forward pass alone, in the forms that there are."""
        for _ in range(self.fill() // 2):
            self.core.step()
        core, kv = self.core, self.core._kv
        ids, position = core._table.next_input(core._active)
        first = core._split(ids, position)
        ids_t, position_t = (torch.from_numpy(a[first]).to(core.model.device) for a in (ids, position))
        longest = int(position.max()) + 1

        def forward(ids: Tensor, position: Tensor) -> Tensor:
            return core.model.hidden(ids[:, None], position[:, None], Decode(kv, position, longest))

        def of(form: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
            return lambda: form(ids_t, position_t)

        want = core.model.logits(of(forward)()[:, 0]).log_softmax(-1)
        found: dict[str, Any] = {"forward_ms": {}, "difference": {}, "compile_s": {}, "errors": {}}
        compiled = torch.compile(forward, dynamic=False)
        forms: dict[str, Callable[[], Callable[[], Tensor]]] = {"eager": lambda: of(forward)}
        forms["compiled"] = lambda: of(compiled)
        if self.cuda:
            forms["graph"] = lambda: recorded(of(forward))
            forms["compiled and graph"] = lambda: recorded(of(compiled))
            forms["reduce-overhead"] = lambda: of(
                torch.compile(forward, dynamic=False, mode="reduce-overhead")
            )
        for name, make in forms.items():
            try:
                torch.compiler.reset()
                begun_s = time.perf_counter()
                call = make()
                for _ in range(3):
                    hidden = call()
                self.synchronize()
                if name != "eager":
                    found["compile_s"][name] = round(time.perf_counter() - begun_s, 3)
                got = core.model.logits(hidden[:, 0]).log_softmax(-1)
                found["difference"][name] = float((got - want).abs().max())
                took: list[float] = []
                while sum(took) < 1000 * seconds:
                    begun_s = time.perf_counter()
                    call()
                    self.synchronize()
                    took.append(1000 * (time.perf_counter() - begun_s))
                found["forward_ms"][name] = round(statistics.median(took), 3)
            except Exception as error:
                found["errors"][name] = f"{type(error).__name__}: {error}"[:300]
        return found


def recorded(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call as a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="tiny,0.5b")
    parser.add_argument("--in-flight", default="8,64,256")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cuda = options.device.startswith("cuda")
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    found: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/decode_step.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(options.device) if cuda else platform.machine() + ", one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": [],
    }
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            make_model(name, Path(folder), options.device)
            for running in map(int, options.in_flight.split(",")):
                bench = Bench(name, Path(folder), options.device, running)
                row: dict[str, Any] = {"model": name, "dtype": DTYPES[name], "running": running}
                row["engine"] = bench.step(options.seconds)
                if cuda:
                    row["recorded"] = bench.recorded()
                    bench.core._graphs = None
                    row["eager"] = bench.step(options.seconds)
                row |= bench.forwards(options.seconds / 4)
                found["runs"].append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps([*kept, found], indent=2) + "\n")


if __name__ == "__main__":
    main()
