"""Checks and plans of the recipes' job files for 1, 8 and 64 GPUs, without running them.

    python benchmarks/recipe_plans.py [--only dpo,…] [--out benchmarks/results/recipe_plans.json]

Each job file is validated, with folders that hold a `config.json` alone in the place of the hub's models.
`peak_gib` is what `areal-async plan` says that a rank of the trainer needs at most, of `fits_gib` that an
H100 has for it beside the other processes on the same GPU. `used` has the GiB of each kind of GPU that are in
use at most, and `servers` the tokens of KV of each server and the requests of full length that run at once:
by the plan, and by a second count (`plan_count.py`). `ratio` is the largest of the plan's figures to those of
the count, or the inverse. `least_kv_tokens` is for a server that starts again beside all others.
Jobs whose engines have GPUs of their own are simulated as by `areal-async simulate`, with costs that follow
from the models' dimensions and were not measured: training and prompts at 40 % of 989 TFLOP/s; decoding at
60 % of 3.35 TB/s, with the weights and the running requests' keys and values read in every pass; answers of
the mean length in `ANSWERS`, lognormal, scored in the seconds that stand there. The vision tower computes
each image once in an engine and for each episode in the trainer, where it is frozen. What an episode says in
several turns counts as one answer. `trainer_idle` and `engines_idle` say how the split of the GPUs balances.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from plan_count import counted

from areal_async.base.yaml_file import read_mapping
from areal_async.config.devices import width_of
from areal_async.config.job import JobConfig
from areal_async.config.load import load_job
from replay_buffer.simulation.costs import (
    Costs,
    EngineCosts,
    PublicationCosts,
    RewardCosts,
    Spread,
    TrainerCosts,
)
from replay_buffer.simulation.world import simulated
from trainer_service.backends.base import CRITIC, TRAINED_MODEL, models_of
from trainer_service.data.flops import PASSES, load_row_cost
from trainer_service.tools.gpus import gpu_named
from trainer_service.tools.plan import figures, job_memory

RECIPES = Path(__file__).parents[1] / "recipes"
GIB = 1 << 30
FLOPS, BYTES = 0.4 * 989e12, 0.6 * 3.35e12  # A second, of one GPU
ANSWERS = {  # (mean tokens of a prompt, of an answer, seconds to score one)
    "gsm8k-grpo": (120, 300, 0.001),
    "dapo-maths": (180, 5000, 0.02),
    "code-sandbox": (600, 3000, 3.0),
    "tool-use": (400, 600, 0.02),
    "multi-turn-agent": (700, 500, 0.001),
    "rm-ppo": (200, 400, 0.03),
    "distillation": (180, 2000, 0.02),
    "geo3k": (420, 700, 0.02),
    "geo3k/long": (1600, 9000, 0.02),
    "referring-expressions": (370, 30, 0.001),
}
IMAGE_TOKENS = {"geo3k": 300, "geo3k/long": 1200, "referring-expressions": 300}
"""Mean tokens of the images of a prompt, of all its tokens in `ANSWERS`."""
STEPS = 20

Dimensions = tuple[int, int, int, int, int, int]
"""Hidden size, that of the MLP, layers, heads, heads of keys and values, vocabulary."""
QWEN2_5: dict[str, Dimensions] = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
}
QWEN3: dict[str, Dimensions] = {
    "0.6B": (1024, 3072, 28, 16, 8, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 151_936),
    "8B": (4096, 12_288, 36, 32, 8, 151_936),
    "32B": (5120, 25_600, 64, 64, 8, 151_936),
}
TIED = ("0.5B", "0.6B", "1.5B", "1.7B", "2B", "3B")


def config_of(name: str) -> dict[str, Any]:
    """What the `config.json` of a hub's model says of its shapes; empty for a name that no recipe has."""
    family, _, rest = name.removeprefix("Qwen/").partition("-")
    size = rest.removeprefix("Coder-").removeprefix("VL-").partition("-")[0]
    known = {"Qwen2.5": QWEN2_5, "Qwen3": QWEN3 | {"2B": QWEN3["1.7B"]}}.get(family, {})
    if not name.startswith("Qwen/") or size not in known:
        return {}
    kind = "Qwen2" if family == "Qwen2.5" else "Qwen3"
    if not rest.startswith("VL-"):
        return {"architectures": [f"{kind}ForCausalLM"], **language_config(kind, size, known[size])}
    kind = "Qwen2_5_VL" if kind == "Qwen2" else "Qwen3VL"
    text = language_config(kind, size, known[size])
    section = [16, 24, 24] if kind == "Qwen2_5_VL" else [24, 20, 20]
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": size in TIED,
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "text_config": text | {"rope_scaling": {"rope_type": "default", "mrope_section": section}},
        "vision_config": tower_config(kind, size, text["hidden_size"]),
    }


