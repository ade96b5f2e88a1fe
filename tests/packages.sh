#!/bin/sh
# Debian packages that tests need: a C compiler and headers, for the library that stands between a program and its disk.
set -eu
missing=""
command -v gcc >/dev/null || missing="$missing gcc"
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ -n "$missing" ] || exit 0
echo "installing$missing"
run=""
[ "$(id -u)" = 0 ] || run=sudo
$run apt-get update -q
# shellcheck disable=SC2086 # a list of names
$run env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
