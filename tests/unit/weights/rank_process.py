"""One rank that writes its shards of a model: python rank_process.py RANK WORLD MEETING_FILE OUT"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from areal_async.rpc.messages import VersionTag
from areal_async.weights.sharded import Box, begin_sharded, box_of, publish_sharded, write_rank

TAG = VersionTag(1, 1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3, bias=False), nn.LayerNorm(3), nn.Embedding(1, 5))


def main(rank: int, world: int, meeting: Path, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), world), rank=rank, world_size=world)
    model = make_model()
    mesh = init_device_mesh("cpu", (world,))
    for module in model:
        fully_shard(module, mesh=mesh)
    tensors: dict[str, torch.Tensor] = {}
    boxes: dict[str, Box] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        box = box_of(parameter)
        if box is not None:
            tensors[name], boxes[name] = parameter.detach().to_local(), box
    staging = out / ".writing-e1-v1"
    if rank == 0:
        assert begin_sharded(out, TAG) == staging
    dist.barrier()
    report = write_rank(staging, rank, world, tensors, boxes)
    (out / f"report-{rank}").write_bytes(report)
    dist.barrier()
    if rank == 0:
        reports = [(out / f"report-{r}").read_bytes() for r in range(world)]
        publish_sharded(staging, out, TAG, reports, files={"config.json": b"{}"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