def tower_config(kind: str, size: str, hidden: int) -> dict[str, Any]:
    """Dimensions of the vision tower of Qwen2.5-VL or Qwen3-VL, whose language model has this size."""
    both = {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16, "out_hidden_size": hidden}
    if kind == "Qwen2_5_VL":
        own = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456 if size == "32B" else 3420}
        return both | own | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
    small = size in ("2B", "4B")
    own = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
    own = own if small else {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
    deep = [5, 11, 17] if small else [8, 16, 24]
    return both | own | {"patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": deep}


def language_config(kind: str, size: str, dimensions: Dimensions) -> dict[str, Any]:
    """Dimensions of a language model, as its `config.json` has them."""
    hidden, mlp, layers, heads, kv_heads, vocabulary = dimensions
    known = {"Qwen2_5_VL": "qwen2_5_vl_text", "Qwen3VL": "qwen3_vl_text"}
    return {
        "model_type": known.get(kind, kind.lower()),
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": size in TIED,
    } | ({"head_dim": 128} if kind.startswith("Qwen3") else {})


def loaded(path: Path, models: Path) -> JobConfig:
    """The job of a file for GPUs, validated, its models in folders of `models` with a config.json alone.
    Raises `ConfigError`."""
    made: dict[str, str] = {
        str(read_mapping(other)["job"]): str(read_mapping(other)["model"])
        for other in path.parent.glob("reward_model_*.yaml")
    }

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: local(inner) for key, inner in value.items()}
        if not isinstance(value, str):
            return value
        name = made.get(Path(value).parent.name, value) if value.endswith("/model") else value
        if not (config := config_of(name)):
            return value
        folder = models / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    content = local(read_mapping(path))
    return load_job(content, source=str(path), base=path.parent, files=False)


def files() -> list[Path]:
    """The job files for GPUs, by recipe."""
    return sorted(RECIPES.glob("*/*_gpu*.yaml"))


def gpus_named(path: Path) -> int:
    """GPUs in the name of a job file."""
    found = re.search(r"(\d+)_gpus?$", path.stem)
    assert found is not None, path
    return int(found[1])


def compared(job: JobConfig, found: dict[str, Any], named: int) -> dict[str, Any]:
    """The plan's figures of GPUs and servers beside those of the second count."""
    second = counted(job, named)
    used: dict[str, list[float]] = {}
    servers: dict[str, dict[str, Any]] = {}
    ratios = [found["peak_bytes"] / second["trainer_peak"]]
    for device in found["devices"]:
        sections = [engine["section"] for engine in device["engines"]]
        kind = "trainer" if device["trainer"] else sections[0] if sections else "reward"
        by_plan, by_count = device["used_bytes"], second["used"][kind]
        used[kind] = [round(by_plan / GIB, 1), round(by_count / GIB, 1)]
        ratios.append(by_plan / by_count)
        for engine in device["engines"]:
            own = second[engine["section"]]
            ratios += [engine["kv_tokens"] / own["kv_tokens"], engine["total_bytes"] / own["total"]]
            servers[engine["section"]] = {
                "kv_tokens": [engine["kv_tokens"], round(own["kv_tokens"])],
                "least_kv_tokens": engine["least_kv_tokens"],
                "longest_at_once": f"{engine['longest_requests_at_once']} of {engine['slots']}",
            }
    ratio = max(max(each, 1 / each) for each in ratios)
    return {
        "peak_gib": [round(found["peak_bytes"] / GIB, 1), round(second["trainer_peak"] / GIB, 1)],
        "used": used,
        "servers": servers,
        "ratio": round(ratio, 3),
    }


