"""Ends with status 0 in an environment that has the vLLM of setup.sh. Run with that environment's Python.

Without a GPU, as in the build of an image, the server's kernels cannot load and only versions are checked."""

import importlib
import importlib.metadata
import sys

import torch

if importlib.metadata.version("vllm") != "0.32.0":
    sys.exit("another release of vLLM is installed")
if torch.version.cuda is None:
    sys.exit(f"torch {torch.__version__} has no CUDA")
if torch.cuda.is_available():
    importlib.import_module("vllm.entrypoints.openai.api_server")
