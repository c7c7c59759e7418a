"""A second count of the memory of a job's GPUs, one tensor at a time, which shares no formula with `plan`.

It goes through a training step of a Qwen2 or Qwen3 model in bfloat16, perhaps with a frozen vision tower, in
the order of its events, adds and removes each tensor, and keeps the largest sum. Passes of the tower are not
counted. Sources are the models' `config.json`, the modules of transformers, ZeRO stage 3 (arXiv:1910.02054)
as `fully_shard` does it, the tables of docs/trainer.md (16 bytes per parameter, the head's tile, the 1.5 GiB
and 5 % that stay free), and for SGLang 0.5.23 and vLLM 0.32.0 their own rules:

- SGLang: weights and KV are a fraction of what is free at the start; graphs and activations come on top. On
an H100 the default leaves 512 MiB, 1.5 MiB for each of 8,192 tokens of a prefill, 128 MiB for each GPU of
the server, 2 MiB for each request of the largest decode graph and 8 MiB for each of the 58 prefill graphs. -
vLLM: everything but the CUDA context is a fraction of the whole GPU, 0.92 by default.

    python benchmarks/plan_count.py [JOB.yaml …]"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from areal_async.config.job import JobConfig

GIB, MIB = 1 << 30, 1 << 20
H100 = 81_559 * MIB
HALF, FULL = 2, 4  # bytes of a bfloat16 and of an fp32
PREFILL = 8192  # tokens of a prefill on an H100, for both servers
Tensors = dict[str, tuple[int, ...]]


class Timeline:
    """Tensors that are alive, and the largest sum of their bytes so far."""

    def __init__(self) -> None:
        self.alive: dict[str, float] = {}
        self.peak = 0.0

    def make(self, **tensors: float) -> None:
        self.alive |= tensors
        self.peak = max(self.peak, sum(self.alive.values()))

    def free(self, *names: str) -> None:
        for name in names:
            self.alive.pop(name, None)


@dataclass
class Model:
    """A Qwen2 or Qwen3 model, from its `config.json`. `head` is `tokens` or `value`. With a `rank`, it is
    frozen, and only adapters of this rank at all matrices of its blocks are trained."""

    config: dict[str, Any]
    head: str = "tokens"
    rank: int = 0
    block: Tensors = field(init=False)
    root: Tensors = field(init=False)

    def __post_init__(self) -> None:
        self.tower = tower_of(self.config["vision_config"]) if "vision_config" in self.config else {}
        self.config = c = self.config.get("text_config", self.config)
        self.h, self.m, self.vocabulary = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
        self.layers, self.heads, self.kv = (
            c["num_hidden_layers"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
        )
        self.d = c.get("head_dim", self.h // self.heads)
        self.q, self.k = self.heads * self.d, self.kv * self.d
        self.qwen3 = c["model_type"].startswith("qwen3")
        h, m, q, k = self.h, self.m, self.q, self.k
        self.block = {
            "q": (q, h), "k": (k, h), "v": (k, h), "o": (h, q),
            "gate": (m, h), "up": (m, h), "down": (h, m), "norm 1": (h,), "norm 2": (h,),
        }  # fmt: skip
        self.block |= (
            {"q norm": (self.d,), "k norm": (self.d,)}
            if self.qwen3
            else {"q bias": (q,), "k bias": (k,), "v bias": (k,)}
        )
        self.root = {"embedding": (self.vocabulary, h), "last norm": (h,)}
        if self.head == "value":
            self.root["value"] = (1, h)
        elif not c["tie_word_embeddings"]:
            self.root["output"] = (self.vocabulary, h)

    def shard(self, ranks: int) -> int:
        """Numbers that one of `ranks` keeps: each tensor is cut along its rows, and the last part is
        padded."""
        every = [*self.root.values(), *[shape for _ in range(self.layers) for shape in self.block.values()]]
        return sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in every)

    def tower_shard(self, ranks: int) -> int:
        """Numbers of the vision tower that one of `ranks` keeps."""
        return sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in self.tower.values())

    @property
    def size(self) -> int:
        return self.shard(1)

    @property
    def block_size(self) -> int:
        return sum(map(prod, self.block.values()))

    @property
    def root_size(self) -> int:
        return sum(map(prod, self.root.values()))

    @property
    def adapters(self) -> int:
        """Numbers in the adapters of a block."""
        return sum(self.rank * sum(shape) for shape in self.block.values() if len(shape) == 2)

    def saved(self) -> dict[str, int]:
        """Bytes per token that the backward pass of one block reads."""
        found = {
            "norm 1 in fp32": FULL * self.h,
            "norm 1, normalised": HALF * self.h,
            "input of q, k and v": HALF * self.h,
            "rotated queries": HALF * self.q,
            "rotated keys": HALF * self.k,
            "values": HALF * self.k,
            "attention": HALF * self.q,
            "log-sums of attention": FULL * self.heads,
            "attention, as input of o": HALF * self.q,
            "norm 2 in fp32": FULL * self.h,
            "norm 2, normalised": HALF * self.h,
            "input of gate and up": HALF * self.h,
            "gate": HALF * self.m,
            "up": HALF * self.m,
            "activated gate": HALF * self.m,
            "product": HALF * self.m,
        }
        if self.rank:
            found["between the two matrices of each adapter"] = 7 * HALF * self.rank
        if self.qwen3:
            found |= {f"norm of {name}": (FULL + HALF) * n for name, n in (("q", self.q), ("k", self.k))}
        return found

    def kept(self, recompute: str) -> dict[str, int]:
        """Bytes per token that one block keeps between its forward and its backward pass."""
        if recompute == "none":
            return self.saved()
        found = {"input": HALF * self.h}
        if recompute == "selective":
            widths = {"q": self.q, "k": self.k, "values": self.k, "attention": self.q, "o": self.h}
            widths |= {"gate": self.m, "up": self.m, "down": self.h}
            found |= {name: HALF * width for name, width in widths.items()}
            found["log-sums of attention"] = FULL * self.heads
        return found


def tower_of(c: dict[str, Any]) -> Tensors:
    """The tensors of the vision tower of Qwen2.5-VL or Qwen3-VL."""
    h, m, out, patch = c["hidden_size"], c["intermediate_size"], c["out_hidden_size"], c["patch_size"]
    found: Tensors = {"patches": (h, 3, 2, patch, patch)}
    old = "fullatt_block_indexes" in c
    matrices = {"qkv": (3 * h, h), "proj": (h, h), "up": (m, h), "down": (h, m)}
    matrices |= {"gate": (m, h)} if old else {}
    norms = [f"norm {n}{part}" for n in (1, 2) for part in ([""] if old else ["", " bias"])]
    for n in range(c["depth"]):
        found |= {f"{n} {name}": shape for name, shape in matrices.items()}
        found |= {f"{n} {name} bias": shape[:1] for name, shape in matrices.items()}
        found |= {f"{n} {name}": (h,) for name in norms}
    if not old:
        found |= {"patches bias": (h,), "positions": (c["num_position_embeddings"], h)}
    for n in range(1 + len(c.get("deepstack_visual_indexes", ()))):  # the merger, and those of deep features
        found |= {f"merger {n} 1": (4 * h, 4 * h), f"merger {n} 2": (out, 4 * h)}
        found |= {f"merger {n} 1 bias": (4 * h,), f"merger {n} 2 bias": (out,)}
        width = 4 * h if n else h
        found |= {f"merger {n} norm": (width,)} | ({} if old else {f"merger {n} norm bias": (width,)})
    return found


def trained_step(model: Model, ranks: int, recompute: str, tokens: int) -> float:
    """The largest sum of bytes beside parameters, gradients and moments, in a pass whose tokens are all
    sampled."""
    time, h, m = Timeline(), model.h, model.m
    block, root = HALF * model.block_size, HALF * model.root_size
    kept = tokens * sum(model.kept(recompute).values())
    time.make(root=root)
    for index in range(model.layers):
        time.make(now=block, ahead=block if ranks > 1 else 0, passing=3 * HALF * m * tokens)
        time.make(**{f"kept {index}": kept})
        time.free("now", "ahead", "passing")
    time.make(last_norm=tokens * (FULL + HALF + HALF) * h)
    logits = FULL * tokens * model.vocabulary if model.head == "tokens" else 0
    table = HALF * model.vocabulary * h if model.head == "tokens" else 0
    time.make(
        tile=min(2 * logits, max(32 * MIB, logits / 32)),
        units=HALF * h * tokens,
        units_gradient=(FULL + HALF) * h * tokens,
        table=table,
        ahead=block if ranks > 1 else 0,
    )
    time.free("tile", "units", "units_gradient", "last_norm", "ahead")
    held = set(model.kept(recompute))
    again = 0
    learned = model.adapters or model.block_size
    if recompute != "none":
        again = tokens * sum(size for name, size in model.saved().items() if name not in held)
    for index in reversed(range(model.layers)):
        time.make(now=block, ahead=block if ranks > 1 and index else 0, again=again)
        time.make(passing=tokens * HALF * (2 * h + 2 * m), gradients=HALF * learned)
        time.free("passing", "again", "now", "ahead", f"kept {index}", "reduced")
        time.make(reduced=FULL * learned, output=FULL * learned / ranks)
        time.free("gradients", "output")
    if model.rank:
        return time.peak
    time.make(embedding=HALF * prod(model.root["embedding"]), token_gradient=HALF * h * tokens)
    time.free("token_gradient")
    if not model.config["tie_word_embeddings"]:
        time.free("root")
    time.make(root_reduced=FULL * model.root_size, root_output=FULL * model.root_size / ranks)
    return time.peak


def frozen_pass(model: Model, ranks: int, tokens: int) -> float:
    """The largest sum beside the weights, in a pass without gradients."""
    time, h = Timeline(), model.h
    block = HALF * model.block_size
    time.make(root=HALF * model.root_size, now=block, ahead=block if ranks > 1 else 0)
    time.make(stream=2 * HALF * h * tokens, norm=(FULL + HALF) * h * tokens, mlp=3 * HALF * model.m * tokens)
    time.free("norm", "mlp")
    logits = FULL * tokens * model.vocabulary
    time.make(tile=max(32 * MIB, logits / 32), units=HALF * h * tokens)
    return time.peak


def config_in(folder: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


def models(job: JobConfig) -> list[tuple[Model, bool]]:
    """The trainer's models, and whether each is trained."""
    trainer = job.trainer
    if job.kind != "rl":
        return [(Model(config_in(job.model), "value" if job.kind == "reward_model" else "tokens"), True)]
    found = [(Model(config_in(job.model), rank=trainer.lora.rank), True)]
    if trainer.objective.kl.coefficient and not trainer.lora.rank:  # else the model without its adapters
        found.append((Model(config_in(job.model)), False))
    if trainer.critic.model is not None:
        found.append((Model(config_in(trainer.critic.model), "value"), True))
    if trainer.teacher.model is not None:
        found.append((Model(config_in(trainer.teacher.model)), False))
    return found


