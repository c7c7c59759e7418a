"""The files of a model are those that transformers loads."""

import json

import pytest
from safetensors.torch import load_file, save_file

from areal_async.launch.preflight import published_bytes
from areal_async.models.files import stored_tensors, weight_files
from areal_async.weights.adapter import BaseWeights
from tests.unit.trainer.conftest import write_model
from trainer_service.backends.fsdp.loading import load_sharded
from trainer_service.ranks import join_ranks
from trainer_service.tools.plan import tensor_shapes


@pytest.fixture(params=["one file", "several files"])
def model(tmp_path, request):
    """A model beside whose weights lie others of the same names and of other ones."""
    import torch

    folder = write_model(tmp_path / "model", seed=3)
    tensors = load_file(folder / "model.safetensors")
    if request.param == "several files":
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
        for file, held in files.items():
            save_file({name: tensors[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    first = min(tensors)
    extra = {first: torch.zeros(3), "tok_embeddings.weight": torch.zeros(4, 4)}
    for name in ("consolidated", "adapter_model", "zzz"):
        save_file(extra, folder / f"{name}.safetensors")
    return folder, tensors


def test_files_of_another_format_beside_the_weights_confuse_nobody(model):
    import torch

    folder, tensors = model
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert tensor_shapes(folder) == shapes
    base = BaseWeights(folder, torch.float32)
    assert {name: tuple(t.shape) for name, t in base.empty().items()} == shapes
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in base.merged({}, 1.0))
    base.close()
    assert published_bytes(folder, "float32") == sum(tensor.nbytes for tensor in tensors.values())
    loaded = load_sharded(folder, join_ranks(0, 1), torch.float32)
    assert set(loaded.storage) == set(tensors)


def test_headers_say_where_a_tensor_lies(model):
    folder, tensors = model
    for name, stored in stored_tensors(folder).items():
        data = stored.path.read_bytes()[stored.begin : stored.end]
        assert data == tensors[name].contiguous().numpy().tobytes()


def test_what_is_no_model_is_told(tmp_path):
    assert weight_files(tmp_path) == []
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="no index"):
        weight_files(tmp_path)
    for name in ("../other/model.safetensors", "/etc/shadow", "a/./b"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ValueError, match="no relative path"):
            weight_files(tmp_path)
    for content in (b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="no safetensors file"):
            stored_tensors(tmp_path)
