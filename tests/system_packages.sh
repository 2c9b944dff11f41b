#!/bin/sh
# Installs the Debian packages that some tests drive (servers, a browser). Without root the tests
# that need them are skipped by name.
set -eu
packages=""
need() { command -v "$1" >/dev/null 2>&1 || packages="$packages $2"; }
# need COMMAND PACKAGE
need promtool prometheus
need shellcheck shellcheck
need systemd-analyze systemd
need npm npm
need etcd etcd-server
need chromium chromium
need ip iproute2
[ -z "$packages" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not root on Debian: tests that need$packages are skipped"
    exit 0
fi
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
