#!/usr/bin/env bash
# The Debian packages that some tests need; a test whose package is missing says so and is skipped. `--list` prints them and installs nothing.
set -euo pipefail
packages="libaio-dev python3.11-doc iproute2 openssh-client openssh-server pdsh slurmctld slurmd slurm-client munge openmpi-bin mpich locales dataset-fashion-mnist faketime bible-kjv bible-kjv-text linux-doc-6.1"
if [ "${1:-}" = --list ]; then
    echo "$packages"
    exit
fi
missing=""
for package in $packages; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 (a list of packages)
apt-get install -y -qq --no-install-recommends $missing