def trainer_bytes(job: JobConfig) -> tuple[float, float, float]:
    """Bytes of a rank: its parameters, its peak, and the peak with what stays free."""
    trainer = job.trainer
    ranks = trainer.ranks // (trainer.parallel.data or 1)
    recompute = trainer.backend_args.get("recompute", "none")
    tokens = max(trainer.micro_batch_tokens, job.rollout.max_model_len if job.kind == "rl" else 0)
    parameters = state = most = 0.0
    for model, trained in models(job):
        numbers = model.shard(ranks)
        tower = (FULL if trained else HALF) * model.tower_shard(
            ranks
        )  # frozen, in fp32 beside what is trained
        parameters += (FULL if trained else HALF) * numbers + tower
        learned = model.layers * model.adapters / ranks
        parameters += FULL * learned
        state += (FULL if model.rank else 16 if trained else HALF) * numbers + 16 * learned + tower
        one = trained_step(model, ranks, recompute, tokens) if trained else frozen_pass(model, ranks, tokens)
        most = max(most, one)
    peak = state + most
    return parameters, peak, peak / 0.95 + 1.5 * GIB


def flag(flags: dict[str, Any], name: str, default: float) -> float:
    given = str(flags.get(name, default))
    return float(given.removesuffix("G")) * (GIB if given.endswith("G") else 1)


