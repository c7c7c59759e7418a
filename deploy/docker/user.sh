#!/bin/sh
# The user of every image, who owns one folder. Its number is named by the manifests, which own volumes by it.
set -eu
useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/areal-async --shell /usr/sbin/nologin areal
install -d -o areal -g areal -m 0750 /var/lib/areal-async
