"""Images in the trainer: packed rows get the log-probs and gradients of the model's own forward pass."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from areal_async.config.job import LoraSection, OptimizerSection
from areal_async.config.objective import TeacherSection
from areal_async.data.images import decode_image
from areal_async.models.files import stored_tensors
from areal_async.weights.names import names_in_files
from tests import flash_cpu
from tests.unit.trainer import images_process
from tests.unit.trainer.conftest import plain_row
from tests.unit.trainer.forked_ranks import run_script
from tests.unit.trainer.image_rows import (
    image_file,
    own_logprobs,
    own_model,
    processor_of,
    row_with,
    rows_of,
    sampled_from,
    weights_of,
)
from tests.unit.trainer.images_process import weights
from tests.vision import write_vision_model
from trainer_service.backends.base import ModelUse
from trainer_service.backends.fsdp import attention, fsdp
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.backends.fsdp.images import ModelImages
from trainer_service.backends.fsdp.memory import MemoryOptions, rank_memory, shape_of
from trainer_service.backends.megatron.config import Dimensions
from trainer_service.data import images
from trainer_service.data.flops import load_row_cost, row_cost
from trainer_service.data.images import ImageReader, PackedImages
from trainer_service.data.microbatch import build_micro_batch, plan_passes
from trainer_service.data.prefixes import plant
from trainer_service.errors import BatchError, ModelError
from trainer_service.ranks import join_ranks
from trainer_service.teacher import TeacherError, TeacherServers

KINDS = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {kind: write_vision_model(tmp_path_factory.mktemp(kind), kind) for kind in (*KINDS, "qwen3_5")}


@pytest.fixture(scope="session")
def folder(folders):
    return folders["qwen3_vl"]


def backend_of(folder, **options):
    return images_process.backend_of(folder, join_ranks(0, 1), **options)


def batches_of(folder, budget=1 << 20, side_by_side=False):
    """Return micro-batches of rows with images, which share prefixes, and the rows in their order."""
    rows, groups = rows_of(folder)
    passes = plan_passes(rows, join_ranks(0, 1), budget, groups=groups, side_by_side=side_by_side)
    return [build_micro_batch(chosen) for chosen in passes], [row for chosen in passes for row in chosen]


def trained(backend, batches):
    """Return the log-probs of all units, and the gradient of their weighted sum by name."""
    logp = torch.cat(backend.evaluate("policy", batches, lambda _, columns: columns["logp"]))
    factors = weights_of(len(logp)).split([batch.n_units for batch in batches])
    before = weights(backend)
    backend.train("policy", batches, lambda index, columns: (columns["logp"] * factors[index]).sum())
    backend.optimizer_step()
    after = weights(backend)
    return logp, {name: before[name] - after[name] for name in before}


def own(folder, rows):
    """Return log-probs and gradients as `trained` does, from the model's own forward pass over one row at a
    time. Names are those of its files."""
    model = own_model(folder)
    logp = torch.cat([own_logprobs(model, folder, row) for row in rows])
    (logp * weights_of(len(logp))).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        (in_files,) = names_in_files(model, {name: parameter})
        found[in_files] = parameter.grad
    return logp.detach(), found


def require_equal(found, wanted, share=1e-5):
    """Require that gradients differ by at most this share of the largest number of each tensor."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        bound = share * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[name], expected, atol=bound, rtol=0)


def is_of_language(name):
    return "visual" not in name


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_the_models_own_forward_pass(folders, kind, vision):
    backend = backend_of(folders[kind], vision=vision)
    batches, rows = batches_of(folders[kind])
    assert batches[0].shared_tokens > 10
    logp, gradient = trained(backend, batches)
    want, own_gradient = own(folders[kind], rows)
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=0)
    if vision == "frozen":
        tower = {name for name in own_gradient if not is_of_language(name)}
        own_gradient |= {name: torch.zeros_like(own_gradient[name]) for name in tower}
    require_equal(gradient, own_gradient)


def test_two_ranks_train_what_one_rank_trains(folder, tmp_path):
    """The cases include a rank without images, no rank with images, a rank without rows, and shared rows."""
    run_script(images_process.__file__, folder, tmp_path)
    for name, options in images_process.CASES.items():
        alone = backend_of(folder, vision=options.get("vision", "frozen"))
        wanted = images_process.gradient_of(alone, images_process.batches_of(folder, (0, 1)))
        found = load_file(tmp_path / f"{name}.safetensors")
        require_equal(found, wanted)
        assert any(found[each].any() for each in found if not is_of_language(each)) == (name != "frozen")


