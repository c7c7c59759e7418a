"""A tiny model on disk, weights of any version of it, and what `transformers` says about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging as transformers_logging

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.engine import LocalEngine
from rollout_service.engines.local.model import LocalModel

VOCAB = ["<pad>", "<eos>", *"0123456789+-=abcdefghij ", "ab", "bc", "cab", "==", "é", "12", "\n"]

torch.set_num_threads(1)
transformers_logging.disable_progress_bar()


@dataclass(frozen=True)
class Version:
    """A snapshot in memory."""

    tag: VersionTag
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """A Hugging Face directory, and the reference that the engine is held against."""

    directory: Path
    noise: float = 0.05

    @functools.cache  # noqa: B019 - a handful of tiny models, for as long as the tests run
    def weights(self, version: int, epoch: int = 0) -> Version:
        """Weights unlike those of any other version."""
        tensors = AutoModelForCausalLM.from_pretrained(self.directory).state_dict(keep_vars=True)
        noise = torch.Generator().manual_seed(1000 * epoch + version)
        changed: dict[int, torch.Tensor] = {}  # names that share a tensor go on sharing one
        for tensor in tensors.values():
            if id(tensor) not in changed:
                changed[id(tensor)] = tensor.detach() + self.noise * torch.randn(
                    tensor.shape, generator=noise
                )
        return Version(VersionTag("policy", epoch, version), {n: changed[id(t)] for n, t in tensors.items()})

    @functools.cache  # noqa: B019
    def reference(self, version: int, epoch: int = 0) -> Callable[[Sequence[int]], np.ndarray]:
        """ids -> logits `[T, V]` of a plain full forward pass with the weights of a version."""
        model = AutoModelForCausalLM.from_pretrained(self.directory).eval()
        model.load_state_dict(self.weights(version, epoch).tensors)

        def logits(ids: Sequence[int]) -> np.ndarray:
            with torch.inference_mode():
                return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()

        return logits

    def logprobs(
        self, asked: GenerateRequest, got: GenerateResult, version: int = 0, epoch: int = 0
    ) -> np.ndarray:
        """What the engine should have said under a version, by one full forward pass."""
        prompt, ids = list(asked.prompt_ids), got.token_ids
        rows = self.reference(version, epoch)([*prompt, *ids])[len(prompt) - 1 : -1]
        return np.array([distribution(row, asked.sampling)[i] for row, i in zip(rows, ids, strict=True)])

    def assert_true(self, asked: GenerateRequest, got: GenerateResult) -> None:
        """Each unit has the log-prob that the version gives which it names."""
        for epoch, version in set(zip(got.epochs.tolist(), got.versions.tolist(), strict=True)):
            at = (got.versions == version) & (got.epochs == epoch)
            want = self.logprobs(asked, got, version, epoch)
            np.testing.assert_allclose(got.logprobs[at], want[at], atol=1e-4)

    def core(self, slots: int = 8, *, max_model_len: int = 96, **options: Any) -> EngineCore:
        core = EngineCore(LocalModel(self.directory), slots=slots, max_model_len=max_model_len, **options)
        core.swap(self.weights(0))
        return core

    def engine(self, slots: int = 8, *, update_mode: str = "recompute") -> LocalEngine:
        return LocalEngine(self.directory, slots=slots, max_model_len=96, update_mode=update_mode)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Log-probs of what is drawn from, one row, written the slow and obvious way."""
    if sampling.temperature == 0:
        return log_softmax(logits)
    logits = logits.astype(np.float64) / sampling.temperature
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    probs = np.exp(log_softmax(logits[order]))
    kept, total = [], 0.0
    for i, p in zip(order, probs, strict=True):
        if total >= sampling.top_p:
            break
        kept.append(i)
        total += p
    out = np.full(len(logits), -np.inf)
    out[kept] = log_softmax(logits[kept])
    return out


def save_tokenizer(directory: Path, vocab: Sequence[str] = VOCAB) -> None:
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )


def save_model(directory: Path, config: object, *, eos: bool = True) -> Tiny:
    """Without `eos` every answer is as long as was asked for."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    save_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(path.read_text() if eos else path.read_text().replace('"eos_token": "<eos>",', ""))
    return Tiny(directory)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": len(VOCAB)}
OTHERS = {"initializer_range": 0.25, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1}


def tiny_config(kind: Any = Qwen2Config, **changes: object) -> Any:
    return kind(**SIZES | OTHERS | changes)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return save_model(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The same model without an eos."""
    return save_model(tmp_path_factory.mktemp("endless"), tiny_config(eos_token_id=None), eos=False)
