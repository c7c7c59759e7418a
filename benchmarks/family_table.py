"""Table of model families: which parts of the system compute each of them right, and which refuse it.

A family is a tiny model with random weights, in fp32. The reference is always transformers' own eager forward
pass, row by row, without a cache. A cell is the largest difference from it, of a log-prob in nats or of a
tenth of a parameter's gradient relative to its norm, or the sentence with which the part refuses the model.

| column | measured |
|---|---|
| packed | log-probs and gradients of packed rows, by the back end `fsdp` |
| prefixes | the same for rows that share prefixes |
| ranks | the same on two ranks |
| lora | the same for adapters, whose gradients follow from those of the base, and the merged weights |
| recompute | the same with `recompute: full` |
| local, sglang, vllm | log-probs of answers that the engine samples from the weights of one update |
| megatron | log-probs of packed rows, by the back end `megatron` |

Before the engines, the published weights are loaded by transformers, which must neither lack nor ignore one.
Cells of sglang and vllm are measured only if `--columns` names them, because each starts a server.

    python benchmarks/family_table.py [--columns packed,local,vllm] [NAME …]

writes `results/family_table.json` and the table of `docs/models.md`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import transformers
from families import PAGE
from family_configs import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from areal_async.base.errors import ArealError, first_line
from areal_async.base.versions import VersionTag
from areal_async.config.engines import find_engine_python
from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.models.classes import auto_class
from areal_async.models.files import placeholder_ids
from areal_async.service.rank_group import Meeting
from areal_async.trajectory import Sampling
from areal_async.weights.adapter import BaseWeights
from areal_async.weights.snapshot import open_snapshot
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult, RequestError
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.process import cause_of
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.model import LocalModel
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.engines.vllm.adapter import VllmAdapter
from tests.megatron_cpu import install
from tests.snapshots import write_snapshot
from tests.unit.trainer.sharded_process import forked
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import build_micro_batch
from trainer_service.data.prefixes import RowCost, plant
from trainer_service.data.rows import TrainingRow, row_of
from trainer_service.errors import ModelError
from trainer_service.ranks import Ranks, join_ranks

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results" / "family_table.json"
BOUND = 1e-4
TRAINED = ("packed", "prefixes", "ranks", "lora", "recompute")
SERVERS = ("sglang", "vllm")
COLUMNS = (*TRAINED, "local", "megatron")

NAMES = (
    "bamba",
    "cohere2",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "jamba",
    "lfm2",
    "llama",
    "llama4_text",
    "minimax_m2",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron_h",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "smollm3",
)
"""Families of the table, as `model_type`."""


def reference_of(folder: Path) -> Any:
    """Return transformers' model of the weights in a folder, with eager attention. Raises `AssertionError` if
    the folder lacks a weight, or has one that the model does not use."""
    kind = auto_class(AutoConfig.from_pretrained(folder))
    model, found = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {what: sorted(found[what]) for what in ("missing_keys", "unexpected_keys") if found[what]}
    assert not wrong, f"the published weights do not fit: {wrong}"
    return model.eval()


def rows_of(shared: bool) -> list[TrainingRow]:
    """Return rows of seven lengths, or three groups of rows with common prefixes."""
    random = np.random.default_rng(4)
    lengths = (17, 5, 23, 2, 17, 9, 31)
    drawn = [random.integers(3, 90, length).astype(np.int32) for length in lengths]
    if shared:
        drawn = [np.concatenate([prompt, drawn[n][: 4 + n]]) for prompt in drawn[4:] for n in (0, 2, 6)]
    made = []
    for episode, ids in enumerate(drawn):
        mask = (np.arange(len(ids)) >= max(1, len(ids) // 3)).astype(np.uint8)
        zeros = np.zeros(len(ids), np.int32)
        row = row_of(episode, ids, mask, zeros.astype(np.float32), zeros)
        assert row is not None
        made.append(row)
    if not shared:
        return made
    trees = plant(made, np.arange(len(made)) // 3, 1 << 20, RowCost(1, 0, 0))
    return [row for tree in trees for row in tree.rows]


class Computed(NamedTuple):
    """Log-probs of units by episode, and gradients of parameters by name."""

    logps: dict[int, Tensor]
    gradients: dict[str, Tensor]


def weight_of(row: TrainingRow) -> Tensor:
    """Return f32 [S]: the factor of each unit's log-prob in the loss, unlike for all units of all rows."""
    return torch.cos(torch.arange(1.0, len(row.position) + 1) * (1 + row.episode))


