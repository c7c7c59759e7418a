"""Memory of one long row through a tiny model, by the number of ranks that share it.

    python benchmarks/long_row.py [--tokens 65536] [--layers 2] [--json FILE]

One row goes forwards and backwards through the model and is followed by an update: on one rank, and on four
with `trainer.parallel.sequence: 4`, once with four heads, which an all-to-all shares, and once with three,
where keys and values go round a ring. Of each rank, per row:

- `kept_mib`: bytes that torch's CPU allocator has given out and not got back when the forward pass is over,
  above those before it, by its profiler: what autograd keeps for the backward pass, and the columns.
- `peak_mib`: most of them at once until the end of the update: with all that lives for a moment, the gathered
  parameters and gradients.

The ratios are those of the largest rank to the one rank of the same run. Losses and gradient norms are
printed too: they are those of one rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from memory import allocated
from started_ranks import start_ranks
from torch import Tensor
from torch.profiler import record_function

from areal_async.config.job import OptimizerSection
from areal_async.config.parallel import RankGrid
from areal_async.service.rank_group import Meeting
from trainer_service.backends.base import TRAINED_MODEL, ModelUse
from trainer_service.backends.fsdp.backend import FsdpBackend
from trainer_service.data.microbatch import MicroBatch, build_micro_batch
from trainer_service.data.rows import row_of
from trainer_service.ranks import join_ranks

MIB = 2**20
BAR = 0.25
VOCABULARY = 256
HEAD = 8
SAMPLED = 1024
"""Units of the row, at its end."""
HEADS = {"all-to-all": 4, "ring": 3}
SEQUENCE = 4
DEADLINE_S = 7200.0
FORWARD_IS_OVER = "forward is over"


def write_model(folder: Path, heads: int, layers: int) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=heads * HEAD,
        intermediate_size=2 * heads * HEAD,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def long_row(tokens: int) -> MicroBatch:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, tokens + 1).astype(np.int32)
    mask = np.zeros(tokens + 1, np.uint8)
    mask[-min(SAMPLED, tokens) :] = 1
    row = row_of(0, ids, mask, np.zeros(tokens + 1, np.float32), np.zeros(tokens + 1, np.int32))
    assert row is not None
    return build_micro_batch([row])


def measure(rank: int, world: int, tokens: int, folder: Path, out: Path) -> None:
    """One rank's figures, written to `out`."""
    torch.set_num_threads(1)
    ranks = join_ranks(rank, world, meeting=Meeting.from_environment() if world > 1 else None)
    backend = FsdpBackend(
        {TRAINED_MODEL: ModelUse(folder, OptimizerSection(), 10)},
        ranks,
        dtype=torch.float32,
        grid=RankGrid(sequence=world),
    )
    module, batch = backend._models[TRAINED_MODEL].module, long_row(tokens)
    found: dict[str, Any] = {}

    def forward_is_over(*_: Any) -> None:
        with record_function(FORWARD_IS_OVER):
            pass

    module.register_forward_hook(forward_is_over)

    def loss_of(index: int, columns: Any) -> Tensor:
        loss: Tensor = -columns["logp"].mean()
        found["loss"] = float(loss.detach())
        return loss

    def update() -> None:
        backend.train(TRAINED_MODEL, [batch], loss_of)
        found["grad_norm"] = backend.optimizer_step()

    given_out = allocated(update, mark=FORWARD_IS_OVER)
    found["peak_mib"], found["kept_mib"] = given_out.peak / MIB, given_out.at_mark / MIB
    out.write_text(json.dumps(found))


def largest(world: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Figures of `world` ranks, each the largest of theirs."""
    outs = [folder / f"rank{rank}-of-{world}.json" for rank in range(world)]
    commands = [
        [
            sys.executable,
            __file__,
            "--rank",
            str(rank),
            str(world),
            str(folder),
            str(out),
            "--tokens",
            str(tokens),
        ]
        for rank, out in enumerate(outs)
    ]
    for process in start_ranks(commands):
        if process.wait(DEADLINE_S):
            raise SystemExit("a rank has failed")
    found = [json.loads(out.read_text()) for out in outs]
    return {name: max(each[name] for each in found if name in each) for name in found[0]}


def compared(way: str, tokens: int, layers: int) -> dict[str, Any]:
    """One rank beside several that share the row."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder, HEADS[way], layers)
        one, several = largest(1, tokens, folder), largest(SEQUENCE, tokens, folder)
    row = {
        "way": way,
        "heads": HEADS[way],
        "one": {name: round(value, 6) for name, value in one.items()},
        "shared": {name: round(value, 6) for name, value in several.items()},
        "kept_share": round(several["kept_mib"] / one["kept_mib"], 4),
        "peak_share": round(several["peak_mib"] / one["peak_mib"], 4),
    }
    print(
        f"{way}: kept after the forward pass {one['kept_mib']:.1f} MiB on one rank, "
        f"{several['kept_mib']:.1f} on each of {SEQUENCE} ({row['kept_share']:.1%}); peak of the allocator "
        f"{one['peak_mib']:.1f} and {several['peak_mib']:.1f} MiB ({row['peak_share']:.1%}); "
        f"loss {one['loss']:.6f} and {several['loss']:.6f}, "
        f"gradient norm {one['grad_norm']:.6g} and {several['grad_norm']:.6g}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=HEADS, default=[*HEADS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank, world, folder, out = given.rank
        measure(int(rank), int(world), given.tokens, Path(folder), Path(out))
        return
    rows = [compared(way, given.tokens, given.layers) for way in given.ways]
    if given.json is not None:
        result = {"tokens": given.tokens, "layers": given.layers, "ranks": SEQUENCE, "bar": BAR, "rows": rows}
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
