"""TRL's side of `against_trl.py`: one training by `AsyncGRPOTrainer`, in TRL's own environment.

    .trl-env/bin/python benchmarks/against_trl_async.py SETTINGS.json

The trainer is TRL's own: its queue and staleness bound, its packing of shared prefixes, its loss and its
update. It needs a vLLM server and a GPU's attention kernel, so these parts have stand-ins for a CPU, each at
least as fast as what it stands for:

- server and rollout process: `against_trl_generator.py`, one process that starts beside this one's imports;
- weights: one copy of what is trained into /dev/shm per version. Adapters are not merged for it;
- `tree_fa3`, attention over packed trees of samples: SDPA over segments that are padded to one length. Every
  run ends with a comparison of the packed log-probs with those of plain forward passes.

Files and settings are those of `against_trl_trainer.py`; `generate_threads` are the generator's.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from against_trl_generator import SharedWeights, generate
from torch import Tensor

LOGP_TOLERANCE = 1e-4
"""Largest difference of a packed log-prob from that of a plain pass."""
CHECKED = 32
"""Samples that are compared."""

_plans: list[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]] = []
"""The last pack's index of keys, and its plan. All layers of a pass share it."""


def _plan(kv_index: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> tuple[Tensor, ...]:
    """Return places of queries [S, Q] and keys [S, K] in the pack, the mask [S, 1, Q, K], and the places of
    the pack's tokens in the padded result [N]."""
    if not _plans or _plans[0][0] is not kv_index:
        start_q, start_k = cu_q[:-1].long()[:, None], cu_k[:-1].long()[:, None]
        n_q, n_k = cu_q.diff().long()[:, None], cu_k.diff().long()[:, None]
        at_q, at_k = torch.arange(most_q)[None], torch.arange(most_k)[None]
        queries = (start_q + at_q.minimum(n_q - 1)).clamp(max=int(cu_q[-1]) - 1)
        keys = kv_index[start_k + at_k.minimum(n_k - 1)]
        # The last query of a segment sees all of its path.
        mask = at_k[:, None] <= (at_q + n_k - n_q).minimum(n_k - 1)[:, :, None]
        _plans[:] = [(kv_index, (queries, keys, mask[:, None], (at_q < n_q).flatten().nonzero()[:, 0]))]
    return _plans[0][1]


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Attention over packed trees by SDPA, with the interface of TRL's `tree_attention`."""
    if given.get("sliding_window") or given.get("softcap"):
        raise ValueError("this stand-in has neither windows nor soft caps")
    names = (
        "tree_kv_index",
        "tree_cu_seqlens_q",
        "tree_cu_seqlens_k",
        "tree_max_seqlen_q",
        "tree_max_seqlen_k",
    )
    queries, keys, mask, places = _plan(*(given[name] for name in names))
    taken = zip((query, key, value), (queries, keys, keys), strict=True)
    q, k, v = (
        each[0].index_select(1, at.flatten()).unflatten(1, at.shape).transpose(0, 1) for each, at in taken
    )  # [S, H, Q or K, D]
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=given.get("scaling"), enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)[places][None], None


