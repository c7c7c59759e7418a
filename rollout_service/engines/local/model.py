"""A Hugging Face causal language model for the local engine: two kinds of forward pass, and an exchange of
weights in place."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from areal_async.base.log import get_logger
from areal_async.models.accelerator import begin_on, exact_products, with_exact_rotations
from areal_async.models.answers import end_ids
from areal_async.models.classes import auto_class, logits_scaling
from areal_async.models.files import Mixture
from areal_async.models.routers import routers_of, tried
from areal_async.weights.names import BoxOfFile, NamesMismatch, Storage, storage_of
from areal_async.weights.parking import ParkingPlace
from rollout_service.engines.base import EngineError
from rollout_service.engines.local.kv import ATTENTION, Decode, Prefill, SlotKV, Slots

log = get_logger("engine")

_LOADING = threading.Lock()
"""transformers patches torch's globals during a load, so the engines of a process load one at a time."""

PACKED_BYTES = 1 << 20
"""Least size of the weights of a linear layer that is packed. Smaller layers stay in the cache."""
PASS_ROWS = 16
"""Rows of a decode pass for which weights are packed."""

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest allowed difference of a logit between the engine's passes and the model's own forward pass."""


def _can_be_packed(layer: nn.Module) -> bool:
    """Return whether `LocalModel` can pack the weights of a layer, and gains by it."""
    if type(layer) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    in_fp32 = layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
    return in_fp32 and layer.weight.nbytes >= PACKED_BYTES


def _multiply(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], ""))


class LocalModel:
    """The model of a directory. All methods run on the engine's thread, in inference mode."""

    def __init__(
        self, directory: Path, *, device: str = "cpu", dtype: str = "float32", mixture: Mixture | None = None
    ) -> None:
        """If the model's `mixture` is given, each pass stores the chosen experts in `experts`. Raises
        `EngineError` if the directory has no causal language model."""
        begin_on(device, dtype=dtype, attention=ATTENTION, compile="off")
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        try:
            # Parameters that take over a snapshot's tensors must have the same tensor type.
            with _LOADING, torch.inference_mode(mode=False):
                kind = auto_class(AutoConfig.from_pretrained(directory, local_files_only=True))
                model: Any = kind.from_pretrained(
                    directory, dtype=self.dtype, attn_implementation=ATTENTION, local_files_only=True
                )
                self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(
                f"{directory} cannot be loaded as a causal language model: {error}. `model` must name a "
                "Hugging Face directory with config.json, *.safetensors and a tokenizer."
            ) from error
        self.model = model.to(self.device).eval().requires_grad_(False)
        with_exact_rotations(self.model)
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.eos_ids = end_ids(self.tokenizer, directory)
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self._scaling = logits_scaling(model.config)
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self.experts: list[Tensor] = []
        """Experts of the last pass over n tokens, including padding: i64 [n, K] of each layer with
        experts."""
        self.mixture = mixture if mixture is not None and self._watched() else None
        """The model's mixture, if `experts` can be recorded."""
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._storage: Mapping[str, Storage] = {}  # Memory for snapshots with tensors of these shapes
        self._parking = ParkingPlace()
        self._packed = [layer for layer in self.model.modules() if _can_be_packed(layer)]

    def _pack(self) -> None:
        """Copy the weights of large layers into the order in which oneDNN reads them.

        A decode pass multiplies few rows with all weights, and its time is that of reading them. In a file's
        order they are read at half of the memory's bandwidth, and two threads read hardly faster than one."""
        for layer in self._packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, PASS_ROWS)
            layer.forward = partial(_multiply, packed, layer.bias)

    def hidden(self, ids_BT: Tensor, position_BT: Tensor, slots: Slots) -> Tensor:
        """Return the last hidden states `[B, T, E]` of a pass that reads and writes the cache through
        `slots`."""
        self.experts = []
        out = self._decoder(input_ids=ids_BT, position_ids=position_BT, use_cache=False, slots=slots)
        return cast(Tensor, out.last_hidden_state)

    def _watched(self) -> bool:
        """Make the routers store their choices, if this kind of router is known. Return whether it is."""
        routers, config = routers_of(self.model), self.model.config.get_text_config()
        kinds = {type(router): router for router in routers}
        if not routers or any(tried(router, config) is None for router in kinds.values()):
            log.warning("the model's routes are not told: its routers are of an unknown kind")
            return False
        for router in routers:
            router.register_forward_hook(lambda module, inputs, said: self.experts.append(said[2]))
        return True

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 `[N, V]`."""
        logits, (scale, cap) = cast(Tensor, self._head(hidden_NE)).float(), self._scaling
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load `tensors`, by their names in a model's files. Of tied tensors, one name is enough. Raises
        `EngineError` without any change unless all tensors fit."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != self._shapes:
            try:
                self._storage = storage_of(self.model, shapes)
            except NamesMismatch as error:
                raise EngineError(f"the snapshot {error}") from error
            self._shapes = shapes
        for name, held in self._storage.items():
            parameter = self._tensors[name]
            in_ram = parameter.device.type == "cpu"
            if in_ram and isinstance(held, BoxOfFile) and held.shape == parameter.shape:
                # A snapshot's memory is its own, and nobody writes to it. With the right dtype, the parameter
                # takes it over without a copy. A GPU copies the snapshot anyway, to the address that the
                # recorded passes use.
                parameter.data = tensors[held.name].to(parameter.dtype)
                continue
            for piece in held.pieces(parameter.data, 0):
                piece.tensor.copy_(tensors[piece.name][piece.box])
        self._pack()

    def _on_gpu(self) -> list[Tensor]:
        held = (*self.model.parameters(), *self.model.buffers())
        return [each.data for each in held if each.device.type != "cpu"]

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights on a GPU now."""
        return sum(each.nbytes for each in self._on_gpu()) - self._parking.away_bytes

    def leave_device(self) -> None:
        """Move the weights into host memory. Weights on a CPU stay where they are."""
        self._parking.leave(self._on_gpu())

    def return_to_device(self) -> None:
        self._parking.come_back()

    @exact_products()
    def check(self) -> None:
        """Compare the engine's passes with the model's own forward pass on a few ids. A model with another
        kind of attention or head is then refused, instead of sampled wrongly."""
        count, split = min(12, self.model.config.get_text_config().max_position_embeddings), 4
        ids = (torch.arange(count, device=self.device) * 7 % self.vocab_size)[None]
        at = torch.arange(count, device=self.device)[None]
        kv = SlotKV(1, count, self.device)
        kv.reserve(count)
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            mine = [self.hidden(ids[:, :split], at[:, :split], Prefill(kv, row, row))[0]]
            for t in range(split, count):
                step = Decode(kv, at[0, t : t + 1], t + 1)
                mine.append(self.hidden(ids[:, t : t + 1], at[:, t : t + 1], step)[0])
            got = self.logits(torch.cat(mine))
            # Other implementations ignore unknown features, such as soft caps.
            self.model.set_attn_implementation("eager")
            want = self.model(input_ids=ids, use_cache=False).logits[0].float()
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"the local engine cannot run {type(self.model).__name__}: {error}") from error
        finally:
            self.model.set_attn_implementation(ATTENTION)
        worst = float((got - want).abs().max())
        if not worst <= CHECK_TOLERANCE[self.dtype] * max(1.0, float(want.abs().max())):
            raise EngineError(
                f"the local engine's logits for {type(self.model).__name__} differ by {worst:.3g} from the "
                "model's own: it does not support this architecture"
            )
