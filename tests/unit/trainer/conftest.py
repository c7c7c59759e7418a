"""A tiny model with its tokenizer, and synthetic episodes, for the trainer's tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from areal_async.base.verdicts import Parts
from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup
from areal_async.trajectory import Call, Episode, EpisodeBuilder, Sampling, pack, row_profile, row_sizes
from tests.unit.families import config_of
from trainer_service.data.rows import TrainingRow, row_of

logging.getLogger("torch.__trace").propagate = True
"""pytest adds its handler to loggers that do not propagate. With a handler here, torch writes each graph that
it compiles as text, and compiles several times slower."""

SYMBOLS = ["<pad>", "<eos>", *"0123456789+=-* "]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def write_model(folder: Path, *, tied: bool = True, layers: int = 2, hidden: int = 32, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    more = {"tie_word_embeddings": tied, "initializer_range": 0.2}
    config = config_of(Qwen2Config, vocab_size=len(SYMBOLS), **sizes, **more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"), tied=False, seed=1)


def plain_row(
    ids: Sequence[int] | np.ndarray,
    sampled: Any,
    *,
    episode: int = 0,
    temperature: float | np.ndarray = 1.0,
    feeds_last: bool = False,
) -> TrainingRow:
    """A row of version 0 whose tokens are sampled with log-prob 0 where `sampled`, places or a mask, says."""
    tokens = np.asarray(ids, np.int32)
    mask, zeros = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.int32)
    mask[sampled] = 1
    row = row_of(episode, tokens, mask, zeros.astype(np.float32), zeros, temperature, feeds_last=feeds_last)
    assert row is not None
    return row


PARTS = (
    lambda n_units: None,
    lambda n_units: Parts(segments={1: 0.5}, agents={"main": -1.0}),
    lambda n_units: Parts(units=[0.25] * n_units),
)
"""Rewards of parts: of none of an episode, of segments and agents, of every unit."""


def entry_of(
    episode: Episode, reward: float = 0.0, *, lowest_version: int = 0, **changes: Any
) -> BatchEpisode:
    """What a true manifest says of an episode, but for `changes`."""
    names = ("episode_id", "n_units", "n_sampled", "min_version", "max_version")
    said = {"sample": episode.header.sample} | {name: getattr(episode, name) for name in names}
    said["rows"] = row_sizes(row_profile(episode), lowest_version)
    return BatchEpisode(**{**said, "reward": reward, **changes})


def synthetic_batch(
    step: int = 0,
    *,
    groups: int = 4,
    group_size: int = 4,
    max_staleness: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    lengths: tuple[int, int] = (1, 4),
    branches: int = 0,
) -> tuple[Batch, dict[str, bytes]]:
    """A synthetic step: random tokens, log-probs near uniform, versions within the bound. `branches` more
    answers after the prompt of one episode of each group."""
    rng = np.random.default_rng([seed, step])
    blobs: dict[str, bytes] = {}
    made = []
    for g in range(groups):
        group_id = f"data0000:{g}:0#{step}"
        episodes = []
        prompt = rng.integers(2, len(SYMBOLS), int(rng.integers(3, 7)))
        for sample in range(group_size):
            builder = EpisodeBuilder("job", f"data0000:{g}:0", group_id, sample)
            root = builder.prompt(prompt)
            for _ in range(1 + branches * (sample == 1)):
                n = int(rng.integers(lengths[0], lengths[1] + 1))
                ids = rng.integers(0, len(SYMBOLS), n)
                lowest = max(0, step - max_staleness)
                versions = np.sort(rng.integers(lowest, step + 1, n))
                builder.sampled(
                    ids,
                    (-np.log(len(SYMBOLS)) + 0.3 * rng.standard_normal(n)).astype(np.float32),
                    versions,
                    parent=root,
                    call=Call(sampling=Sampling(temperature=temperature, max_new_tokens=8)),
                )
            episode = builder.build()
            blobs[episode.episode_id] = pack(episode)
            reward, parts = float(rng.integers(0, 2)), PARTS[sample % 3](episode.n_units)
            episodes.append(entry_of(episode, reward, parts=parts))
        made.append(BatchGroup(group_id, f"data0000:{g}:0", "test", episodes))
    return Batch(policy="policy", epoch=1, step=step, max_staleness=max_staleness, groups=made), blobs


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., tuple[Batch, dict[str, bytes]]]:
    return synthetic_batch
