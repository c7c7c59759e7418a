"""What is loaded is what the files hold, and what is published has their names, whatever the module's are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, HrmTextConfig, OlmoHybridConfig

from areal_async.weights.pieces import whole_tensors
from tests.unit.families import FAMILIES, config_of
from tests.unit.trainer import names_process
from tests.unit.trainer.forked_ranks import run_ranks
from trainer_service.backends.fsdp.loading import LoadedModel, load_sharded
from trainer_service.durable_files import companion_files, write_model
from trainer_service.errors import ModelError
from trainer_service.ranks import join_ranks

MIXTURE = "qwen3_moe"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
ODD: dict[str, Callable[[], Any]] = {
    # A bias of the router that is a buffer, and in the files.
    "deepseek": lambda: config_of(
        DeepseekV3Config, n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1, n_group=2
    ),
    # Three tensors of the files that are one parameter, one below the other.
    "olmo_hybrid": lambda: config_of(OlmoHybridConfig, num_hidden_layers=4),
}


def save(folder: Path, family: str, **how: Any) -> Path:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config((FAMILIES | ODD)[family](), dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:  # else they are ones and zeros
            tensor += 0.1 * torch.randn(tensor.shape)
            assert "inv_freq" not in name
    model.save_pretrained(folder, **how)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def loaded_from(folder: Path) -> LoadedModel:
    return load_sharded(folder, join_ranks(0, 1), torch.float32)


def published(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return whole_tensors(loaded.pieces(join_ranks(0, 1), torch.float32, gather=True))


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", sorted(FAMILIES | ODD))
def test_a_model_is_loaded_as_transformers_does_and_published_as_its_files_are(
    family: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", family, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    loaded, plain = loaded_from(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = loaded.module
    whole = {name: p.full_tensor() for name, p in module.named_parameters()} | dict(module.named_buffers())
    assert_equal(whole, dict(plain.named_parameters()) | dict(plain.named_buffers()))
    assert_equal(published(loaded), tensors_of(folder))
    ranks = join_ranks(0, 1)
    pieces = partial(loaded.pieces, ranks, torch.float32, gather=False)
    write_model(tmp_path / "trained", pieces, companion_files(folder, "float32"), ranks)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    assert_equal(again.state_dict(), plain.state_dict())


def test_a_mixture_has_fewer_parameters_than_its_files_have_tensors(tmp_path: Path) -> None:
    loaded = loaded_from(save(tmp_path, MIXTURE))
    assert len(list(loaded.module.parameters())) == 36
    assert len(published(loaded)) == len(tensors_of(tmp_path)) == 62


def test_files_in_another_dtype_are_converted_on_the_way(tmp_path: Path) -> None:
    folder = save(tmp_path, MIXTURE)
    save_file({name: t.bfloat16() for name, t in tensors_of(folder).items()}, folder / "model.safetensors")
    want = {name: t.float() for name, t in tensors_of(folder).items()}
    assert_equal(published(loaded_from(folder)), want)


def test_files_that_hold_experts_as_the_module_does_are_published_so(tmp_path: Path) -> None:
    """As transformers writes them when it is told to keep its own form."""
    folder = save(tmp_path, MIXTURE, save_original_format=False)
    names = set(tensors_of(folder))
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert_equal(published(loaded_from(folder)), tensors_of(folder))


def test_one_tensor_of_several_parameters_is_published_in_boxes(tmp_path: Path) -> None:
    config = config_of(HrmTextConfig, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    want = tensors_of(tmp_path)
    found = {name: torch.full_like(t, float("nan")) for name, t in want.items()}
    pieces = list(loaded_from(tmp_path).pieces(join_ranks(0, 1), torch.float32, gather=False))
    assert len(pieces) > len(want)
    for piece in pieces:
        assert piece.shape == want[piece.name].shape
        fill(found, piece.name, piece.offset, piece.tensor)
    assert_equal(found, want)
    assert_equal(whole_tensors(pieces), want)
    with pytest.raises(ValueError, match="held in parts"):
        whole_tensors(piece for piece in pieces if piece.is_whole or any(piece.offset))


def fill(into: dict[str, torch.Tensor], name: str, offset: tuple[int, ...], part: torch.Tensor) -> None:
    box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
    assert into[name][box].isnan().all()  # nothing is given out twice
    into[name][box] = part


SPOILS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"it lacks model\.norm\.weight\."),
    "missing expert": (lambda t: t.pop(EXPERT), rf"it lacks {EXPERT}\."),
    "missing layer": (
        lambda t: [t.pop(name) for name in list(t) if ".layers.2.mlp.experts." in name],
        r"it lacks model\.layers\.2\.mlp\.experts\.0\.gate_proj\.weight.* and 10 more",
    ),
    "foreign": (lambda t: t.update(extra=torch.ones(2)), "has tensors that the model has not: extra"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"model\.norm\.weight of shape \(3,\), the model \(32,\)",
    ),
    "shape of an expert": (
        lambda t: t.update({EXPERT: torch.ones(24, 31)}),
        rf"{EXPERT} of shape \(24, 31\), the model \(24, 32\)",
    ),
    "quantised": (
        lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}),
        rf"has {EXPERT} in F8_E4M3: what is quantised",
    ),
}


@pytest.mark.parametrize("kind", SPOILS)
def test_files_that_are_not_the_models_are_refused_with_the_tensors_name(kind: str, tmp_path: Path) -> None:
    spoil, says = SPOILS[kind]
    tensors = tensors_of(save(tmp_path, MIXTURE))
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        loaded_from(tmp_path)


def test_a_file_of_several_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, MIXTURE, max_shard_size="20KB")
    last = sorted(folder.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-10])
    with pytest.raises(ModelError, match=f"{last.name} cannot be read"):
        loaded_from(folder)
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} cannot be read"):
        loaded_from(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="no model can be loaded"):
        loaded_from(folder)


def test_each_of_two_ranks_holds_and_gives_out_its_own_part_and_both_refuse_what_one_cannot_read(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path / "model", MIXTURE)
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for path in folder.iterdir():
        (spoilt / path.name).write_bytes(path.read_bytes())
    tensors = tensors_of(folder)
    tensors.pop("model.norm.weight")
    save_file(tensors, spoilt / "model.safetensors")
    given = [(rank, folder, own, tmp_path / str(rank)) for rank, own in enumerate([folder, spoilt])]
    ended = run_ranks(names_process.__file__, *given)
    assert [status for status, *_ in ended] == [0, 0], ended
    want = tensors_of(folder)
    assert_equal(load_file(tmp_path / "0" / "gathered.safetensors"), want)
    assert_equal(load_file(tmp_path / "together.safetensors"), want)
    assert load_file(tmp_path / "1" / "gathered.safetensors") == {}
    found = {name: torch.full_like(t, float("nan")) for name, t in want.items()}
    for out in (tmp_path / "0", tmp_path / "1"):
        for key, part in load_file(out / "pieces.safetensors").items():
            name, _, offset = key.partition("|")
            fill(found, name, tuple(json.loads(offset)), part)
        inv_freq = load_file(out / "buffers.safetensors")["model.rotary_emb.inv_freq"]
        plain = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(inv_freq, plain.model.rotary_emb.inv_freq)
    assert_equal(found, want)
    assert "rank 1 cannot read it" in (tmp_path / "0" / "refused").read_text()
    assert "it lacks model.norm.weight" in (tmp_path / "1" / "refused").read_text()
