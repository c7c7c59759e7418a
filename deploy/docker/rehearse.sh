#!/bin/bash
# usage: rehearse.sh [FOLDER]   does what the image `light` does, in a folder of its own and without anything of the
# caller's environment but where pip finds packages: the install step, the command with its healthcheck, a Ray node
# with the one of the manifests. `make images-check` calls it; it takes some minutes and 2 GB.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$(mktemp -d)}
children=()
finish() { # shellcheck disable=SC2317
    [ ${#children[@]} = 0 ] || kill "${children[@]}" 2> /dev/null || true
    [ -n "$given" ] || rm -rf "$folder"
}
given=${1:-}
trap finish EXIT
python=$(command -v "${PYTHON:-python3.11}")
mkdir -p "$folder/home" "$folder/etc"
bare=(env -i HOME="$folder/home" PATH="$folder/image/bin:/usr/bin:/bin" RAY_USAGE_STATS_ENABLED=0 PYTHON="$python")
while IFS='=' read -r name value; do bare+=("$name=$value"); done < <(env | grep '^PIP_\|^WHEELS=' || true)

[ -x "$folder/image/bin/areal-async" ] || "${bare[@]}" "$source/deploy/docker/install.sh" light "$source" "$folder/image"

# The command of the image, with a port of its own, until its healthcheck is content.
sed -e "s#^dir: .*#dir: $folder/home/cluster#" -e 's/8470/18470/' -e 's/0\.0\.0\.0/127.0.0.1/' \
    "$source/deploy/compose/cluster.yaml" > "$folder/etc/cluster.yaml"
cd "$folder"
"${bare[@]}" areal-async up "$folder/etc/cluster.yaml" --foreground &
controller=$!
children=("$controller")
asked() { "${bare[@]}" python -c "import urllib.request as r; r.urlopen('$1', timeout=4)" 2> /dev/null; }
for _ in $(seq 60); do asked http://127.0.0.1:18470/healthz && break; sleep 1; done
asked http://127.0.0.1:18470/healthz
"${bare[@]}" AREAL_ASYNC_CLUSTER_DIR="$folder/home/cluster" areal-async status --json
kill -TERM "$controller" && wait "$controller"
children=()
echo "The controller came up and went down."

"${bare[@]}" RAY_AUTH_MODE=disabled ray start --head --block --node-ip-address=127.0.0.1 --port=16380 --num-cpus=0 \
    --dashboard-host=127.0.0.1 --dashboard-port=18265 --dashboard-agent-listen-port=18266 \
    --min-worker-port=0 --max-worker-port=0 --temp-dir="$folder/ray" > "$folder/ray.log" 2>&1 &
node=$!
children=("$node")
for _ in $(seq 90); do asked http://127.0.0.1:18266/api/local_raylet_healthz && break; sleep 1; done
asked http://127.0.0.1:18266/api/local_raylet_healthz
asked http://127.0.0.1:18265/api/gcs_healthz
kill -TERM "$node" && { wait "$node" || true; }
children=()
echo "The Ray node came up and answers its probes."
"${bare[@]}" areal-async doctor
