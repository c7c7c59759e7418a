#!/bin/bash
# usage: cuda_home.sh VENV   makes VENV/cuda: the CUDA compiler of the environment VENV in the form of a toolkit.
#
# Servers compile some kernels when they run. They look for CUDA_HOME/bin/nvcc, and link with CUDA_HOME/lib64. The
# wheels of CUDA have their libraries in another folder, under names that a linker does not know.
set -euo pipefail
venv=$1
wheels=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13)
if [ ! -x "$wheels/bin/nvcc" ]; then
    echo "$venv has no nvcc in $wheels" >&2
    exit 1
fi
home=$venv/cuda
rm -rf "$home"
mkdir -p "$home/lib64"
for part in bin include nvvm; do
    ln -s "$wheels/$part" "$home/$part"
done
for library in "$wheels"/lib/*; do
    name=$(basename "$library")
    ln -s "$library" "$home/lib64/$name"
    case $name in
    lib*.so.*) ln -sf "$library" "$home/lib64/${name%%.so.*}.so" ;;
    esac
done
