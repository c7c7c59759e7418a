"""An addition to vLLM's worker on a CPU. It runs in the server's environment, and imports nothing of this
project.

At the first load, a mixture's experts are packed for the kernel. On a reload, vLLM 0.32.0 does not pack them
again, but copies the plain weights over the packed ones. The kernel then reads them as packed, which gives
wrong numbers without an error. This addition makes vLLM forget the experts' kernel, so that the reload sets
them up as at the first load.
"""

from typing import Any


class CpuReload:
    """Extension of the worker, set by `--worker-extension-cls`."""

    model_runner: Any

    def forget_packed_experts(self) -> int:
        """Forget the kernels before a reload. Return the number of layers with experts."""
        methods = (getattr(module, "quant_method", None) for module in self.model_runner.model.modules())
        packed = 0
        for method in methods:
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
                packed += 1
        return packed