class Rollouts:
    """`RolloutWorkerProtocol`: samples of the generator's process, one at a time."""

    def __init__(self, process: Any, batches: Any) -> None:
        self.rollout_buffer: Any = self
        self.metrics_queue: Any = queue.Queue()
        self._process, self._batches = process, batches
        self._ready: deque[Any] = deque()
        self._version = self.tokens = self.behind = self.count = 0
        """`behind` is the sum of the staleness of `count` fetched samples, which have `tokens` tokens."""
        self.last: deque[Any] = deque(maxlen=CHECKED)

    def get(self, timeout: float) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        if not self._ready:
            self._ready.extend(self._batches.get(timeout=timeout))
        prompt, ids, logprobs, advantage, reward, version, group = self._ready.popleft()
        before = [0] * len(prompt)
        self.count, self.tokens = self.count + 1, self.tokens + len(prompt) + len(ids)
        self.behind += self._version - version
        sample = RolloutSample(
            prompt=[],
            completion=[],
            input_ids=torch.tensor(prompt + ids).numpy(),
            completion_mask=torch.tensor(before + [1] * len(ids)).numpy(),
            old_log_probs=torch.tensor(before + logprobs, dtype=torch.float32).numpy(),
            advantage=advantage,
            model_version=version,
            group_id=group,
            metrics={"reward": reward},
        )
        self.last.append(sample)
        return sample

    def qsize(self) -> int:
        return len(self._ready)

    def start(self) -> None:
        """Do nothing: the process starts with the program."""

    def stop(self) -> None:
        self._process.kill()

    def update_model_version(self, model_version: int) -> None:
        """Note the version, for the staleness. The generator reads it with the weights."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self._process.is_alive():
            raise RuntimeError("the generator's process has ended")


class NoTransfer:
    """`WeightTransferProtocol` that does nothing: `trainer_of` publishes."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def trainer_of(settings: Any, rollouts: Rollouts, record: Any) -> Any:
    """Return TRL's trainer with the stand-ins."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    class Trainer(AsyncGRPOTrainer):
        shared: SharedWeights

        def _sync_weight(self) -> None:
            """Publish what is trained as the next version."""
            trained = [value.detach() for value in self.model.parameters() if value.requires_grad]
            self.model_version += 1
            self.rollout_worker.update_model_version(self.model_version)
            self.shared.publish(self.model_version, trained)

    packing.tree_attention = tree_attention
    # The trainer asks for the name of its GPU, and for a client of the server that is not there.
    async_grpo_trainer.get_peak_flops_per_device = async_grpo_trainer.VLLMClient = lambda *_: None
    return Trainer(
        model=settings["model"],
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        args=AsyncGRPOConfig(
            output_dir=settings["out"],
            **settings["config"],
            token_budget=-1,  # passes of a fixed number of samples
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=25,
        ),
        train_dataset=Dataset.from_list(settings["tasks"]),
        peft_config=LoraConfig(**settings["lora"]) if settings["lora"] else None,
        callbacks=[record],
        rollout_worker=rollouts,
        weight_transfer=NoTransfer(),
    )


def require_same_logprobs(trainer: Any, samples: Any) -> float:
    """Return the largest difference of the log-probs of packed samples from those of plain forward passes.
    Raise SystemExit unless it is small."""
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow

    row = TreeRow()
    fields = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    samples = [{name: getattr(sample, name) for name in fields} for sample in samples]
    for sample in samples:
        row.add(sample)
    packed, model = row.pack(), trainer.model.eval()
    with torch.no_grad():
        names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
        most_q, most_k = packed["tree_max_seqlens"].tolist()
        given = {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
        given |= {name: packed[name] for name in names}
        out = model(**given, fused_lm_head=True, tree_max_seqlen_q=most_q, tree_max_seqlen_k=most_k)
        found = out.log_probs.flatten()[packed["token_index"]]
        model.set_attn_implementation("sdpa")
        wanted = []
        for sample in samples:
            ids, mask = (
                torch.from_numpy(sample["input_ids"])[None],
                torch.from_numpy(sample["completion_mask"]),
            )
            hidden = model.get_base_model() if hasattr(model, "get_base_model") else model
            logits = (
                hidden.lm_head(hidden.model(input_ids=ids).last_hidden_state)[0, :-1] / trainer.temperature
            )
            logp = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
            wanted.append(logp[mask[1:].bool()])
        model.set_attn_implementation(TREE_ATTENTION)
    worst = float((found - torch.cat(wanted)).abs().max())
    if worst > LOGP_TOLERANCE:
        raise SystemExit(f"packed log-probs differ by {worst:.2g} from those of plain passes")
    return worst


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    context = multiprocessing.get_context("spawn")
    version, shapes, batches = context.Value("q", 0), context.Queue(), context.Queue()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="against-trl-") as shm:
        told = (settings, shm.name, version, shapes, batches)
        process = context.Process(target=generate, args=told, name="generator", daemon=True)
        process.start()
        from against_trl_trainer import Record, scheduler_of

        torch.set_num_threads(settings["threads"])
        record = Record(Path(settings["out"]), settings["every_steps"])
        rollouts = Rollouts(process, batches)
        trainer = trainer_of(settings, rollouts, record)
        named = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
        layout = {name: tuple(value.shape) for name, value in named.items()}
        trainer.shared = SharedWeights(Path(shm.name), version, layout)
        shapes.put(layout)
        trainer.lr_scheduler = scheduler_of(trainer.create_optimizer(), settings["rates"])
        record.began_s = time.time()
        trainer.train()
        worst = require_same_logprobs(trainer, rollouts.last)  # on nobody's clock
        episodes = len(record.ended_s) and rollouts.count / (len(record.ended_s) + 1)
        record.write(
            staleness=rollouts.behind / rollouts.count + 1,  # trained one step after the fetch
            tokens=rollouts.tokens / rollouts.count * episodes,
            logp_difference=worst,
        )


if __name__ == "__main__":
    main()
