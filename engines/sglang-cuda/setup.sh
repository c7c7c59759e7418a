#!/bin/bash
# usage: setup.sh VENV   makes VENV: the SGLang server with its CUDA kernels, for a machine with a GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" "$here/../../deploy/pins.py" install sglang-cuda
