#!/usr/bin/env bash
# Sealed hosts on one machine (root): each has its own mount, IPC, PID and network namespace, a private /tmp, /dev/shm, /run,
# /root and /home, and an address 10.77.0.N on a bridge that lives in a namespace of its own. Nothing but the network joins them.
#
#   hosts.sh up N             start N hosts (and the switch); their pids lie in $STATE
#   hosts.sh add I            start host I beside those that are there
#   hosts.sh on I CMD…        run a command on host I (1…N)
#   hosts.sh cut I | mend I   take host I's link down | up
#   hosts.sh kill I           end everything on host I at once (its PID namespace)
#   hosts.sh capture I FILE   write down every frame that host I sends and receives, until the host is gone
#   hosts.sh down             end all
#
# $SEALED_HOSTS_KEEP names folders (with : between) that stay visible, for reading alone: the interpreter, the checkout.
set -euo pipefail
STATE=${SEALED_HOSTS_STATE:-/run/sealed-hosts}
KEEP=${SEALED_HOSTS_KEEP:-}
mkdir -p "$STATE"
pid() { cat "$STATE/$1.pid"; }
inside() { local i=$1; shift; nsenter -t "$(pid "$i")" -m -n -i -p -- "$@"; }

start_host() {
  local i=$1
  KEEP="$KEEP" unshare -m -n -i -p --fork --kill-child=KILL --mount-proc bash -c '
    mount --make-rprivate /
    IFS=: read -ra kept <<<"$KEEP"
    mount -t tmpfs tmpfs /mnt
    for n in "${!kept[@]}"; do mkdir "/mnt/$n"; mount --bind "${kept[$n]}" "/mnt/$n"; mount -o remount,bind,ro "/mnt/$n"; done
    for d in /tmp /dev/shm /root /home /run; do mount -t tmpfs tmpfs "$d"; done
    chmod 1777 /tmp /dev/shm
    for n in "${!kept[@]}"; do mkdir -p "${kept[$n]}"; mount --bind "/mnt/$n" "${kept[$n]}"; done
    # What is left of the disk is for reading alone: nobody can leave something there for another host.
    awk "\$3 !~ /proc|sysfs|dev|tmpfs|mqueue|cgroup/ { print \$2 }" /proc/self/mounts | while read -r place; do
      mount -o remount,bind,ro "$place" 2>/dev/null || true
    done
    ip link set lo up
    exec sleep infinity' >/dev/null 2>&1 </dev/null &
  local outer=$!
  # The first process inside is the child of unshare; it is what nsenter joins.
  local child=""
  for _ in $(seq 100); do child=$(pgrep -P "$outer" | head -n 1 || true); [ -n "$child" ] && break; sleep 0.05; done
  echo "$outer" >"$STATE/$i.outer"; echo "$child" >"$STATE/$i.pid"
  for _ in $(seq 100); do [ "$(nsenter -t "$child" -m -p -- ps -o comm= -p 1 2>/dev/null)" = sleep ] && break; sleep 0.05; done
}

join_host() {
  local i=$1
  start_host "$i"
  ip link add "veth$i" type veth peer name "port$i"
  ip link set "port$i" netns "$(pid switch)"
  ip link set "veth$i" netns "$(pid "$i")"
  nsenter -t "$(pid switch)" -n -- ip link set "port$i" master br0 up
  inside "$i" ip link set "veth$i" name eth0
  inside "$i" ip addr add "10.77.0.$i/24" dev eth0
  inside "$i" ip link set eth0 up
}

case $1 in
  up)
    unshare -n bash -c 'exec sleep infinity' >/dev/null 2>&1 </dev/null & echo $! >"$STATE/switch.pid"
    sleep 0.2
    nsenter -t "$(pid switch)" -n -- ip link add br0 type bridge
    nsenter -t "$(pid switch)" -n -- ip link set br0 up
    for i in $(seq "$2"); do join_host "$i"; done ;;
  add) join_host "$2" ;;
  on) i=$2; shift 2; inside "$i" "$@" ;;
  cut) nsenter -t "$(pid switch)" -n -- ip link set "port$2" down ;;
  mend) nsenter -t "$(pid switch)" -n -- ip link set "port$2" up ;;
  capture)
    nsenter -t "$(pid switch)" -n -- "${SEALED_HOSTS_PYTHON:-python3}" -c '
import socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
wire.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb", buffering=0) as file:
    while True:
        file.write(wire.recv(65535))' "port$2" "$3" >/dev/null 2>&1 </dev/null & echo $! >"$STATE/capture.outer" ;;
  kill) kill -KILL "$(cat "$STATE/$2.outer")" "$(pid "$2")" 2>/dev/null || true ;;
  down)
    for f in "$STATE"/*.outer "$STATE"/*.pid; do [ -e "$f" ] && kill -KILL "$(cat "$f")" 2>/dev/null || true; done
    rm -rf "$STATE" ;;
  *) sed -n '2,14p' "$0"; exit 2 ;;
esac
