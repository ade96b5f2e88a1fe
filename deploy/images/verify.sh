#!/bin/sh
# Every wheel in a folder is, byte for byte, one of those that `make lock` has written down for this kind of machine; fails
# at the first that is not.
set -eu
list=$(cd "$(dirname "$0")" && pwd)/wheels-$(uname -m).sha256
if [ ! -s "$list" ]; then
    echo "no hashes are known for $(uname -m): make lock, and look at what it wrote" >&2
    exit 1
fi
cd "$1"
for wheel in *.whl; do
    if ! sha256sum "$wheel" | grep -F -q -x -f "$list"; then
        echo "$wheel is not what $(basename "$list") says: it was changed, or make lock was left out" >&2
        exit 1
    fi
done
