#!/bin/sh
# Prints the image that all images stand on, once it is there: the one that is named, which is pulled where it is not here;
# else one that debootstrap makes (needs root), without documentation and translations. That one is of the same suite and
# verified by Debian's keys, but of the day on which it was made: no digest can name it. Any other Debian or Ubuntu:
# make images BASE=NAME@sha256:DIGEST.
set -eu
base=$1
suite=bookworm
made=shoal/base:$suite
mirror=${DEBIAN_MIRROR:-} # empty: the one that debootstrap knows

docker version >/dev/null
if docker image inspect "$base" >/dev/null 2>&1 || docker pull --quiet "$base" >/dev/null 2>&1; then
    echo "$base"
    exit 0
fi
echo "no registry gives $base: all images stand on $made, made by debootstrap" >&2
if docker image inspect "$made" >/dev/null 2>&1; then
    echo "$made"
    exit 0
fi
run=""
[ "$(id -u)" = 0 ] || run=sudo
if ! command -v debootstrap >/dev/null && [ ! -x /usr/sbin/debootstrap ]; then
    $run apt-get update -q >&2
    $run apt-get install -q -y --no-install-recommends debootstrap >&2
fi
root=$(mktemp -d)
trap '$run rm -rf "$root"' EXIT
$run env PATH="$PATH:/usr/sbin:/sbin" debootstrap --variant=minbase "$suite" "$root" ${mirror:+"$mirror"} >&2
for folder in var/cache/apt var/lib/apt/lists var/log usr/share/doc usr/share/man usr/share/locale usr/share/info; do
    $run find "$root/$folder" -mindepth 1 -delete
done
$run tar -C "$root" --numeric-owner -c . | docker import --change 'CMD ["bash"]' - "$made" >&2
echo "$made"