def test_a_critic_on_the_policy_sees_images(folder):
    """A value head on the last layer is trained, so that its values differ between two images."""
    models = {"policy": ModelUse(folder, OptimizerSection(lr=0.1), 10, "both")}
    backend = FsdpBackend(models, join_ranks(0, 1), dtype=torch.float32)
    batch = build_micro_batch([row_with(folder, "1+@=", [number]) for number in (0, 1)])
    backend.train("policy", [batch], lambda _, c: (c["value"] - 1).square().sum(), columns=("value",))
    backend.optimizer_step()
    (values,) = backend.evaluate("policy", [batch], lambda _, c: c["value"], columns=("value",))
    first, second = values.chunk(2)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_vision_tower_is_recomputed(folder, recompute):
    batches, rows = batches_of(folder, budget=32)
    assert len(batches) > 2
    _, gradient = trained(backend_of(folder, vision="trained", recompute=recompute), batches)
    require_equal(gradient, own(folder, rows)[1])


def test_rows_side_by_side_have_images(folders):
    folder = folders["qwen3_5"]
    backend = backend_of(folder)
    assert backend.side_by_side
    batches, rows = batches_of(folder, budget=128, side_by_side=True)
    logp, gradient = trained(backend, batches)
    want, own_gradient = own(folder, rows)
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=0)
    found, wanted = (
        {n: t for n, t in each.items() if is_of_language(n)} for each in (gradient, own_gradient)
    )
    require_equal(found, wanted, share=5e-5)  # the state is computed in other pieces


def test_images_are_seen_in_one_attention_call_for_all_rows(folder, monkeypatch):
    monkeypatch.setattr(attention, "why_not_ragged", lambda *_: "")
    batches, rows = batches_of(folder)
    with flash_cpu.installed():
        backend = backend_of(folder)
        assert backend._models["policy"].module.ragged
        logp, gradient = trained(backend, batches)
    want, own_gradient = own(folder, rows)
    torch.testing.assert_close(logp, want, atol=1e-5, rtol=0)
    found, wanted = (
        {n: t for n, t in each.items() if is_of_language(n)} for each in (gradient, own_gradient)
    )
    require_equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_seen_in_bfloat16(folders, kind):
    batches, rows = batches_of(folders[kind])
    logp, gradient = trained(backend_of(folders[kind], vision="trained", dtype=torch.bfloat16), batches)
    want, own_gradient = own(folders[kind], rows)
    assert (logp - want).abs().mean() < 0.05
    for name in own_gradient:
        cosine = torch.cosine_similarity(gradient[name].float().flatten(), own_gradient[name].flatten(), 0)
        assert cosine > 0.9, name


def test_adapters_are_of_the_language_model_alone(folder):
    lora = LoraSection(rank=2)
    backend = backend_of(folder, lora=lora)
    assert len(backend.adapted) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in backend.adapted)
    batches, rows = batches_of(folder)
    logp, gradient = trained(backend, batches)
    torch.testing.assert_close(logp, own(folder, rows)[0], atol=1e-5, rtol=0)
    assert {name for name, each in gradient.items() if each.any()} == {n for n in gradient if "lora_B" in n}

    job = images_process.lora_job(folder, lora.rank)
    (mistake,) = fsdp.check_job(job, {"vision": "trained"}, "trainer.backend_args")
    assert mistake.field == "trainer.backend_args.vision"
    assert not [*fsdp.check_job(job, {}, "trainer.backend_args")]


@pytest.mark.parametrize("kind", KINDS)
def test_published_weights_have_the_vision_tower_only_if_it_is_trained(folders, kind):
    in_files = set(load_file(folders[kind] / "model.safetensors"))
    tower = {name for name in in_files if not is_of_language(name)}
    assert tower
    for vision, published in (("frozen", in_files - tower), ("trained", in_files)):
        backend = backend_of(folders[kind], vision=vision)
        assert {piece.name for piece in backend.export("policy", whole=False)} == published
        assert {piece.name for piece in backend.export("policy")} == in_files


