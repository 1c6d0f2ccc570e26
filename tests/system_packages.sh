#!/usr/bin/env bash
# The Debian packages that some tests need; a test whose package is missing says so and is skipped.
set -euo pipefail
packages="libaio-dev python3.11-doc iproute2 openssh-client openssh-server pdsh slurmctld slurmd slurm-client munge dataset-fashion-mnist faketime bible-kjv bible-kjv-text linux-doc-6.1"
missing=""
for package in $packages; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 (a list of packages)
apt-get install -y -qq --no-install-recommends $missing
