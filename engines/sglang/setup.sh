#!/bin/bash
# usage: setup.sh VENV   makes VENV: the real, unpatched SGLang server on the CPU build of torch.
# Its wheel asks for CUDA packages that a CPU needs none of, so the rest is installed first, then the wheel alone.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
"${PYTHON:-python3.11}" -m venv "$venv"
pins=("$venv/bin/python" "$here/../../deploy/pins.py")
"${pins[@]}" install sglang
"${pins[@]}" install sglang-alone
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here/sgl_kernel" "$here/sglang_cpu_stubs.py" "$packages/"
echo 'import sglang_cpu_stubs' > "$packages/sglang_cpu_stubs.pth"
