"""What a job on Megatron-Core needs to run on a CPU: a back end, and a model with an output layer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

ON_CPU = """
from trainer_service.backends.megatron import Megatron


class OnCpu(Megatron):
    devices = ("cpu",)

    def __call__(self, *args, **kwargs):
        from tests.megatron_cpu import install

        install()
        return super().__call__(*args, **kwargs)


megatron = OnCpu()
"""
"""A file of back ends; it names `megatron`."""


def untie(folder: Path) -> None:
    """Give the model in a directory an output layer of its own, with the values of its embedding."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
