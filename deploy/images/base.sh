#!/bin/sh
# Has the Debian that all images stand on: the one that is there, else the one that a registry gives, else one made by
# debootstrap (needs root), without documentation and translations. Any other Debian or Ubuntu: make images BASE=NAME:TAG.
set -eu
base=${1:-debian:bookworm-slim}
suite=bookworm
mirror=${DEBIAN_MIRROR:-} # empty: the one that debootstrap knows

docker version >/dev/null
if docker image inspect "$base" >/dev/null 2>&1 || docker pull --quiet "$base" 2>/dev/null; then
    exit 0
fi
echo "no registry has $base: it is made with debootstrap" >&2
run=""
[ "$(id -u)" = 0 ] || run=sudo
if ! command -v debootstrap >/dev/null && [ ! -x /usr/sbin/debootstrap ]; then
    $run apt-get update -q
    $run apt-get install -q -y --no-install-recommends debootstrap
fi
root=$(mktemp -d)
trap '$run rm -rf "$root"' EXIT
$run env PATH="$PATH:/usr/sbin:/sbin" debootstrap --variant=minbase "$suite" "$root" ${mirror:+"$mirror"} >&2
for folder in var/cache/apt var/lib/apt/lists var/log usr/share/doc usr/share/man usr/share/locale usr/share/info; do
    $run find "$root/$folder" -mindepth 1 -delete
done
$run tar -C "$root" --numeric-owner -c . | docker import --change 'CMD ["bash"]' - "$base"
