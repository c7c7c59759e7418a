"""The `local` engine: a Hugging Face causal language model in torch, in this process."""

from rollout_service.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
