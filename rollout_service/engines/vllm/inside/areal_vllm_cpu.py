"""An addition to vLLM's worker on a CPU. It runs in the server's environment, and imports nothing of ours.

A mixture's experts are packed for the kernel when they are first loaded. vLLM 0.32.0 does not pack them again
when weights are reloaded, but copies the plain ones over the packed, which the kernel then reads as packed:
wrong numbers, and no error. Experts whose kernel is forgotten are set up as for the first time.
"""

from typing import Any


class CpuReload:
    """Mixed into the worker by `--worker-extension-cls`."""

    model_runner: Any

    def forget_packed_experts(self) -> int:
        """Called before each reload; returns how many layers of experts there are."""
        methods = (getattr(module, "quant_method", None) for module in self.model_runner.model.modules())
        packed = 0
        for method in methods:
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
                packed += 1
        return packed
