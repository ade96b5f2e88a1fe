"""A54: the supply chain. Images are named by digest, not by a tag that somebody can move: those of others in the
files themselves, ours by what `make images` and `make push` write."""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[3]
OVERLAYS: Final = sorted(path.parent for path in (ROOT / "deploy/kubernetes/overlays").glob("*/kustomization.yaml"))
BY_DIGEST: Final = re.compile(r"[a-z0-9./:-]+@sha256:[0-9a-f]{64}")
BY_ID: Final = re.compile(r"sha256:[0-9a-f]{64}")
REGISTRY: Final = "registry.example:5000"
PIN: Final[dict[str, Any]] = runpy.run_path(str(ROOT / "deploy/images/pin.py"))
ENGINE: Final = f"""#!{sys.executable}
import hashlib, json, os, sys
here = os.environ["IMAGES"].split()
match sys.argv[1:]:
    case ["version"]:
        pass
    case ["image", "inspect", name] if name in here:
        of = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
        pushed = [name.partition("@")[0] + "@" + of] if name.startswith("{REGISTRY}/") else []
        print(json.dumps([{{"Id": of, "RepoDigests": pushed}}]))
    case ["pull", "--quiet", name] if name in os.environ.get("GIVEN", "").split():
        print("pulled")
    case _:
        sys.exit(1)
"""
"""An engine with these images, in the place of `docker`: what is written follows from what it answers."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(ENGINE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IMAGES", "")
    return monkeypatch


def services() -> dict[str, str]:
    listed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return {name: service["image"] for name, service in listed.items()}


def images() -> list[str]:
    found = re.search(r"^IMAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1).split()


def digest_of(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def kustomize_build(folder: Path) -> list[dict[str, Any]]:
    beside = Path(sys.executable).with_name("kubectl")
    program = str(beside) if beside.exists() else shutil.which("kubectl")
    assert program is not None, "kubectl is missing: `make packages` installs one"
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def images_of(manifests: list[dict[str, Any]]) -> set[str]:
    pods = [each["spec"]["template"]["spec"] for each in manifests if "template" in each.get("spec", {})]
    return {one["image"] for pod in pods for one in (*pod.get("initContainers", ()), *pod["containers"])}


def test_a54_an_image_of_others_is_named_by_digest() -> None:
    makefile, dockerfile = ((ROOT / name).read_text() for name in ("Makefile", "deploy/images/Dockerfile"))
    (base,) = re.findall(r"^BASE \?= (.*)$", makefile, re.MULTILINE)
    assert re.findall(r"^ARG BASE=(.*)$", dockerfile, re.MULTILINE) == [base], "one base, however it is built"
    foreign = {base, *(image for image in services().values() if not image.startswith("shoal/"))}
    for overlay in OVERLAYS:
        foreign |= {image for image in images_of(kustomize_build(overlay)) if not image.startswith("shoal/")}
    assert len(foreign) == 2, foreign
    assert [image for image in foreign if not BY_DIGEST.fullmatch(image)] == []


def test_a54_compose_takes_what_was_built_by_its_id(engine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine.setenv("IMAGES", " ".join(f"shoal/{name}" for name in images()))
    assert PIN["main"](out=tmp_path) == 0
    beside = yaml.safe_load((tmp_path / "images.yml").read_text())["services"]
    named = services() | {name: service["image"] for name, service in beside.items()}
    assert [name for name, image in named.items() if not (BY_ID.fullmatch(image) or BY_DIGEST.fullmatch(image))] == []
    assert named.keys() == services().keys()
    for name, image in beside.items():
        assert image == {"image": digest_of(services()[name].partition(":")[0])}
    assert not (tmp_path / "images").exists(), "what was not pushed has no digest that a cluster could pull by"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a54_kubernetes_takes_what_was_pushed_by_its_digest(
    engine: pytest.MonkeyPatch, tmp_path: Path, overlay: Path
) -> None:
    engine.setenv("IMAGES", " ".join(f"{REGISTRY}/shoal/{name}" for name in images()))
    assert PIN["main"](REGISTRY, out=tmp_path) == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    listed = {"resources": [os.path.relpath(overlay, mine)], "components": ["../images"]}
    (mine / "kustomization.yaml").write_text(json.dumps(kind | listed))
    wanted = {
        image: f"{REGISTRY}/{image}@{digest_of(f'{REGISTRY}/{image}')}" for image in images_of(kustomize_build(overlay))
    }
    assert wanted
    assert images_of(kustomize_build(mine)) == set(wanted.values())
    beside = yaml.safe_load((tmp_path / "images.yml").read_text())["services"]
    assert all(BY_DIGEST.fullmatch(service["image"]) for service in beside.values())


@pytest.mark.parametrize(("registry", "command"), [("", "make images"), (REGISTRY, f"make push REGISTRY={REGISTRY}")])
def test_a54_what_was_not_built_or_pushed_is_not_pinned(
    engine: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], registry: str, command: str
) -> None:
    engine.setenv("IMAGES", "shoal/agent" if registry else "")
    assert PIN["main"](registry, out=tmp_path / "out") == 1
    assert f"try: {command} (NOT_FOUND)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["here", "registry", "nowhere"])
def test_a54_images_stand_on_what_is_pinned_or_say_what_they_stand_on(engine: pytest.MonkeyPatch, where: str) -> None:
    base = f"debian:bookworm-slim@{digest_of('debian')}"
    engine.setenv("IMAGES", base if where == "here" else "shoal/base:bookworm")
    engine.setenv("GIVEN", base if where == "registry" else "")
    done = subprocess.run([ROOT / "deploy/images/base.sh", base], capture_output=True, text=True, check=True)
    assert done.stdout == ("shoal/base:bookworm\n" if where == "nowhere" else f"{base}\n")
    assert ("made by debootstrap" in done.stderr) is (where == "nowhere")


def test_a54_the_commands_that_pin_are_what_the_guides_say() -> None:
    planned = {
        target: subprocess.run(["make", "-n", *target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for target in (("images",), ("push", f"REGISTRY={REGISTRY}"))
    }
    built, pushed = planned.values()
    assert "--build-arg BASE=$base" in built
    assert built.index("docker build") < built.index("deploy/images/pin.py")
    assert pushed.index(f"docker push -q {REGISTRY}/shoal/") < pushed.index(f"deploy/images/pin.py {REGISTRY}")
    compose, kubernetes = ((ROOT / "docs/guides" / f"{name}.md").read_text() for name in ("compose", "kubernetes"))
    assert "docker compose -f docker-compose.yml -f dist/images.yml up -d" in compose
    assert "make push REGISTRY=registry.example" in kubernetes
    assert "components: [../../../../dist/images]" in kubernetes
