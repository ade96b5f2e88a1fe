#!/bin/sh
# What an image is made of: itself by digest, then every Debian package and every Python distribution with its version.
set -eu
docker image inspect --format "$1 {{.Id}}" "$1"
docker run --rm --network none --entrypoint dpkg-query "$1" --show --showformat 'deb ${Package} ${Version}\n'
docker run --rm --network none --entrypoint sh "$1" -c 'cd /opt/shoal/lib/python3*/site-packages 2>/dev/null || exit 0
    for found in *.dist-info; do
        found=${found%.dist-info}
        echo "python ${found%-*} ${found##*-}"
    done'
