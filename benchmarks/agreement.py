"""What `parity.py` and `versions.py` share: a tiny model that is sure of itself, snapshots of it that differ,
jobs that name an engine, and a plain forward pass to hold them against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import make_tokenizer
from areal_async.config.job import JobConfig
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import Snapshot, open_snapshot
from rollout_service.engines.base import GenerateResult
from tests.snapshots import write_snapshot
from trainer_service.durable_files import companion_files

SHARPNESS = 4.0
"""Factor on the last norm of a fresh model: its logits then spread over some nats, so that greedy decoding
has clear choices and log-probs far from uniform show an error."""


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Alias -> name for parameters that occur more than once."""
    names: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    return aliases


def write_sharp_model(
    folder: Path, *, positions: int = 2048, endless: bool = False, experts: int = 0, seed: int = 0
) -> Path:
    """A Qwen2 model of 0.6 M parameters with the quickstart's tokenizer, or a Qwen3 mixture of so many
    experts; `endless` has no end of sequence, so that every answer is as long as was asked for."""
    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {}
    if experts:
        sizes = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        }
    made: type[PretrainedConfig] = Qwen3MoeConfig if experts else Qwen2Config
    config = made(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=not experts,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None if endless else tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
    if endless:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Snapshots:
    """Snapshots of the model in `model`, on disk under `root`; version 0 is the model itself."""

    model: Path
    root: Path
    noise: float = 0.03
    """Standard deviation of what tells a version from the model, as a share of each tensor's own."""

    def write(self, tag: VersionTag) -> Snapshot:
        """A verified snapshot; different weights for each version above 0."""
        generator = torch.Generator().manual_seed(tag.version)
        tensors = {}
        for name, tensor in self._tensors.items():
            scale = 0.0 if tag.version == 0 else self.noise * float(tensor.std(correction=0))
            tensors[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
        files = companion_files(self.model, "float32")
        return open_snapshot(write_snapshot(self.root, tag, tensors, files=files, tied=self._tied).path)

    @cached_property
    def _source(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._source.named_parameters()}

    @cached_property
    def _tied(self) -> dict[str, str]:
        return tied_names(self._source)

    def path(self, tag: VersionTag) -> Path:
        return self.root / tag.label


class Reference:
    """A plain full forward pass of transformers with one snapshot's weights, fp32 on a CPU."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, prompt: Sequence[int], answer: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """f64 [len(answer), V]: what each unit of the answer was to be drawn from, before any temperature."""
        ids = torch.tensor([[*map(int, prompt), *map(int, answer)]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0].double().numpy()
        found: npt.NDArray[np.float64] = logits[len(prompt) - 1 : -1]
        return found


def logprobs(
    logits_TV: npt.NDArray[np.float64], result: GenerateResult, sampling: Sampling
) -> npt.NDArray[np.float64]:
    """f64 [T]: log-probs of the result's ids as the result states them (no top-p, no top-k)."""
    if result.logprobs_of != "raw" and sampling.temperature > 0:
        logits_TV = logits_TV / sampling.temperature
    shifted = logits_TV - logits_TV.max(-1, keepdims=True)
    every = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    chosen: npt.NDArray[np.float64] = every[np.arange(len(every)), result.token_ids]
    return chosen


def job_for(
    engine: str, model: Path, *, max_model_len: int, mode: str = "recompute", url: str | None = None
) -> JobConfig:
    """A job with this engine in float32, or with a server of it that runs at `url`; nothing else of the job
    is used."""
    return JobConfig.model_validate(
        {
            "job": f"agreement-{engine}",
            "model": str(model),
            "tasks": {"train": "none.jsonl"},
            "rollout": {
                "engine": engine,
                "dtype": "float32",
                "max_model_len": max_model_len,
                "update_mode": mode,
                "server": {"urls": [] if url is None else [url]},
            },
        }
    )


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
