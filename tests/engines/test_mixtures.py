"""A mixture of experts, which the trainer holds otherwise than its files do, is trained and served truly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
from agreement import job_for, write_sharp_model
from safetensors.torch import load_file

from areal_async.config.engines import engine_part
from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from areal_async.weights.adapter import Merger, adapter_config
from areal_async.weights.manifest import ADAPTER_CONFIG, MANIFEST_FILE, hash_of
from areal_async.weights.pieces import whole_tensors
from areal_async.weights.snapshot import Snapshot, open_snapshot, write_snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest, GenerateResult
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.disk import companion_files
from trainer_service.ranks import join_ranks

BOUND = 1e-4
LORA = LoraSection(rank=4, alpha=8.0)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=16, seed=5)


def batch_of(prompts: list[list[int]], answers: list[GenerateResult]) -> MicroBatch:
    rows = []
    for episode, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = np.concatenate([np.asarray(prompt, np.int32), answer.token_ids])
        mask = np.zeros(len(ids), np.uint8)
        mask[len(prompt) :] = 1
        zeros = np.zeros(len(ids), np.float32)
        rows.append(row_of(episode, ids, mask, zeros, zeros.astype(np.int32), SAMPLING.temperature))
    return build_micro_batch(rows)


def logprobs_of(backend: FsdpBackend, batch: MicroBatch) -> np.ndarray:
    (found,) = backend.evaluate(TRAINED_MODEL, [batch], lambda index, columns: columns["logp"])
    return np.asarray(found)


def write(backend: FsdpBackend, model: Path, root: Path, version: int) -> Snapshot:
    tensors = whole_tensors(backend.export(TRAINED_MODEL))
    files = companion_files(model, "float32")
    if backend.adapted:
        files[ADAPTER_CONFIG] = adapter_config(
            rank=LORA.rank, alpha=LORA.alpha, targets=list(backend.adapted), base=model
        )
    tag = VersionTag("policy", 1, version)
    return open_snapshot(write_snapshot(root, tag, tensors, files=files, tied=backend.tied).path)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("local", id="local"),
        pytest.param("sglang", marks=pytest.mark.engine, id="sglang"),
        pytest.param("vllm", marks=pytest.mark.engine, id="vllm"),
    ],
)
def test_a_trained_mixture_and_its_adapter_are_served_as_they_were_trained(
    engine: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    model = write_sharp_model(tmp_path / "model", endless=True, experts=8)
    models = {TRAINED_MODEL: ModelUse(model, OptimizerSection(lr=3e-3), 2)}
    ranks = join_ranks(0, 1)
    backend = FsdpBackend(models, ranks, dtype=torch.float32)
    first = write(backend, model, tmp_path, 0)
    files = load_file(model / "model.safetensors")
    assert {name: t.shape for name, t in first.tensors.items()} == {
        name: t.shape for name, t in files.items()
    }
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in files.items())

    job = job_for(engine, model, max_model_len=64)
    server: Any = make_engine(job, slots=8, activity="mixtures")
    prompts = parity.make_prompts(8, 16)

    async def ask(name: str) -> list[GenerateResult]:
        requests = [GenerateRequest(f"{name}{n}", ids, SAMPLING) for n, ids in enumerate(prompts)]
        return [await server.generate(request) for request in requests]

    async def update(snapshot: Any) -> None:
        await server.pause()
        await server.load(snapshot)
        await server.resume()

    try:
        run(server.start(first), 900)
        answers = run(ask("before"))
        batch = batch_of(prompts, answers)
        said = np.concatenate([answer.logprobs for answer in answers])
        np.testing.assert_allclose(said, logprobs_of(backend, batch), atol=BOUND, rtol=0)

        backend.train(TRAINED_MODEL, [batch], lambda index, columns: -columns["logp"].mean())
        backend.optimizer_step()
        second = write(backend, model, tmp_path, 1)
        changed = [name for name, tensor in second.tensors.items() if not torch.equal(tensor, files[name])]
        assert len(changed) > 0.8 * len(files)  # no token may have gone to some expert
        run(update(second))
        answers = run(ask("after"))
        batch = batch_of(prompts, answers)
        said = np.concatenate([answer.logprobs for answer in answers])
        np.testing.assert_allclose(said, logprobs_of(backend, batch), atol=BOUND, rtol=0)
        assert {int(v) for answer in answers for v in answer.versions} == {1}
        backend.train(TRAINED_MODEL, [batch], lambda index, columns: -columns["logp"].mean())
        backend.optimizer_step()
        assert np.abs(said - logprobs_of(backend, batch)).max() > 100 * BOUND  # an old expert would show

        adapted = FsdpBackend(models, ranks, dtype=torch.float32, lora=LORA)
        for _ in range(2):  # B begins as zeros, so A moves from the second update on
            adapted.train(TRAINED_MODEL, [batch], lambda index, columns: -columns["logp"].mean())
            adapted.optimizer_step()
        third = write(adapted, model, tmp_path, 2)
        assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in third.tensors} == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        }
        in_memory = engine_part(engine).needs == "tensors"
        merger = Merger(model, torch.float32, tmp_path / "merged", tensors=in_memory)
        run(update(run(merger.merged(third, hash_of((third.path / MANIFEST_FILE).read_bytes())))))
        answers = run(ask("adapter"))
        batch = batch_of(prompts, answers)
        said = np.concatenate([answer.logprobs for answer in answers])
        np.testing.assert_allclose(said, logprobs_of(adapted, batch), atol=BOUND, rtol=0)
        assert {int(v) for answer in answers for v in answer.versions} == {2}
    finally:
        run(server.stop())
