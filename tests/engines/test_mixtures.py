"""A mixture of experts, which the trainer holds otherwise than its files do, is trained and served truly, and
its trainer sends tokens where the engine sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
from agreement import job_for, write_sharp_model
from msgspec.structs import replace as replace_fields
from safetensors.torch import load_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from areal_async.base.versions import VersionTag
from areal_async.config.engines import engine_part
from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.config.routes import replays
from areal_async.trajectory import Sampling
from areal_async.weights.adapter import Merger, adapter_config
from areal_async.weights.manifest import ADAPTER_CONFIG, MANIFEST_FILE, hash_of
from areal_async.weights.pieces import whole_tensors
from areal_async.weights.snapshot import Snapshot, open_snapshot
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest, GenerateResult
from tests.snapshots import write_snapshot
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.durable_files import companion_files
from trainer_service.ranks import join_ranks

BOUND = 1e-4
LAYERS, CHOSEN = 4, 2
"""Of the model: layers of experts, and experts of a token."""
LORA = LoraSection(rank=4, alpha=8.0)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=16, seed=5)


def batch_of(prompts: list[list[int]], answers: list[GenerateResult], *, replay: bool = False) -> MicroBatch:
    rows = []
    for episode, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = np.concatenate([np.asarray(prompt, np.int32), answer.token_ids])
        mask = np.zeros(len(ids), np.uint8)
        mask[len(prompt) :] = 1
        zeros = np.zeros(len(ids), np.float32)
        row = row_of(episode, ids, mask, zeros, zeros.astype(np.int32), SAMPLING.temperature)
        assert row is not None
        if replay and answer.routes is not None:
            row = replace_fields(row, routes=answer.routes.reshape(-1, LAYERS, CHOSEN))
        rows.append(row)
    return build_micro_batch(rows)


def logprobs_of(backend: FsdpBackend, batch: MicroBatch) -> np.ndarray:
    (found,) = backend.evaluate(TRAINED_MODEL, [batch], lambda index, columns: columns["logp"])
    return np.asarray(found)


def sent_to(backend: FsdpBackend, batch: MicroBatch) -> torch.Tensor:
    """i64 [L, T, K]: the experts that the trainer's tokens go to, in ascending order."""
    found: list[torch.Tensor] = []
    experts = [m for m in backend._models[TRAINED_MODEL].module.modules() if type(m) is Qwen3MoeExperts]
    handles = [
        each.register_forward_pre_hook(lambda module, inputs: found.append(inputs[1])) for each in experts
    ]
    logprobs_of(backend, batch)
    for handle in handles:
        handle.remove()
    return torch.stack(found).sort(-1).values


def check_routes(
    backend: FsdpBackend, coarse: FsdpBackend, prompts: list[list[int]], answers: list[GenerateResult]
) -> None:
    """The engine's routes are those of the trainer's weights, and a trainer that rounds otherwise sends its
    tokens exactly there when it replays them, and is nearer to the engine."""
    bare, batch = batch_of(prompts, answers), batch_of(prompts, answers, replay=True)
    assert batch.routes is not None
    told = batch.routes.long().sort(-1).values
    assert (sent_to(backend, bare) == told).all(-1).float().mean() > 0.999  # a tie may fall otherwise
    said = np.concatenate([answer.logprobs for answer in answers])
    np.testing.assert_allclose(said, logprobs_of(backend, batch), atol=BOUND, rtol=0)
    assert torch.equal(sent_to(coarse, batch), told)
    assert not torch.equal(sent_to(coarse, bare), told)
    before, after = (np.abs(said - logprobs_of(coarse, each)).mean() for each in (bare, batch))
    assert after < before


async def interrupted(
    server: Any, prompts: list[list[int]], update: Callable[[], Coroutine[Any, Any, None]]
) -> list[GenerateResult]:
    """Answers that the update of the weights falls into."""
    begun = asyncio.Event()
    how = replace_fields(SAMPLING, max_new_tokens=44)
    requests = [GenerateRequest(f"long{n}", ids, how, routes_from=0) for n, ids in enumerate(prompts)]
    tasks = [asyncio.create_task(server.generate(each, lambda ids: begun.set())) for each in requests]
    await begun.wait()
    await update()
    return [await task for task in tasks]


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
        requests = [
            GenerateRequest(f"{name}{n}", ids, SAMPLING, routes_from=0) for n, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*map(server.generate, requests)))

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
        told = [answer.routes is not None for answer in answers]
        assert told == [replays(job)] * len(prompts)
        if replays(job):
            check_routes(backend, FsdpBackend(models, ranks, dtype=torch.bfloat16), prompts, answers)

        backend.train(TRAINED_MODEL, [batch], lambda index, columns: -columns["logp"].mean())
        backend.optimizer_step()
        second = write(backend, model, tmp_path, 1)
        changed = [name for name, tensor in second.tensors.items() if not torch.equal(tensor, files[name])]
        assert len(changed) > 0.8 * len(files)  # no token may have gone to some expert
        answers = run(interrupted(server, prompts, lambda: update(second)))
        if replays(job):
            spanning = [n for n, answer in enumerate(answers) if len(set(answer.versions)) == 2]
            assert spanning
            for n in spanning:
                batch = batch_of(prompts[n : n + 1], answers[n : n + 1], replay=True)
                first_of_second = len(prompts[n]) - 1 + int((answers[n].versions == 0).sum())
                since = 0 if engine == "sglang" else first_of_second
                own = sent_to(backend, replace(batch, routes=None))[:, since:]
                told_of = batch.routes.long().sort(-1).values[:, since:]
                assert (own == told_of).all(-1).float().mean() > 0.99
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
