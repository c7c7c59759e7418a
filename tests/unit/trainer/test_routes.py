"""Routes of the engine, replayed by the trainer's routers: the engine's experts, the routers' own weights."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, MixtralConfig

from areal_async.config.job import JobConfig, OptimizerSection
from areal_async.models.files import Mixture, mixture_of
from areal_async.models.routers import routers_of, tried
from areal_async.rpc.messages import Batch, BatchGroup
from areal_async.service.record import read_run_log
from areal_async.trajectory import Call, EpisodeBuilder, pack, pack_routes, unpack
from areal_async.trajectory.layout import ROUTES, Units
from areal_async.weights.pieces import whole_tensors
from tests.unit.families import FAMILIES, VOCABULARY, config_of
from tests.unit.trainer import rank_process
from tests.unit.trainer.conftest import entry_of, plain_row
from tests.unit.trainer.test_selfcheck import merged
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.fsdp.routing import RouteReplay
from trainer_service.checks.logprobs import rows_to_compare
from trainer_service.data.episode_rows import EpisodeBytes, routed
from trainer_service.data.microbatch import MicroBatch, build_micro_batch, plan_passes
from trainer_service.data.recording import read_step, write_step
from trainer_service.data.routes import mixture_to_replay, replayed, rule_of
from trainer_service.data.rows import TrainingRow
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

LAYERS, EXPERTS, CHOSEN = 2, 5, 2
NONE = 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose middle layer is dense."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]()).save_pretrained(folder)
    assert mixture_of(folder) == (EXPERTS, CHOSEN, (0, 2))
    return folder


def backend_of(folder: Path, **options: Any) -> FsdpBackend:
    models = {"policy": ModelUse(folder, OptimizerSection(lr=1e-2), 10), "ref": ModelUse(folder)}
    return FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32, **options)


def some_rows(lengths: Sequence[int] = (9, 7, 5), seed: int = 0) -> list[TrainingRow]:
    """Rows with routes drawn at random."""
    rng = np.random.default_rng(seed)
    rows = []
    for episode, n in enumerate(lengths):
        row = plain_row(rng.integers(0, VOCABULARY, n), slice(n // 2, None), episode=episode)
        routes = np.array([[rng.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)] for _ in range(n)])
        rows.append(structs.replace(row, routes=routes.astype(np.uint8)))
    return rows


def logp_of(backend: FsdpBackend, batch: MicroBatch, model: str = "policy") -> Tensor:
    (found,) = backend.evaluate(model, [batch], lambda index, columns: columns["logp"])
    return found


@contextmanager
def sent() -> Iterator[list[Tensor]]:
    """The experts to which tokens are sent in each call of a layer, i64 [T, K], in order."""
    found: list[Tensor] = []

    def note(module: nn.Module, inputs: Any) -> None:
        if type(module).__name__.endswith("MoeExperts"):
            found.append(inputs[1].clone())

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


# --- the arithmetic --------------------------------------------------------------------------------------


def test_the_rule_of_a_router_is_found_from_what_it_says() -> None:
    config = FAMILIES["qwen3_moe"]()
    for normalise in (False, True):
        config.norm_topk_prob = normalise
        (router, *_) = routers_of(AutoModelForCausalLM.from_config(config))
        rule = rule_of(*tried(router, config))
        assert (rule.score, rule.normalise, rule.scale) == ("softmax", normalise, 1.0)
    mixtral = config_of(MixtralConfig, num_local_experts=4)
    (router, *_) = routers_of(AutoModelForCausalLM.from_config(mixtral))
    assert rule_of(*tried(router, mixtral)).normalise
    logits, _, experts = tried(router, mixtral)
    scaled = logits.sigmoid().gather(1, experts)
    scaled = 2.5 * scaled / scaled.sum(-1, keepdim=True)
    found = rule_of(logits, scaled, experts)
    assert (found.score, found.normalise, round(found.scale, 4)) == ("sigmoid", True, 2.5)
    assert rule_of(logits, scaled.square(), experts) is None


def test_experts_that_are_left_out_or_named_twice_weigh_nothing() -> None:
    logits = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    own = torch.tensor([[0, 1]] * 4)
    routes = torch.tensor([[3, 2], [-1, -1], [4, -1], [2, 2]], dtype=torch.int16)
    rule = rule_of(*normalised(logits, own))
    weights, experts = replayed(logits, own, routes, rule)
    assert experts.tolist() == [[3, 2], [0, 1], [4, 4], [2, 2]]
    p = logits.softmax(-1)
    pair = p[0, [3, 2]] / p[0, [3, 2]].sum()
    torch.testing.assert_close(weights[0], pair)
    torch.testing.assert_close(weights[1], p[1, :2] / p[1, :2].sum())
    torch.testing.assert_close(weights[2:], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    weights[0, 0].backward()
    assert logits.grad is not None
    assert logits.grad[0, [2, 3]].abs().min() > 0
    assert logits.grad[1:].abs().max() == 0


def normalised(logits: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chosen = logits.softmax(-1).gather(1, experts)
    return logits, chosen / chosen.sum(-1, keepdim=True), experts


def test_a_router_of_another_rule_is_refused_by_name() -> None:
    config = FAMILIES["qwen3_moe"]()
    model = AutoModelForCausalLM.from_config(config)
    (router, *_) = routers_of(model)

    class SquareRouter(type(router)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, experts = super().forward(hidden_states)
            return logits, weights.square(), experts

    for each in routers_of(model):
        each.__class__ = SquareRouter
    with pytest.raises(ModelError, match=r"SquareRouter of Qwen3MoeForCausalLM .* set rollout.routes to off"):
        RouteReplay(model)
    with pytest.raises(ModelError, match="Qwen2ForCausalLM does not say where its routers are"):
        RouteReplay(AutoModelForCausalLM.from_config(FAMILIES["qwen2"]()))


# --- the back end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_every_pass_sends_tokens_to_the_engine_s_experts(folder: Path, recompute: str) -> None:
    backend = backend_of(folder, recompute=recompute)
    batches = [build_micro_batch(some_rows(seed=seed)) for seed in (0, 1)]
    weights = whole_tensors(backend.export("policy"))
    gates = {name: tensor.clone() for name, tensor in weights.items() if "mlp.gate.weight" in name}
    with sent() as found:
        backend.train("policy", batches, lambda index, columns: -columns["logp"].mean())
    passes = 1 if recompute == "none" else 2
    assert len(found) == LAYERS * passes * len(batches)
    for number, batch in enumerate(batches):
        assert batch.routes is not None
        mine = found[LAYERS * passes * number : LAYERS * passes * (number + 1)]
        order = [0, 1] if passes == 1 else [0, 1, 1, 0]  # a backward pass computes the last block first
        for layer, experts in zip(order, mine, strict=True):
            assert torch.equal(experts, batch.routes[layer].long())
    backend.optimizer_step()
    after = whole_tensors(backend.export("policy"))
    assert len(gates) == LAYERS
    assert not any(torch.equal(after[name], gate) for name, gate in gates.items()), "routers learn"


def test_log_probs_are_those_of_the_model_with_these_experts(folder: Path) -> None:
    backend, rows = backend_of(folder), some_rows()
    found = logp_of(backend, build_micro_batch(rows))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = []
    for row in rows:
        for layer, router in enumerate(routers_of(model)):
            routes = torch.from_numpy(row.routes[:-1, layer].astype(np.int64))

            def choose(hidden: Tensor, router: Any = router, routes: Tensor = routes) -> Any:
                logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
                weights = logits.softmax(-1).gather(1, routes)
                if router.norm_topk_prob:
                    weights = weights / weights.sum(-1, keepdim=True)
                return logits, weights, routes

            router.forward = choose
        with torch.no_grad():
            ids = torch.from_numpy(row.token_ids[:-1]).long()[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
        at = torch.from_numpy(row.position)
        target = torch.from_numpy(row.token_ids).long()[at]
        want.append(logits[at - 1].log_softmax(-1).gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(want), atol=1e-5, rtol=0)
    own = logp_of(backend, build_micro_batch([structs.replace(row, routes=None) for row in rows]))
    assert (own - found).abs().max() > 0.1


def test_a_replay_of_its_own_routes_changes_nothing(folder: Path) -> None:
    backend = backend_of(folder)
    rows = [structs.replace(row, routes=None) for row in some_rows()]
    plain = build_micro_batch(rows)
    with sent() as chosen:
        before = logp_of(backend, plain)
    batch = replace(plain, routes=torch.stack(chosen).to(torch.int16))
    torch.testing.assert_close(logp_of(backend, batch), before, atol=1e-6, rtol=0)
    # Without a route a token's own router decides.
    batch = replace(plain, routes=torch.full_like(batch.routes, -1))
    assert torch.equal(logp_of(backend, batch), before)


def test_other_models_keep_their_own_routes(folder: Path) -> None:
    backend, rows = backend_of(folder), some_rows()
    bare = build_micro_batch([structs.replace(row, routes=None) for row in rows])
    assert torch.equal(logp_of(backend, build_micro_batch(rows), "ref"), logp_of(backend, bare, "ref"))


def test_routes_of_another_model_are_refused(folder: Path) -> None:
    batch = build_micro_batch(some_rows())
    batch = replace(batch, routes=batch.routes[:1])
    with pytest.raises(ModelError, match=r"routes of 1 layers, and .* has 2 routers"):
        logp_of(backend_of(folder), batch)


# --- rows and what they share ----------------------------------------------------------------------------


def test_tokens_are_shared_only_where_ids_and_routes_are_equal(folder: Path) -> None:
    ranks = join_ranks(0, 1)
    rows = some_rows((12, 12, 12, 12))
    ids, routes = rows[0].token_ids.copy(), rows[0].routes.copy()
    tails = [np.array([n, n + 1, n + 2], np.int32) for n in range(4)]
    alike = []
    for number, row in enumerate(rows):
        own = np.concatenate([routes[:9], row.routes[9:]])
        if number >= 2:
            own[5, 1] = [4, 3] if (routes[5, 1] != [4, 3]).any() else [3, 4]  # the same two, another route
        if number == 3:
            own[7] = NONE
        alike.append(structs.replace(row, token_ids=np.concatenate([ids[:9], tails[number]]), routes=own))
    (chosen,) = plan_passes(alike, ranks, 1 << 20, groups=np.zeros(4, np.int64))
    assert sorted(row.shared for row in chosen) == [0, 5, 7, 9]
    backend = backend_of(folder)
    bare = [structs.replace(row, shared=0) for row in chosen]
    shared, alone = build_micro_batch(chosen), build_micro_batch(bare)
    assert shared.n_tokens == alone.n_tokens - 21
    torch.testing.assert_close(logp_of(backend, shared), logp_of(backend, alone), atol=1e-5, rtol=0)
    with sent() as found:
        logp_of(backend, shared)
    known = (shared.routes >= 0).all(-1)
    for layer in range(LAYERS):
        assert torch.equal(found[layer][known[layer]], shared.routes[layer][known[layer]].long())


def test_rows_without_routes_go_with_those_that_have_some() -> None:
    one, other, _ = some_rows()
    batch = build_micro_batch([one, structs.replace(other, routes=None)])
    assert batch.routes is not None
    assert batch.routes.shape == (LAYERS, batch.n_tokens, CHOSEN)
    assert (batch.routes[:, len(one.token_ids) - 1 :] == -1).all()
    assert build_micro_batch([structs.replace(one, routes=None)]).routes is None
    missing = one.routes.copy()
    missing[2] = NONE
    assert (build_micro_batch([structs.replace(one, routes=missing)]).routes[:, 2] == -1).all()


# --- a step of a job -------------------------------------------------------------------------------------


def recorded(folder: Path, out: Path, *, told: bool = True) -> Path:
    """A batch of an engine that sends tokens to experts drawn at random, and tells which, or does not."""
    backend, groups = backend_of(folder), []
    blobs, routes = {}, {}
    for g in range(2):
        group_id, made = f"data0000:{g}:0#0", []
        for sample in range(4):
            (row,) = some_rows((14,), seed=4 * g + sample)
            ids = np.concatenate([np.arange(5, 9) + g, row.token_ids[4:]]).astype(np.int32)
            like = structs.replace(plain_row(ids, slice(4, None)), routes=row.routes)
            logprobs = logp_of(backend, build_micro_batch([like])).numpy()
            builder = EpisodeBuilder("job", f"data0000:{g}:0", group_id, sample)
            segment = builder.sampled(
                ids[4:],
                logprobs,
                0,
                parent=builder.prompt(ids[:4]),
                call=Call(),
                epoch=1,
            )
            builder.routes(segment, row.routes[:13].reshape(13, -1))
            episode = builder.build()
            blobs[episode.episode_id] = pack(episode)
            if told:
                routes[episode.episode_id] = pack_routes(episode)
            made.append(entry_of(episode, float(sample % 2)))
        groups.append(BatchGroup(group_id, f"data0000:{g}:0", "test", made))
    batch = Batch(policy="policy", epoch=1, step=0, max_staleness=2, groups=groups)
    write_step(out / "batches", batch, blobs, routes=routes)
    return out / "batches"


def self_check_of(folder: Path, out: Path, batches: Path, routes: str) -> dict[str, Any]:
    """The record of the self-check of a job that trains this one step."""
    out.mkdir(exist_ok=True)
    job = rank_process.job_of(folder, out, minibatches=1, micro_batch_tokens=200, steps=1)
    changed = {"rollout": {"routes": routes}, "trainer": {"self_check": {"action": "warn"}}}
    job = JobConfig.model_validate(merged(job.model_dump(mode="json"), changed))
    trainer = rank_process.trainer_of(job, out, rank_process.RecordedBuffer(batches))
    assert trainer.run(name="trainer", ready=lambda: None)
    (record,) = [r for r in read_run_log(out / "metrics.jsonl") if r["kind"] == "self_check"]
    return record


def test_a_job_replays_what_came_with_its_episodes_and_warns_if_it_cannot(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> bool:
        return any("routes are not replayed" in record.message for record in caplog.records)

    batches = recorded(folder, tmp_path)
    with_routes = self_check_of(folder, tmp_path / "with", batches, "auto")
    assert not warned()
    assert with_routes["passed"]
    assert with_routes["max"] < 2e-5
    without = self_check_of(folder, tmp_path / "without", batches, "off")
    assert warned()
    assert not without["passed"]
    assert without["mean"] > 0.1


@pytest.mark.parametrize("wrong", ["width", "expert", "type"])
def test_routes_of_another_model_are_not_replayed(folder: Path, tmp_path: Path, wrong: str) -> None:
    """Whoever sends them signs them too: they end no trainer."""
    episode = unpack(next(iter(read_step(recorded(folder, tmp_path), 0).blobs.values())))
    width, highest = LAYERS * CHOSEN, EXPERTS
    told = np.zeros((episode.n_units, width + (wrong == "width")), "u2" if wrong == "type" else "u1")
    told[2, 1] = highest if wrong == "expert" else 1
    held = episode.units
    columns = {**held.columns, ROUTES: told}
    forged = copy(episode)
    forged.units = Units(held.token_id, held.mask, held.logprob, held.version, columns)
    packed = pack_routes(forged)
    assert packed is not None
    assert ROUTES not in routed(episode, packed, mixture_of(folder)).units.columns


def test_units_after_an_update_within_their_answer_are_not_compared_over_older_routes() -> None:
    """The engine fed the tokens before it again, through other experts perhaps."""
    builder = EpisodeBuilder("job", "data0000:0:0", "data0000:0:0#0", 0)
    segment = builder.sampled(
        np.arange(10),
        np.zeros(10, np.float32),
        np.repeat([0, 1], [3, 7]),
        parent=builder.prompt([5, 6]),
        call=Call(),
        epoch=1,
    )
    builder.routes(segment, np.zeros((11, LAYERS * CHOSEN), np.uint8))
    episode = builder.build()

    def compared(routes: bytes | None) -> tuple[int, Counter[str]]:
        skipped: Counter[str] = Counter()
        rows = rows_to_compare(
            EpisodeBytes(memoryview(pack(episode)), entry_of(episode, 1.0), 0, [0], routes),
            policy="policy",
            version=1,
            epochs=[1],
            update_mode="recompute",
            skipped=skipped,
            mixture=Mixture(EXPERTS, CHOSEN, (0, 2)),
        )
        return len(rows), +skipped

    assert compared(pack_routes(episode)) == (0, {"another version": 3, "routes of another version": 7})
    assert compared(None) == (1, {"another version": 3})


def test_an_episode_whose_routes_are_gone_is_trained_by_the_trainer_s_routers(
    folder: Path, tmp_path: Path
) -> None:
    batches = recorded(folder, tmp_path, told=False)
    assert not self_check_of(folder, tmp_path / "gone", batches, "replay")["passed"]


def test_auto_leaves_alone_what_cannot_be_replayed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mixture_to_replay(rank_process.job_of(folder, tmp_path)) == mixture_of(folder)
    monkeypatch.setattr("trainer_service.data.routes.rule_of", lambda *said: None)
    other = shutil.copytree(folder, tmp_path / "other")  # what a folder's rules are is known once for all
    job = rank_process.job_of(other, tmp_path)
    assert mixture_to_replay(job) is None
    asked = JobConfig.model_validate(merged(job.model_dump(mode="json"), {"rollout": {"routes": "replay"}}))
    with pytest.raises(ModelError, match="Qwen3MoeTopKRouter of Qwen3MoeForCausalLM"):
        mixture_to_replay(asked)


def test_routers_are_found_in_the_order_of_the_layers() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]())
    layers: nn.ModuleList = model.model.layers
    assert routers_of(model) == [layers[0].mlp.gate, layers[2].mlp.gate]