def sampled_from(model: Any, ids: Tensor) -> Tensor:
    """Return f64 [T, V]: log-probs of the token after each of T tokens. No engine samples a placeholder."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    known = [token for token in placeholder_ids(model.config.to_dict()) if token < logits.shape[1]]
    never = torch.tensor(known, dtype=torch.long)
    return logits.index_fill(1, never, -torch.inf).log_softmax(-1)


def own(model: Any, rows: Sequence[TrainingRow]) -> Computed:
    """Return what transformers' own forward pass gives, row by row."""
    model.zero_grad()
    logps = {}
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()
        at = torch.from_numpy(row.position)
        found = sampled_from(model, ids[:-1])[at - 1].gather(1, ids[at][:, None])[:, 0].float()
        (found * weight_of(row)).sum().backward()
        logps[row.episode] = found.detach()
    given = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Computed(logps, given)


def by_backend(backend: Any, rows: Sequence[TrainingRow]) -> Computed:
    """Return what a back end gives for this rank's rows. Gradients are those of all ranks."""
    batch = build_micro_batch(rows)
    sizes = [len(row.position) for row in rows]
    (logps,) = backend.evaluate("policy", [batch], lambda _, columns: columns["logp"].detach().clone())
    factors = torch.cat([weight_of(row) for row in rows])
    backend.train("policy", [batch], lambda _, columns: (columns["logp"] * factors).sum())
    split = dict(zip((row.episode for row in rows), logps.split(sizes), strict=True))
    found = {}
    for name, parameter in backend._models["policy"].module.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return Computed(split, found)


def gap(found: Computed, wanted: Computed) -> float:
    """Return the largest difference of a log-prob, or a tenth of the largest difference of a parameter's
    gradient, relative to its norm or to a thousandth of the largest norm. Parameters without a gradient count
    as having 0."""
    most = max(float((found.logps[e] - wanted.logps[e]).abs().max()) for e in found.logps)
    norms = {name: float(grad.norm()) for name, grad in wanted.gradients.items()}
    least = max(norms.values()) / 1000
    for name, grad in wanted.gradients.items():
        mine = found.gradients.get(name)
        if mine is None:
            assert not norms[name], f"{name} has no gradient"
            continue
        most = max(most, 0.1 * float((mine - grad).norm()) / max(norms[name], least))
    return most


def backend_of(folder: Path, ranks: Ranks | None = None, **options: Any) -> FsdpBackend:
    use = {"policy": ModelUse(folder, OptimizerSection(lr=1e-3), 100)}
    return FsdpBackend(use, ranks or join_ranks(0, 1), dtype=torch.float32, **options)


SIDE = "refused: its rows are computed side by side, because it carries a state from token to token"