def test_rows_share_no_tokens_from_the_first_other_image_on(folder):
    prompt, first = "12+@3@=", 4
    rows = [
        row_with(folder, prompt, images, answer=answer, episode=number)
        for number, (images, answer) in enumerate(
            [((0, 1), "1"), ((0, 5), "1"), ((4, 1), "1"), ((0, 1), "23")]
        )
    ]
    assert [len({tuple(row.token_ids[:20]) for row in rows}), rows[0].images[0].first] == [1, first]
    (tree, *others) = plant(rows, np.zeros(4, np.int64), 1 << 20)
    assert not others
    by_images = {tuple(image.digest for image in row.images): [] for row in tree.rows}
    for row in tree.rows:
        by_images[tuple(image.digest for image in row.images)].append(row.shared)
    second, whole = rows[0].images[1].first, rows[0].packed_length
    shared = sorted(row.shared for row in tree.rows)
    assert shared == [0, first, second, whole]
    assert [row.packed_length - row.shared for row in tree.rows if row.shared == whole] == [
        len("23") - len("1")
    ]
    counted = sum(row.image_tokens(row.shared) for row in tree.rows)
    assert tree.n_of_images == counted < sum(row.image_tokens() for row in rows)


def test_an_image_is_decoded_once_for_all_episodes_and_passes(folder, monkeypatch):
    decoded = []
    reader = ImageReader(folder)
    monkeypatch.setattr(
        images, "decode_image", lambda data: decoded.append(bytes(data)) or decode_image(data)
    )
    rows, _ = rows_of(folder)
    for _ in range(2):
        for row in rows:
            reader.read(row.images)
    assert len(decoded) == len(set(decoded)) == 5
    monkeypatch.setattr(images, "MOST_KEPT_BYTES", 1)
    reader = ImageReader(folder)
    for row in rows:
        reader.read(row.images)
    assert len(decoded) > 10
    done, last = len(decoded), rows[-1].images[-1]
    reader.read([last])  # the only one that is kept
    assert len(decoded) == done
    reader.read([image for row in rows for image in row.images if image.digest != last.digest][:1])
    assert len(decoded) == done + 1


def test_an_image_that_no_token_stands_for_adds_nothing(folder):
    backend = backend_of(folder, vision="trained")
    batch = build_micro_batch([row_with(folder, "1+2="), row_with(folder, "34*5=")])
    logp, plain = trained(backend, [batch])
    spared = replace(batch, images=PackedImages())
    backend = backend_of(folder, vision="trained")
    same, gradient = trained(backend, [spared])
    assert torch.equal(logp, same)
    assert all(torch.equal(gradient[name], plain[name]) for name in plain)
    assert not any(gradient[name].any() for name in gradient if not is_of_language(name))


def test_placeholder_tokens_without_an_image_are_plain_tokens(folder):
    """One of them is the last token, which is repeated if a pack is padded."""
    mark = processor_of(folder).placeholder_id
    stray = plain_row([5, mark, 6, 7, 8], [3, 4])
    model, backend = own_model(folder), backend_of(folder)
    row = row_with(folder, "1+@", [0], answer="2")
    row = structs.replace(row, token_ids=np.delete(row.token_ids, -2), position=row.position - 1)
    assert row.fed[-1] == mark
    batch = build_micro_batch([stray, row])
    (wide,) = backend.evaluate(
        "policy", [batch.padded(batch.n_tokens + 3)], lambda _, columns: columns["logp"]
    )
    ids = torch.from_numpy(stray.token_ids.astype(np.int64))
    want = torch.cat([sampled_from(model, ids)[[2, 3], ids[3:]], own_logprobs(model, folder, row)])
    torch.testing.assert_close(wide, want.detach(), atol=1e-5, rtol=0)


def test_rows_whose_routes_differ_within_an_image_share_no_part_of_it(folder):
    one, other = (row_with(folder, "1+@2=", [0], answer=answer) for answer in "34")
    (image,) = one.images
    assert image.count > 1
    routes = np.zeros((len(one.token_ids), 1, 1), np.uint8)
    elsewhere = routes.copy()
    elsewhere[image.first + 1] = 1
    rows = [structs.replace(one, routes=routes), structs.replace(other, episode=1, routes=elsewhere)]
    (tree,) = plant(rows, np.zeros(2, int), 1 << 20)
    assert [row.shared for row in tree.rows] == [0, image.first]


