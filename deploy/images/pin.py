"""Writes which images were built, by digest, in the forms that compose and Kubernetes take.

    pin.py                        of the images that are here: dist/images.yml
    pin.py registry.example       of what was pushed there: dist/images.yml and dist/images/kustomization.yaml

`dist/images.yml` is a second file for compose: each service of ours by its image's id, or by the digest that the
registry gave it. `dist/images/kustomization.yaml` is a component for an overlay. A cluster pulls, and only a registry
gives the digest by which one pulls: there is none before a push.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OURS = "shoal/"
HEAD = "# Made by deploy/images/pin.py: what was built, and nothing that was given its name since.\n"


class Missing(Exception):
    """An image, or its digest, that is not here: `found: ..; wanted: ..; try: .. (CODE)`."""


def services() -> dict[str, str]:
    """The image of each service of ours, without its tag."""
    listed: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    named = {name: str(service["image"]).partition(":")[0] for name, service in listed.items()}
    return {name: image for name, image in named.items() if image.startswith(OURS)}


def resolve_digest(image: str, registry: str = "") -> str:
    """image: as it is built. Raises Missing."""
    name = f"{registry}/{image}" if registry else image
    done = subprocess.run(["docker", "image", "inspect", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        remedy = f"make push REGISTRY={registry}" if registry else "make images"
        raise Missing(f"found: no image {name}; wanted: the one that was built; try: {remedy} (NOT_FOUND)")
    (seen,) = json.loads(done.stdout)
    if not registry:
        return str(seen["Id"])
    for digest in seen.get("RepoDigests") or ():
        if digest.startswith(f"{name}@sha256:"):
            return str(digest)
    remedy = f"make push REGISTRY={registry}"
    raise Missing(f"found: {name} without a digest; wanted: one that {registry} gave; try: {remedy} (NOT_FOUND)")


def compose(images: dict[str, str]) -> str:
    """images: by the name in the manifests."""
    return HEAD + yaml.safe_dump({"services": {name: {"image": images[image]} for name, image in services().items()}})


def component(images: dict[str, str]) -> str:
    """images: as `compose` takes them, each with its registry's digest."""
    named = [(name, *where.rsplit("@", 1)) for name, where in sorted(images.items())]
    rows = [{"name": name, "newName": new, "digest": digest} for name, new, digest in named]
    kind = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "images": rows}
    return HEAD + yaml.safe_dump(kind, sort_keys=False)


def main(registry: str = "", out: Path = ROOT / "dist") -> int:
    """Exit status."""
    try:
        images = {image: resolve_digest(image, registry) for image in sorted(set(services().values()))}
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 1
    out.mkdir(exist_ok=True)
    (out / "images.yml").write_text(compose(images))
    written = "images.yml"
    if registry:
        (out / "images").mkdir(exist_ok=True)
        (out / "images" / "kustomization.yaml").write_text(component(images))
        written += " and images/kustomization.yaml"
    print(f"by digest in {out}: {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
