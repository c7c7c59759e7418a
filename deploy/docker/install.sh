#!/bin/sh
# usage: install.sh ROLE SOURCE TARGET   makes the environment of an image: TARGET, from the checkout SOURCE.
#
# ROLE is light (CPU build of torch) or trainer (the CUDA build that the package index has). Versions are those of
# constraints.txt. PYTHON names the interpreter. WHEELS names a folder of wheels, and then no index is asked;
# otherwise pip's own settings say where packages are found. SOURCE is built in a copy, so it may be read-only.
set -eu
role=$1 source=$2 target=$3
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $role in
light) extras=ray-nodes,s3 ;;
trainer) extras=ray-nodes,s3,megatron ;;
*) echo "install.sh: no role $role: it is light or trainer" >&2; exit 2 ;;
esac
# The lock names the CPU build of torch by its local version, which only an index of CPU builds has.
if [ "$role" = trainer ]; then
    sed 's/^\(torch==[^+]*\)+cpu$/\1/' "$source/constraints.txt" > "$work/constraints.txt"
else
    cp "$source/constraints.txt" "$work/constraints.txt"
fi
mkdir "$work/source"
for name in pyproject.toml README.md LICENSE areal_async replay_buffer reward_service rollout_service trainer_service; do
    cp -R "$source/$name" "$work/source/$name"
done

set -- --quiet --disable-pip-version-check --no-cache-dir
if [ -n "${WHEELS:-}" ]; then
    set -- "$@" --no-index --find-links "$WHEELS"
fi
"$python" -m venv "$target"
"$target/bin/pip" install "$@" --constraint "$work/constraints.txt" torch
"$target/bin/pip" install "$@" --constraint "$work/constraints.txt" "$work/source[$extras]"

# What is built is tried before it becomes a layer.
cd /
"$target/bin/pip" check --disable-pip-version-check
"$target/bin/areal-async" --version
"$target/bin/python" -c 'import ray, torch; print("ray", ray.__version__, "torch", torch.__version__)'
