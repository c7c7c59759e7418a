"""Ranks write the pieces that they hold; receivers and engines get whole tensors, bit for bit."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import SnapshotError
from areal_async.rpc.messages import VersionTag
from areal_async.rpc.secret import RunSecret
from areal_async.weights import Publisher, Written, open_snapshot
from areal_async.weights.comparison import write_delta
from areal_async.weights.deltas import apply_delta
from areal_async.weights.sharded import (
    INDEX_FILE,
    Box,
    begin_sharded,
    materialise,
    publish_sharded,
    slice_box,
    write_rank,
)

SECRET = RunSecret(bytes(32))

FILES = {"config.json": b"{}"}
HERE = Path(__file__).parent


def tag(version: int) -> VersionTag:
    return VersionTag(1, version)


def model(version: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed": torch.randn(10, 4, generator=generator),
        "column": torch.randn(8, 4, generator=generator).bfloat16(),
        "row": torch.randn(4, 8, generator=generator).bfloat16(),
        "norm": torch.ones(4),
        "scalar": torch.tensor(0.5),
    }
    tensors["row"][0, :3] += version
    return tensors


Piece = tuple[dict[str, torch.Tensor], dict[str, Box]]


def tensor_parallel(tensors: dict[str, torch.Tensor], rank: int, world: int) -> Piece:
    """As Megatron holds them: column-parallel weights cut along 0, row-parallel ones along 1, the rest on
    rank 0."""
    pieces, boxes = {}, {}
    for name, dim in (("column", 0), ("row", 1)):
        pieces[name] = tensors[name].chunk(world, dim)[rank]
        boxes[name] = slice_box(pieces[name].shape, dim, rank, world)
    if rank == 0:
        pieces |= {name: tensors[name] for name in ("embed", "norm", "scalar")}
    return pieces, boxes


def rows(tensors: dict[str, torch.Tensor], rank: int, world: int) -> Piece:
    """As FSDP2 holds them: rows in chunks of ceil(n / world); the last ranks may hold none."""
    pieces, boxes = {}, {}
    for name, tensor in tensors.items():
        if not tensor.dim():
            if rank == 0:
                pieces[name] = tensor
            continue
        chunk = -(-len(tensor) // world)
        begin = min(rank * chunk, len(tensor))
        pieces[name] = tensor[begin : begin + chunk]
        boxes[name] = (list(tensor.shape), [begin] + [0] * (tensor.dim() - 1))
    return pieces, boxes


def written_by(root: Path, version: int, world: int, cut=tensor_parallel) -> Written:
    staging = begin_sharded(root, tag(version))
    reports = [write_rank(staging, r, world, *cut(model(version), r, world)) for r in range(world)]
    return publish_sharded(staging, root, tag(version), reports, files=FILES, tied={"head": "embed"})


def check(tensors: dict[str, torch.Tensor], version: int = 0) -> None:
    want = model(version)
    assert tensors.keys() - {"head"} == want.keys()
    for name, tensor in want.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("cut", [tensor_parallel, rows])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_receivers_and_engines_get_whole_tensors(tmp_path: Path, cut, world: int) -> None:
    written = written_by(tmp_path, 0, world, cut)
    opened = open_snapshot(written.path, manifest_hash=written.manifest_hash)
    check(opened.tensors)
    assert opened.tensors["head"] is opened.tensors["embed"]
    made = materialise(written.path, tmp_path / "node" / written.path.name)
    check(open_snapshot(made.path, manifest_hash=made.manifest_hash).tensors)
    models = sorted(made.path.glob("*.safetensors"))
    loaded: dict[str, torch.Tensor] = {}
    for file in models:
        loaded |= safetensors.torch.load_file(file)
    check(loaded)
    assert (made.path / "config.json").read_bytes() == b"{}"
    if len(models) > 1:
        index = json.loads((made.path / INDEX_FILE).read_bytes())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in model().values())
        assert {(made.path / file) for file in index["weight_map"].values()} == set(models)
        for name, file in index["weight_map"].items():
            assert name in safetensors.torch.load_file(made.path / file)
    else:
        assert models[0].name == "model.safetensors"


def test_transformers_loads_what_was_made_of_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = Qwen2ForCausalLM(config)
    config.save_pretrained(tmp_path)
    state = dict(reference.named_parameters())
    staging = begin_sharded(tmp_path, tag(0))
    reports = []
    for rank in range(2):
        pieces, boxes = rows({n: p.detach() for n, p in state.items()}, rank, 2)
        reports.append(write_rank(staging, rank, 2, pieces, boxes))
    files = {"config.json": tmp_path / "config.json"}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    written = publish_sharded(staging, tmp_path, tag(0), reports, files=files, tied=tied)
    made = materialise(written.path, tmp_path / "node" / "e1-v0")
    loaded = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[name])


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_any_number_of_ranks_covers_any_number_of_rows(
    tmp_path_factory: pytest.TempPathFactory, world: int, n: int, m: int
) -> None:
    root = tmp_path_factory.mktemp("s")
    tensors = {"w": torch.arange(float(n * m)).reshape(n, m)}
    staging = begin_sharded(root, tag(0))
    reports = [write_rank(staging, r, world, *rows(tensors, r, world)) for r in range(world)]
    path = publish_sharded(staging, root, tag(0), reports).path
    assert torch.equal(open_snapshot(path).tensors["w"], tensors["w"])


def test_a_missing_rank_or_row_is_no_snapshot(tmp_path: Path) -> None:
    def reports() -> tuple[Path, list[bytes]]:
        staging = begin_sharded(tmp_path, tag(0))
        return staging, [write_rank(staging, r, 3, *rows(model(), r, 3)) for r in range(3)]

    staging, all_three = reports()
    with pytest.raises(SnapshotError, match="not those of all ranks"):
        publish_sharded(staging, tmp_path, tag(0), all_three[:2])
    assert os.listdir(tmp_path) == []
    staging, all_three = reports()
    pieces, boxes = rows(model(), 2, 3)
    pieces["row"], boxes["row"] = pieces["row"][:0], ([4, 8], [4, 0])
    pieces["embed"], boxes["embed"] = pieces["embed"][:1], boxes["embed"]
    all_three[2] = write_rank(staging, 2, 3, pieces, boxes)
    with pytest.raises(SnapshotError, match="do not cover"):
        publish_sharded(staging, tmp_path, tag(0), all_three)
    assert os.listdir(tmp_path) == []


def test_a_damaged_shard_is_not_made_whole(tmp_path: Path) -> None:
    path = written_by(tmp_path, 0, 2).path
    file = sorted(path.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotError, match="does not match its hash"):
        materialise(path, tmp_path / "node" / "e1-v0")
    assert not (tmp_path / "node").exists()


def test_shards_have_deltas_and_are_announced(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, f"ipc://{tmp_path}/s", job="j", access=SECRET)
    publisher.start()
    base, new = written_by(tmp_path, 0, 2), written_by(tmp_path, 1, 2)
    publisher.announce(base)
    publisher.announce(new)
    with pytest.raises(SnapshotError, match="is not newer"):
        publisher.announce(base)
    delta = write_delta(base.path, new.path).delta
    assert delta is not None
    (tmp_path / "node").mkdir()
    base.path.rename(tmp_path / "node" / "e1-v0")
    made = apply_delta(tmp_path / "node" / "e1-v0", delta.path, tmp_path / "node" / "e1-v1")
    check(open_snapshot(made.path, manifest_hash=new.manifest_hash).tensors, version=1)
    publisher.close()


def test_two_ranks_of_fsdp_write_what_they_hold(tmp_path: Path) -> None:
    script = HERE / "rank_process.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path / "meet"), str(tmp_path)],
            env=env,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=90)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    spec = importlib.util.spec_from_file_location("shard_rank", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    opened = open_snapshot(tmp_path / "e1-v1")
    assert len(opened.manifest.shards) == 2
    for name, parameter in module.make_model().named_parameters():
        assert torch.equal(opened.tensors[name], parameter.detach())
    # The embedding has one row, so rank 1 held nothing of it.
    assert [len([p for p in opened.manifest.parts if p.tensor == n]) for n in ("0.weight", "3.weight")] == [
        2,
        1,
    ]
