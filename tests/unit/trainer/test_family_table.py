"""Families of models: each part of the trainer against transformers' own eager forward pass, row by row."""

from __future__ import annotations

from functools import partial

import family_table
import pytest
import torch
from family_table import BOUND, COLUMNS, NAMES, Family, backend_of, by_backend, gap, measured
from transformers.models.llama.modeling_llama import LlamaMLP

from areal_async.config.job import LoraSection
from trainer_service.backends.fsdp import lora
from trainer_service.errors import ModelError


def test_the_table_of_the_page_is_what_the_script_wrote():
    found = family_table.results()
    assert set(found) == set(NAMES)
    assert all(set(row) == set(COLUMNS) for row in found.values())
    page = family_table.PAGE.read_text()
    table = page.partition(family_table.BEGIN)[2].partition(family_table.END)[0].strip()
    assert table == family_table.table(found)


def test_each_cell_is_right_or_a_sentence():
    assert len(NAMES) >= 24
    for name, row in family_table.results().items():
        for column, cell in row.items():
            said = isinstance(cell, str) and cell.startswith("refused: ")
            assert said or cell < BOUND, (name, column, cell)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_and_their_gradients_are_those_of_single_rows(name, tmp_path):
    written = family_table.results()[name]
    family = Family(name, tmp_path)
    for column in ("packed", "prefixes"):
        found = measured(partial(getattr(family, column)), tmp_path, name)
        assert found == written[column] if isinstance(found, str) else found < BOUND


@pytest.mark.parametrize("name", ["deepseek_v3", "falcon_h1", "gemma3", "jamba", "qwen3_vl"])
def test_adapters_learn_and_merge_into_the_files_of_each_kind_of_model(name, tmp_path):
    """Shared experts beside fused ones, mixers with a state, and models whose files have other names than
    their modules."""
    assert Family(name, tmp_path).lora() < BOUND


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_5"])
def test_published_weights_are_loaded_by_transformers_and_by_the_engine(name, tmp_path):
    family = Family(name, tmp_path)
    family.publish()
    found = measured(family.local, tmp_path, name)
    assert found == family_table.results()[name]["local"] if isinstance(found, str) else found < BOUND


def test_a_wrong_gradient_is_seen(tmp_path):
    family = Family("llama", tmp_path)
    found = by_backend(backend_of(tmp_path / "model"), family.rows[False])
    name = "model.layers.1.self_attn.q_proj.weight"
    found.gradients[name] = found.gradients[name] * 1.01
    assert gap(found, family.wanted[False]) > BOUND
    del found.gradients[name]
    with pytest.raises(AssertionError, match=r"q_proj.weight has no gradient"):
        gap(found, family.wanted[False])


def test_an_adapter_of_a_layer_that_is_never_called_is_refused(tmp_path, monkeypatch):
    Family("llama", tmp_path)

    def forward(self, x):
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(ModelError, match=r"computes model.layers.0.mlp.gate_proj without calling it"):
        backend_of(tmp_path / "model", lora=LoraSection(rank=4))
    backend_of(tmp_path / "model", lora=LoraSection(rank=4, targets=["q_proj"]))


def test_adapters_of_layers_that_kernels_of_a_mixer_read_are_refused(tmp_path):
    Family("jamba", tmp_path)
    with pytest.raises(ModelError, match=r"the model has no layer called dt_proj for adapters"):
        backend_of(tmp_path / "model", lora=LoraSection(rank=4, targets=["dt_proj"]))
    adapted = backend_of(tmp_path / "model", lora=LoraSection(rank=4)).adapted
    mixer = [name.rpartition(".")[2] for name in adapted if ".mamba." in name]
    assert set(mixer) == {"in_proj", "x_proj"}
    assert lora._weights_alone(torch.nn.ModuleList([torch.nn.Linear(2, 2)])) == set()


def test_weights_that_transformers_would_overwrite_are_refused(tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    Family("llama", tmp_path)

    def begin(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(1.0)

    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", begin)
    with pytest.raises(ModelError, match=r"transformers would overwrite .*, which was read from its files"):
        backend_of(tmp_path / "model")