class Family:
    """The cells of one family, whose files are in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        write_model(name, folder / "model")
        self.model = reference_of(folder / "model")
        self.rows = {shared: rows_of(shared) for shared in (False, True)}
        self.wanted = {shared: own(self.model, self.rows[shared]) for shared in (False, True)}

    def packed(self) -> float:
        return gap(by_backend(backend_of(self.folder / "model"), self.rows[False]), self.wanted[False])

    def prefixes(self) -> float | str:
        backend = backend_of(self.folder / "model")
        if backend.side_by_side:
            return SIDE
        return gap(by_backend(backend, self.rows[True]), self.wanted[True])

    def recompute(self) -> float:
        backend = backend_of(self.folder / "model", recompute="full")
        return gap(by_backend(backend, self.rows[False]), self.wanted[False])

    def ranks(self) -> float:
        """Two processes, of which each has half of the rows."""
        self._by_process("--ranks")
        most = 0.0
        for rank in (0, 1):
            saved = load_file(self.folder / f"rank{rank}.safetensors")
            logps = {int(name): value for name, value in saved.items() if name.isdecimal()}
            most = max(most, gap(Computed(logps, saved), self.wanted[False]))
        return most

    def lora(self) -> float:
        """Since B is 0 at the start, the gradient of B is alpha / r · G · Aᵀ with the base's gradient G."""
        section = LoraSection(rank=4, alpha=8)
        backend = backend_of(self.folder / "model", lora=section)
        found, base = by_backend(backend, self.rows[False]), self.wanted[False]
        module = backend._models["policy"].module
        wanted = {}
        for name, _ in module.named_parameters():
            if ".lora_B." in name:
                a: Any = module.get_parameter(name.replace(".lora_B.", ".lora_A."))
                owner = name.partition(".lora_B.")[0]
                gradient = base.gradients.get(f"{owner}.weight")
                if gradient is not None:
                    wanted[name] = section.alpha / section.rank * gradient @ a.detach().full_tensor().T
        assert wanted, "no layer has an adapter"
        most = gap(found, Computed(base.logps, wanted))
        backend.gradient_norm()
        backend.optimizer_step()
        return max(most, self._merged(backend, section))

    def _merged(self, backend: FsdpBackend, section: LoraSection) -> float:
        """Return the difference of the log-probs after an update from those of the merged weights."""
        adapter = {piece.name: piece.tensor.clone() for piece in backend.export("policy", gather=True)}
        folder, base = self.folder / "merged", BaseWeights(self.folder / "model", torch.float32)
        shutil.copytree(self.folder / "model", folder)
        save_file(dict(base.merged(adapter, section.alpha / section.rank)), folder / "model.safetensors")
        rows = self.rows[False]
        wanted, found = own(reference_of(folder), rows).logps, by_backend(backend, rows).logps
        before = self.wanted[False].logps
        assert max(float((wanted[e] - before[e]).abs().max()) for e in wanted) > 10 * BOUND
        return max(float((found[e] - wanted[e]).abs().max()) for e in wanted)

    def megatron(self) -> float:
        """Measure in another process, because Megatron-Core on a CPU needs replacements for calls of CUDA."""
        self._by_process("--megatron")
        return float((self.folder / "megatron.json").read_text())

    def _by_process(self, mode: str) -> None:
        words = [sys.executable, __file__, mode, str(self.folder)]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        if ran.returncode:
            said = [line for line in ran.stderr.splitlines() if re.match(r"[\w.]+: ", line)][-1]
            kind, _, sentence = said.partition(": ")
            raise (ModelError if kind.endswith(("ModelError", "UnfitModel")) else RuntimeError)(sentence)

    def publish(self) -> None:
        """Train one update and publish the weights as `snapshot`."""
        backend = backend_of(self.folder / "model")
        by_backend(backend, self.rows[False])
        backend.gradient_norm()
        backend.optimizer_step()
        tensors = {piece.name: piece.tensor.clone() for piece in backend.export("policy", gather=True)}
        files = {path.name: path for path in (self.folder / "model").glob("*.json")}
        made = write_snapshot(
            self.folder / "snapshots", VersionTag("policy", 0, 1), tensors, files=files, tied=backend.tied
        )
        self.snapshot = open_snapshot(made.path)
        trained, rows = reference_of(made.path), self.rows[False]
        found = by_backend(backend, rows).logps
        wanted = own(trained, rows).logps
        most = max(float((found[row.episode] - wanted[row.episode]).abs().max()) for row in rows)
        assert most < BOUND, f"the published weights give log-probs that differ by {most:.2g}"
        moved = max(
            float((wanted[row.episode] - self.wanted[False].logps[row.episode]).abs().max()) for row in rows
        )
        assert moved > 10 * BOUND, "the update changed nothing"
        self.trained = trained

    def local(self) -> float:
        local = LocalModel(self.folder / "model", dtype="float32")
        core = EngineCore(local, slots=4, max_model_len=96)
        local.check()
        core.swap(self.snapshot)
        core.rebuild()
        asked, done = requests(), dict[str, Any]()
        for request in asked:
            core.submit(request)
        with torch.inference_mode():
            while not core.idle:
                done |= {item.request_id: item.outcome for item in core.step()}
        return self._answers(asked, [done[request.request_id] for request in asked])

    def server(self, kind: str) -> float:
        """Return the difference of a server of `kind`. Its log is in the folder."""
        settings = ServerSettings(
            log_path=self.folder / f"{kind}.log",
            slots=8,
            max_model_len=96,
            python=find_engine_python(kind),
            ready_s=240,
        )
        adapter = (
            SGLangAdapter(self.folder / "model", settings)
            if kind == "sglang"
            else VllmAdapter(self.folder / "model", settings, scratch=self.folder / "scratch")
        )
        engine = HttpEngine(adapter)

        async def answers() -> list[GenerateResult]:
            try:
                await engine.start(self.snapshot)
                return await asyncio.gather(*map(engine.generate, requests()))
            finally:
                await engine.stop()

        try:
            return self._answers(requests(), asyncio.run(answers()))
        except EngineError as error:
            if not (cause := cause_of(settings.log_path.read_text().splitlines())) or cause in str(error):
                raise
            raise EngineError(f"{str(error).rstrip('.')}. Its error is {cause}") from error

    @torch.no_grad()
    def _answers(self, asked: Sequence[GenerateRequest], given: Sequence[Any]) -> float:
        most = 0.0
        for request, result in zip(asked, given, strict=True):
            if isinstance(result, EngineError):
                raise result
            ids = torch.tensor([*request.prompt_ids, *result.token_ids.tolist()])
            rows = sampled_from(self.trained, ids[:-1])[len(request.prompt_ids) - 1 :]
            wanted = rows.gather(1, torch.from_numpy(result.token_ids).long()[:, None])[:, 0]
            most = max(most, float((torch.from_numpy(result.logprobs) - wanted).abs().max()))
        return most


