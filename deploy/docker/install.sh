#!/bin/sh
# usage: install.sh ROLE SOURCE TARGET   makes the environment of an image: TARGET, from the checkout SOURCE.
#
# ROLE is light (CPU build of torch) or trainer (CUDA build). Packages are those of constraints.txt or deploy/cuda,
# each file checked against hashes.txt (deploy/pins.py). PYTHON names the interpreter.
# WHEELS names a folder of wheels, and then no index is asked; otherwise pip's own settings say where packages are found.
# SOURCE is built in a copy, so it may be read-only.
set -eu
role=$1 source=$2 target=$3
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $role in
light) packages=light ;;
trainer) packages=cuda-image ;;
*) echo "install.sh: no role $role: it is light or trainer" >&2; exit 2 ;;
esac
mkdir -p "$work/source/deploy"
cp -R "$source/deploy/pins.py" "$source/deploy/cuda" "$work/source/deploy"
for name in pyproject.toml constraints.txt hashes.txt README.md LICENSE areal_async replay_buffer reward_service rollout_service trainer_service; do
    cp -R "$source/$name" "$work/source/$name"
done

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
if [ -n "${WHEELS:-}" ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS"
fi
"$python" -m venv "$target"
"$target/bin/python" "$work/source/deploy/pins.py" install "$packages"

# What is built is tried before it becomes a layer.
cd /
"$target/bin/pip" check
"$target/bin/areal-async" --version
"$target/bin/python" -c 'import ray, torch; print("ray", ray.__version__, "torch", torch.__version__)'