def costs_of(job: JobConfig, recipe: str, parameters: dict[str, int]) -> Costs:
    """By arithmetic, from the models' sizes. `parameters` has them by the trainer's names."""
    prompt, answer, scoring_s = ANSWERS[recipe]
    whole = json.loads((job.model / "config.json").read_text())
    config, seen = whole.get("text_config", whole), IMAGE_TOKENS.get(recipe, 0)
    tower_s = load_row_cost(job.model).vision * PASSES / FLOPS  # of a token of an image, forward
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head  # bytes of a token
    width, policy = width_of(job.rollout), parameters[TRAINED_MODEL]
    engine = EngineCosts(
        pass_s=2 * policy / BYTES / width,
        request_s=(kv * (prompt + answer / 2) / BYTES + 2 * policy / FLOPS) / width,
        prompt_token_s=(2 * policy / FLOPS + tower_s * seen / prompt) / width,
    )
    trained = 8 if job.trainer.backend_args.get("recompute") else 6
    work = trained * policy + (2 * policy if job.trainer.minibatches > 1 else 0)
    for name, size in parameters.items():
        work += (trained if name == CRITIC else 2) * size * (name != TRAINED_MODEL)
    return Costs(
        prompt_tokens=Spread(mean=prompt),
        answer_tokens=Spread(mean=answer, sigma=0.8, most=job.rollout.sampling.max_new_tokens),
        engine=engine,
        trainer=TrainerCosts(token_s=work / FLOPS + tower_s * seen / (prompt + answer), ranks=1),
        reward=RewardCosts(episode_s=Spread(mean=scoring_s, sigma=1.0)),
        publication=PublicationCosts(publish_s=1, publication_s=2 * policy / 2e9, fetch_s=3, pause_s=1),
    )


def planned(path: Path, models: Path, *, simulate: bool = True) -> dict[str, Any]:
    """The figures of one job file. Raises `ConfigError` for one that is not valid."""
    job = loaded(path, models)
    shapes, rank = job_memory(job, str(path))
    shape = shapes[TRAINED_MODEL]
    gpu = gpu_named("H100")
    assert gpu is not None
    found = figures(job, shape, rank, gpu)
    named = gpus_named(path)
    row: dict[str, Any] = {
        "gpus": sum(len(device["gpus"]) for device in found["devices"]),
        "ranks": job.trainer.ranks,
        **compared(job, found, named),
        "fits_gib": round(found["gpu"]["usable_bytes"] / GIB, 1),
        "fits": found["gpu"]["fits"] and all(each["remaining_bytes"] > 0 for each in found["devices"]),
        "mistakes": found["mistakes"],
        "host_gib": round(sum(found["host_bytes"].values()) / GIB, 1),
    }
    if job.kind == "rl" and job.trainer.ranks > 1 and simulate:
        sizes = {
            name: job_memory(job.model_copy(update={"model": use.folder}))[0][TRAINED_MODEL].size
            for name, use in models_of(job).items()
        }
        kind = f"{path.parent.name}/long" if path.stem.startswith("long") else path.parent.name
        told = simulated(job, costs_of(job, kind, sizes), steps=STEPS)
        row |= {
            "step_s": round(told.step_s, 1),
            "tokens_per_s": round(told.tokens_per_s),
            "trainer_idle": round(told.trainer_idle, 3),
            "engines_idle": round(told.rollout_idle, 3),
            "staleness_mean": round(told.staleness_mean, 2),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in files():
            name = f"{path.parent.name}/{path.name}"
            if options.only and path.parent.name not in options.only.split(","):
                continue
            rows[name] = planned(path, Path(scratch))
            print(name, json.dumps(rows[name]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
