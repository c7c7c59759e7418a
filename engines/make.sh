#!/bin/bash
# usage: make.sh FOLDER ENGINE...   makes the environments FOLDER/ENGINE, each by ENGINE/setup.sh.
#
# The CUDA build X-cuda of an engine lies in FOLDER/X. A CPU build does not replace it there.
# An environment that was finished for the files as they are now is left alone. One without a mark, which was made
# in another way or given up half-way, is kept if its check.py passes. Everything else is made anew.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
# Two at once would build into each other.
exec 9> "$folder/.lock"
flock 9

finish_cuda() {
    [ "$engine" != "${engine%-cuda}" ] || return 0
    touch "$venv/.cuda"
    "$here/cuda_home.sh" "$venv"
}

make_one() {
    local engine=$1 venv mark pins
    venv=$folder/${engine%-cuda}
    mark=$venv/.complete
    if [ -f "$venv/.cuda" ] && [ "$engine" = "${engine%-cuda}" ]; then
        echo "$venv has the CUDA build, which the CPU build would replace. Name another folder with AREAL_ASYNC_ENGINES." >&2
        exit 1
    fi
    pins=$(cd "$here/$engine" && find . -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
    if [ -f "$mark" ] && [ "$(cat "$mark")" = "$pins" ]; then
        finish_cuda
        return
    fi
    if [ ! -f "$mark" ] && [ -x "$venv/bin/python" ]; then
        echo "Checking the environment $venv, which has no mark of being finished"
        if (cd / && "$venv/bin/python" -W ignore "$here/$engine/check.py") > /dev/null 2>&1; then
            finish_cuda
            echo "$pins" > "$mark"
            return
        fi
        echo "It is broken"
    fi
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "$venv is no virtual environment: it is not touched. Move it away, or name another folder." >&2
        exit 1
    fi
    echo "Making the environment $venv (some GB, a few minutes)"
    rm -rf "$venv"
    "$here/$engine/setup.sh" "$venv"
    finish_cuda
    (cd / && "$venv/bin/python" -W ignore "$here/$engine/check.py")
    echo "$pins" > "$mark"
}

# Each waits for the network and unpacks on one core: all at once.
made=()
for engine in "$@"; do
    make_one "$engine" &
    made+=($!)
done
failed=0
for one in "${made[@]}"; do
    wait "$one" || failed=$?
done
exit $failed