def server(job: JobConfig, section: str, free: float) -> dict[str, float]:
    """A server of the job on one of its GPUs, of which `free` bytes are free when it starts."""
    rollout = job.rollout
    evaluated = section == "evaluation"
    own = job.evaluation.server.arguments if evaluated else None
    flags = dict(own or rollout.server.arguments)
    gpus = int(str(flags.get("tp-size", flags.get("tensor-parallel-size", 1))))
    slots = job.evaluation.max_concurrent if evaluated else rollout.max_concurrent
    model = Model(config_in(job.model))
    divided = {name for name, shape in model.block.items() if len(shape) > 1}
    weights = sum(
        HALF * prod(shape) / (gpus if name in divided else 1) for name, shape in model.block.items()
    ) * model.layers + sum(
        HALF * prod(shape) / (gpus if len(shape) > 1 else 1)
        for shape in (*model.root.values(), *model.tower.values())
    )
    token = 2 * model.layers * max(1, model.kv // gpus) * model.d * HALF
    activations = PREFILL * HALF * (4 * model.h + 3 * model.m / gpus)
    activations += slots * model.vocabulary * (HALF + 3 * FULL)
    context = GIB
    if rollout.engine == "sglang":
        decode = min(slots, 256)
        graphs = decode * 2 * MIB + 58 * 8 * MIB
        reserve = (512 + 1.5 * PREFILL + 128 * gpus) * MIB + graphs
        default = round(1 - max(10 * GIB, reserve) / H100, 3)
        if model.tower:  # SGLang takes 24 layers for all of these towers
            ratio = (model.tower["patches"][0] / 1024) ** 2
            default *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (ratio - 1)))
        static = flag(flags, "mem-fraction-static", default) * (free - context)
        kv = min(static - weights, flag(flags, "max-total-tokens", 1e12) * token)
    else:
        largest = min(2 * slots, 512)
        sizes = {1, 2, 4} | {n for n in range(8, largest + 1) if n % (8 if n < 256 else 16) == 0}
        graphs = 2 * len(sizes) * 8 * MIB
        everything = flag(flags, "gpu-memory-utilization", 0.92) * H100
        kv = flag(flags, "kv-cache-memory-bytes", everything - weights - activations - graphs)
    total = weights + kv + graphs + activations + context
    return {"total": total, "kv_tokens": kv / token, "graphs": graphs}


