#!/bin/sh
# Compiles a distribution: its compiled copy takes the place of its sources. Does nothing unless COMPILED says so.
#
#   compile.sh agents ./protos ./agents       its name, and it with what it needs of ours
#
# Compiled where it is installed, it fits that Python and that libc, whatever the machine has that makes the image. mypy,
# and the packages that it must know, are installed into an environment that goes into no image.
set -eu
[ -n "${COMPILED:-}" ] || exit 0
name=$1
shift
own=/opt/compiling
python3 -m venv $own
if ! ls dist/wheels/*.whl >/dev/null 2>&1 || ! ls dist/compiling/*.whl >/dev/null 2>&1; then
    $own/bin/pip wheel --no-cache-dir --wheel-dir dist/compiling --constraint constraints.txt --requirement deploy/compiled/requirements.txt hatchling "$@"
    rm -f dist/compiling/shoal*.whl
else
    ./verify.sh dist/wheels
fi
./verify.sh dist/compiling
$own/bin/pip install --no-index --find-links dist/wheels --find-links dist/compiling --no-cache-dir --constraint constraints.txt --requirement deploy/compiled/requirements.txt "$@"
$own/bin/python deploy/compiled/build.py compiled --only "$name"
rm -rf "$name"
mv "compiled/$name" "$name"
