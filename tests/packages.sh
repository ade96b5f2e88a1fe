#!/bin/sh
# Debian packages that tests need: a C compiler and headers, for the library that stands between a program and its disk;
# the MQTT broker, with its dynamic-security plugin (Debian's package holds both); what makes a network that can be cut;
# etcd, behind which three coordinators keep their state; espeak-ng, which speaks for those who are listened to;
# Prometheus, whose promtool makes alerts fire; systemd, which judges units and boots a machine of its own; kubectl, whose
# kustomize builds manifests; curl, nghttp and h2load, HTTP/2 clients of others; Chromium, in which the dashboard is seen.
set -eu
missing=""
command -v gcc >/dev/null || missing="$missing gcc"
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ -x /usr/sbin/mosquitto ] || missing="$missing mosquitto"
[ -x /usr/sbin/ip ] || [ -x /sbin/ip ] || missing="$missing iproute2"
[ -x /usr/sbin/sysctl ] || [ -x /sbin/sysctl ] || missing="$missing procps"
[ -x /usr/sbin/nft ] || missing="$missing nftables"
[ -x /usr/bin/espeak-ng ] || missing="$missing espeak-ng"
command -v etcd >/dev/null || missing="$missing etcd-server"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
command -v curl >/dev/null || missing="$missing curl"
command -v h2load >/dev/null || missing="$missing nghttp2-client"
[ -x /usr/bin/chromium ] || missing="$missing chromium"
kubectl version --client 2>/dev/null | grep -q "^Kustomize Version" || "$(dirname "$0")/kubectl.sh"
[ -n "$missing" ] || exit 0
echo "installing$missing"
run=""
[ "$(id -u)" = 0 ] || run=sudo
$run apt-get update -q
# shellcheck disable=SC2086 # a list of names
$run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