def reward_model_bytes(job: JobConfig) -> float:
    """Weights in bfloat16, a batch of 16,384 tokens, and a CUDA context."""
    model = Model(config_in(job.reward.args["model"]), "value")
    batch = 16_384 * HALF * (4 * model.h + 3 * model.m)
    return HALF * model.size + batch + GIB


def counted(job: JobConfig, gpus: int) -> dict[str, Any]:
    """The job's trainer, servers, and the bytes in use on each kind of GPU. `gpus` is 1, or so many that
    nothing is shared."""
    parameters, peak, held = trainer_bytes(job)
    turns = job.placement.share == "time"
    found: dict[str, Any] = {"trainer_peak": peak, "used": {"trainer": held}}
    if job.kind != "rl":
        return found
    rewarded = reward_model_bytes(job) if job.reward.name == "reward_model" else 0.0
    if turns:  # one engine, also for evaluations; each side leaves when it is the other one's turn
        context = GIB
        found["rollout"] = one = server(job, "rollout", H100 - context - rewarded)
        trains = held + one["graphs"] + context
        found["used"]["trainer"] = rewarded + max(trains, context + one["total"])
        return found
    free = H100 - (parameters + 1.5 * GIB + rewarded if gpus == 1 else 0)
    for section in ("rollout", "evaluation"):
        found[section] = server(job, section, free)
        if gpus == 1:
            free -= found[section]["total"]
            found["used"]["trainer"] += found[section]["total"]
        else:
            found["used"][section] = found[section]["total"]
    if rewarded and gpus == 1:
        found["used"]["trainer"] += rewarded
    elif rewarded:
        found["used"]["reward"] = rewarded
    return found


def main() -> None:
    import recipe_plans

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("jobs", nargs="*", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for path in options.jobs or recipe_plans.files():
            job = recipe_plans.loaded(path, Path(scratch))
            print(path.parent.name, path.name, json.dumps(counted(job, recipe_plans.gpus_named(path))))


if __name__ == "__main__":
    main()