def requests() -> list[GenerateRequest]:
    """Return prompts of four lengths, the last longer than a window of 8."""
    random = np.random.default_rng(11)
    sampling = partial(Sampling, max_new_tokens=24)
    return [
        GenerateRequest(str(n), random.integers(3, 90, length, np.int32), sampling(seed=n))
        for n, length in enumerate((1, 5, 9, 20))
    ]


def run_rank(folder: Path, rank: int, meeting: Meeting) -> None:
    """Run one of two ranks, and write what it computed."""
    ranks = join_ranks(rank, 2, meeting=meeting)
    found = by_backend(backend_of(folder / "model", ranks), rows_of(False)[rank::2])
    logps = {str(episode): logp for episode, logp in found.logps.items()}
    save_file(logps | found.gradients, folder / f"rank{rank}.safetensors")


def run_megatron(folder: Path) -> None:
    """Write the difference of the back end `megatron`."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    install()
    from trainer_service.backends.megatron.backend import MegatronBackend

    rows, model = rows_of(False), reference_of(folder / "model")
    use = {"policy": ModelUse(folder / "model", OptimizerSection(lr=1e-3), 100)}
    backend = MegatronBackend(use, join_ranks(0, 1), dtype=torch.float32, grid=RankGrid())
    (found,) = backend.evaluate("policy", [build_micro_batch(rows)], lambda _, each: each["logp"].clone())
    wanted = own(model, rows).logps
    difference = float((found - torch.cat([wanted[row.episode] for row in rows])).abs().max())
    (folder / "megatron.json").write_text(json.dumps(difference))


def measured(work: Callable[[], T], folder: Path, name: str) -> T | str:
    """Return what `work` returns, or a sentence for an error of ours. Other errors are "fails: …"."""
    try:
        return work()
    except (ModelError, EngineError, RequestError, ArealError) as error:
        said = f"refused: {_sentence(error)}"
    except Exception as error:  # of code that is not ours
        said = f"fails: {type(error).__name__}: {_sentence(error)}"
    said = re.sub(r" at http://[\d.:]+", "", said.replace(str(folder), "FOLDER"))
    return re.sub(rf"\b{name}\b", "TYPE", said)


def _sentence(error: Exception) -> str:
    """Return the first line of an error, without the place of a log."""
    said, mark, cause = first_line(error).partition(" The end of ")[0].partition("Its error is ")
    return f"{said}{mark}{cause.partition('. ')[0]}".removesuffix(".")[:400]


def cells(name: str, columns: Sequence[str]) -> dict[str, float | str]:
    """Return these cells of one family."""
    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        family = Family(name, Path(scratch))
        tried = partial(measured, folder=Path(scratch), name=name)
        for column in (*TRAINED, "megatron"):
            if column in columns:
                found[column] = tried(getattr(family, column))
        engines = [column for column in ("local", *SERVERS) if column in columns]
        if not engines:
            return found
        problem = tried(family.publish)
        for column in engines:
            served = family.local if column == "local" else partial(family.server, column)
            found[column] = tried(served) if problem is None else problem
    return found


BEGIN, END = "<!-- family table: begin -->", "<!-- family table: end -->"
TITLES = {"ranks": "two ranks", "lora": "LoRA", "sglang": "SGLang", "vllm": "vLLM", "megatron": "Megatron"}
RIGHT = "right"


def table(found: dict[str, dict[str, float | str]]) -> str:
    """Return the table of the page, and the sentences of its refusals. It has the columns of all rows."""
    sentences: dict[str, int] = {}
    columns = [column for column in (*COLUMNS, *SERVERS) if all(column in row for row in found.values())]
    lines = [
        "| `model_type` | " + " | ".join(TITLES.get(column, column) for column in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name, row in sorted(found.items()):
        shown = []
        for column in columns:
            cell = row[column]
            if isinstance(cell, float):
                shown.append(f"{cell:.0e}".replace("e-0", "e-") if cell > BOUND else RIGHT)
            else:
                sentence = re.sub(r"\b\w+For(CausalLM|ConditionalGeneration)\b", "CLASS", cell)
                sentence = re.sub(r"differ by [\d.]+", "differ by NUMBER", sentence)
                number = sentences.setdefault(sentence, len(sentences) + 1)
                shown.append(f"({number})")
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
    told = [f"{number}. {sentence}" for sentence, number in sentences.items()]
    return "\n".join([*lines, "", *told])


def write_page(found: dict[str, dict[str, float | str]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")


def results() -> dict[str, dict[str, float | str]]:
    """Return the result file: name of a family -> column -> largest difference, or a sentence."""
    return json.loads(RESULTS.read_text())["families"] if RESULTS.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="families to measure; without any, all")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="columns to measure, joined by commas")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the page alone")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--megatron", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if chosen.ranks is not None:
        sys.exit(forked(2, partial(run_rank, chosen.ranks)))
    if chosen.megatron is not None:
        run_megatron(chosen.megatron)
        return
    found = results()
    for name in [] if chosen.table else chosen.names or NAMES:
        found[name] = found.get(name, {}) | cells(name, chosen.columns.split(","))
        print(name, json.dumps(found[name]), flush=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__, "bound": BOUND}
        RESULTS.write_text(json.dumps(versions | {"families": dict(sorted(found.items()))}, indent=1) + "\n")
    if all(column in row for row in found.values() for column in COLUMNS):
        write_page(found)


if __name__ == "__main__":
    main()
