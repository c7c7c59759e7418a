"""One of two ranks that load a model, give out its tensors, and are refused one that a rank cannot read.

python names_process.py RANK MODEL OWN_MODEL OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_async.service.rank_group import Meeting
from areal_async.weights.pieces import whole_tensors
from trainer_service.backends.fsdp.loading import load_sharded
from trainer_service.errors import ModelError
from trainer_service.publishing.writing import write_tensors
from trainer_service.ranks import join_ranks


def run(rank: int, model: Path, own: Path, out: Path) -> None:
    out.mkdir()
    ranks = join_ranks(rank, 2, meeting=Meeting.from_environment())
    loaded = load_sharded(model, ranks, torch.float32)
    pieces = loaded.pieces(ranks, torch.float32, gather=False)
    save_file({f"{p.name}|{list(p.offset)}": p.tensor.clone() for p in pieces}, out / "pieces.safetensors")
    write_tensors(
        out.parent / "together.safetensors",
        lambda: loaded.pieces(ranks, torch.float32, gather=False),
        ranks.side(),
    )
    gathered = whole_tensors(loaded.pieces(ranks, torch.float32, gather=True))
    save_file({name: t.clone() for name, t in gathered.items()}, out / "gathered.safetensors")
    save_file({name: b.clone() for name, b in loaded.module.named_buffers()}, out / "buffers.safetensors")
    try:
        load_sharded(own, ranks, torch.float32)
    except ModelError as error:
        (out / "refused").write_text(str(error))
    ranks.leave()


if __name__ == "__main__":
    number, *paths = sys.argv[1:]
    run(int(number), *map(Path, paths))
