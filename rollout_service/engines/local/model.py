"""A Hugging Face causal language model for the local engine: two kinds of forward pass, and an exchange of
weights in place."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer

from areal_async.base.log import get_logger
from areal_async.models.accelerator import begin_on, exact_products, with_exact_rotations
from areal_async.models.answers import end_ids
from areal_async.models.classes import (
    attention_by_part,
    auto_class,
    is_multimodal,
    logits_scaling,
    names_of_other_parts,
)
from areal_async.models.files import Mixture, placeholder_ids
from areal_async.models.routers import routers_of, tried
from areal_async.models.vision import NoImages
from areal_async.weights.names import BoxOfFile, NamesMismatch, Storage, names_in_files, storage_of
from areal_async.weights.parking import ParkingPlace
from rollout_service.engines.base import EngineError
from rollout_service.engines.local.kv import ATTENTION, Decode, Prefill, SlotKV, Slots
from rollout_service.engines.local.vision import Prefix, Vision

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
        self,
        directory: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        mixture: Mixture | None = None,
        pixels: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Load the model in `directory`. If its `mixture` is given, each pass stores the chosen experts in
        `experts`. `pixels` are the least and the largest size to which images are scaled (`ImageProcessor`).
        Raises `EngineError` if the directory has no causal language model."""
        begin_on(device, dtype=dtype, attention=ATTENTION, compile="off")
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        try:
            # Parameters that take over a snapshot's tensors must have the same tensor type.
            with _LOADING, torch.inference_mode(mode=False):
                config = AutoConfig.from_pretrained(directory, local_files_only=True)
                self._attention = attention_by_part(config, ATTENTION, "sdpa")
                model: Any = auto_class(config).from_pretrained(
                    directory, dtype=self.dtype, attn_implementation=self._attention, local_files_only=True
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
        never = [token for token in placeholder_ids(model.config.to_dict()) if token < self.vocab_size]
        self.never_sampled = torch.tensor(never, dtype=torch.long, device=self.device)
        """Ids that stand for images. They have probability 0."""
        self.no_images = ""
        """Reason why the model reads no images, if `vision` is None."""
        self.vision: Vision | None = None
        self._tower = names_of_other_parts(self.model) if is_multimodal(model.config) else set()
        try:
            self.vision = Vision(self.model, directory, min_pixels=pixels[0], max_pixels=pixels[1])
        except NoImages as error:
            self.no_images = str(error)

    def _pack(self) -> None:
        """Copy the weights of large layers into the order in which oneDNN reads them.

        A decode pass multiplies few rows with all weights, and its time is that of reading them. In a file's
        order they are read at half of the memory's bandwidth, and two threads read hardly faster than one."""
        for layer in self._packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, PASS_ROWS)
            layer.forward = partial(_multiply, packed, layer.bias)

    def hidden(self, ids_BT: Tensor, position: Tensor, slots: Slots, images: Any = None) -> Tensor:
        """Return the last hidden states `[B, T, E]` of a pass that reads and writes the cache through
        `slots`. `position` is the rotary position, `[B, T]` or `[3, B, T]`. `images` are the features of
        placeholder tokens (`Vision.batch`)."""
        self.experts = []
        how: dict[str, Any] = {"position_ids": position, "use_cache": False, "slots": slots}
        if images is None:
            out = self._decoder(input_ids=ids_BT, **how)
        else:
            out = self.model.base_model(input_ids=ids_BT, mm_encoder_outputs={"image": images}, **how)
        return cast(Tensor, out.last_hidden_state)

    def prefill(self, prefixes: Sequence[Prefix], slots: Prefill) -> Tensor:
        """Compute prefixes from their first token on, right-padded to the longest. Return their last hidden
        states `[B, T, E]`."""
        ids_BT = pad_sequence([torch.tensor(prefix.ids) for prefix in prefixes], batch_first=True)
        ids_BT, length = ids_BT.long().to(self.device), ids_BT.shape[1]
        if self.vision is not None and any(prefix.media for prefix in prefixes):
            position, images = self.vision.batch(prefixes, length, self.device)
            return self.hidden(ids_BT, position[0] if len(position) == 1 else position, slots, images)
        position_BT = torch.arange(length, device=self.device).expand(len(prefixes), -1)
        return self.hidden(ids_BT, position_BT, slots)

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
        """Load `tensors`, by their names in a model's files. Of tied tensors, one name is enough. Without any
        tensor of the vision tower, the tower stays as it is. Raises `EngineError` without any change unless
        all tensors fit."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != self._shapes:
            tower = names_in_files(self.model, {name: self._tensors[name] for name in self._tower})
            keeps = not (tower.keys() | self._tower) & shapes.keys()
            try:
                storage = storage_of(self.model, shapes | tower if keeps else shapes)
            except NamesMismatch as error:
                raise EngineError(f"the snapshot {error}") from error
            self._storage = {n: held for n, held in storage.items() if not (keeps and n in self._tower)}
            self._shapes = shapes
        if self.vision is not None:
            self.vision.forget()
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
        if self.vision is not None:
            self.vision.forget()
        self._parking.leave(self._on_gpu())

    def return_to_device(self) -> None:
        self._parking.come_back()

    @exact_products()
    def check(self) -> None:
        """Compare the engine's passes with the model's own forward pass on a few ids. A model with another
        kind of attention or head is then refused, instead of sampled wrongly. A model whose images are
        computed in another way is used without images."""
        never = set(self.never_sampled.tolist())
        count = min(12, self.model.config.get_text_config().max_position_embeddings)
        ids = [token for i in range(count) if (token := i * 7 % self.vocab_size) not in never]
        if problem := self._difference(Prefix(np.array(ids, np.int32)), 4, {}):
            raise EngineError(problem)
        if self.vision is None:
            return
        prefix, inputs = self.vision.trial(ids)
        if problem := self._difference(prefix, len(prefix.ids) - 4, inputs):
            log.warning("the model is used without images", reason=problem)
            self.vision, self.no_images = None, problem
        else:
            self.vision.forget()

    def _difference(self, prefix: Prefix, split: int, inputs: Mapping[str, Tensor]) -> str:
        """Compute the first `split` tokens in one pass and the others one by one. Return how the logits
        differ from those of the model's own forward pass with the further arguments `inputs`, or ""."""
        ids = torch.from_numpy(prefix.ids).long().to(self.device)[None]
        kind, count = type(self.model).__name__, ids.shape[1]
        kv = SlotKV(1, count, self.device)
        kv.reserve(count)
        row = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            shift = self.vision.read(prefix).shift if self.vision is not None and prefix.media else 0
            at = torch.arange(count, device=self.device)[None]
            mine = [self.prefill([Prefix(prefix.ids[:split], prefix.media)], Prefill(kv, row, row))[0]]
            for t in range(split, count):
                step = Decode(kv, at[0, t : t + 1], t + 1)
                mine.append(self.hidden(ids[:, t : t + 1], at[:, t : t + 1] + shift, step)[0])
            got = self.logits(torch.cat(mine))
            # Other implementations ignore unknown features, such as soft caps.
            self.model.set_attn_implementation("eager")
            more = {name: value.to(self.device) for name, value in inputs.items()}
            want = self.model(input_ids=ids, use_cache=False, **more).logits[0].float()
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"the local engine cannot run {kind}: {error}"
        finally:
            self.model.set_attn_implementation(self._attention)
        worst = float((got - want).abs().max())
        if worst <= CHECK_TOLERANCE[self.dtype] * max(1.0, float(want.abs().max())):
            return ""
        return (
            f"the local engine's logits for {kind} differ by {worst:.3g} from the model's own: it does not "
            "support this architecture"
        )