def test_images_that_cannot_be_used_are_named(folder):
    backend = backend_of(folder)
    row = row_with(folder, "1+@2=", [0])
    (image,) = row.images
    for wrong, why in (
        (
            structs.replace(image, digest="blake3:damaged", data=image.data[:100]),
            "blake3:damaged cannot be used: its end is missing",
        ),
        (
            structs.replace(image, digest="blake3:other", data=image_file(1)[0]),
            "has 10 tokens, but its row has 6 for it",
        ),
    ):
        batch = build_micro_batch([structs.replace(row, images=(wrong,))])
        with pytest.raises(BatchError, match=why):
            backend.evaluate("policy", [batch], lambda _, columns: None)


def test_models_that_cannot_be_used_for_images_are_named(folder, model_dir, tmp_path):
    batch = build_micro_batch([row_with(folder, "1+@2=", [0])])
    with pytest.raises(
        ModelError, match="the data has images, and the model 'policy' cannot be trained on them: Qwen2"
    ):
        backend_of(model_dir).evaluate("policy", [batch], lambda _, columns: None)
    with pytest.raises(
        ModelError, match=r"vision: Qwen2ForCausalLM .* takes no features of images. Set it to frozen"
    ):
        backend_of(model_dir, vision="trained")
    bare = shutil.copytree(
        folder, tmp_path / "bare", ignore=shutil.ignore_patterns("preprocessor_config.json")
    )
    backend = backend_of(bare)
    backend.evaluate("policy", [build_micro_batch([row_with(folder, "1+2=")])], lambda _, columns: None)
    with pytest.raises(ModelError, match=r"the image processor in .* cannot be used"):
        backend.evaluate("policy", [batch], lambda _, columns: None)
    with pytest.raises(
        ValueError, match=r"it reads images \(model_type qwen3_vl\), and the back end megatron"
    ):
        Dimensions.of(json.loads((folder / "config.json").read_text()))


def test_a_model_that_sees_images_otherwise_is_not_trained_on_them(folder, monkeypatch):
    """Features that are added to other layers than the model's own are found before the first gradient."""
    monkeypatch.setattr(ModelImages, "_features", lambda *given: _without_deepstack(*given))
    batch = build_micro_batch([row_with(folder, "1+@2=", [0])])
    with pytest.raises(
        ModelError, match="the log-probs of packed rows are not those of its own forward pass"
    ):
        backend_of(folder).evaluate("policy", [batch], lambda _, columns: None)


FEATURES = ModelImages._features


def _without_deepstack(*given):
    found = FEATURES(*given)
    found.deepstack_features = [tuple(0 * part for part in layer) for layer in found.deepstack_features]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_vision_tower_counts_in_costs_and_memory(folders, kind):
    config = AutoConfig.from_pretrained(folders[kind])
    model = own_model(folders[kind])
    blocks = sum(
        each.weight.numel() for each in model.model.visual.blocks.modules() if isinstance(each, nn.Linear)
    )
    cost = load_row_cost(folders[kind], trains_vision=True)
    assert cost.vision == 2 * config.vision_config.spatial_merge_size**2 * blocks
    assert row_cost(config).vision == cost.vision // 3
    assert cost.of(20, 4, 6) == cost.of(20, 4) + 6 * cost.vision
    tensors = {name: stored.shape for name, stored in stored_tensors(folders[kind]).items()}
    shape = shape_of(json.loads((folders[kind] / "config.json").read_text()), tensors)
    assert {*shape.tower} == {name for name in tensors if not is_of_language(name)}
    assert [len(shape.blocks), shape.size] == [2, sum(parameter.numel() for parameter in model.parameters())]
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    frozen, whole = (rank_memory(shape, MemoryOptions(trains_vision=each)).state for each in (False, True))
    assert whole - frozen == 12 * tower
    adapted = rank_memory(shape, MemoryOptions(lora_rank=2, compute_bytes=2)).state
    assert (
        adapted - rank_memory(replace(shape, tower={}), MemoryOptions(lora_rank=2, compute_bytes=2)).state
        == 2 * tower
    )


def test_servers_of_a_teacher_see_no_images(folder):
    teacher = TeacherServers(TeacherSection(urls=["http://127.0.0.1:9"]))
    with pytest.raises(TeacherError, match="rows have images"):
        teacher.logprobs([row_with(folder, "1+@2=", [0])])
