"""`COMPILED=yes` of images and bundles: what can be said without a container engine."""

import fnmatch
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
IMAGES = ROOT / "deploy/images"


def stages() -> dict[str, tuple[str, list[str]]]:
    """By name: what a stage stands on, and its own lines."""
    text = (IMAGES / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, tuple[str, list[str]]] = {}
    for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        first, *lines = part.splitlines()
        base, _, name = first.split()
        found[name] = base, [each for each in lines if each and not each.startswith("#")]
    return found


def lines_of(name: str) -> list[str]:
    """The lines of a stage after those of what it stands on."""
    base, lines = stages().get(name, ("", []))
    return [*lines_of(base), *lines] if base else lines


def test_nothing_compiled_is_bundled_for_another_kind_of_machine() -> None:
    command = ["make", "--no-print-directory", "bundle", "COMPILED=yes", f"ARCH={OTHER}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"found: COMPILED for {OTHER}; wanted: this machine's kind, {platform.machine()}; "
        f"try: make bundle COMPILED=yes on such a machine, or ARCH={OTHER} without COMPILED (USAGE)"
    )


@pytest.mark.parametrize("stage", ["agent-files", "coordinator-files", "operator-files"])
def test_an_image_installs_what_was_compiled(stage: str) -> None:
    """Whatever of it can be compiled is, before it is installed, and after its sources are there."""
    lines = lines_of(stage)
    (installed,) = [each for each in lines if each.startswith("RUN ./install.sh")]
    for name in ("protos", "agents"):
        if f"./{name}" not in installed:
            continue
        (compiled,) = [each for each in lines if each.startswith(f"RUN ./compile.sh {name} ")]
        assert lines.index(f"COPY {name} ./{name}") < lines.index(compiled) < lines.index(installed)
    assert any(re.search(r"^ENV .*COMPILED=\$\{COMPILED\}", each) for each in lines), "the scripts read it"


def test_a_build_is_given_every_file_that_it_copies() -> None:
    """What `.dockerignore` keeps from it is missing only where an engine builds."""
    rules = (ROOT / ".dockerignore").read_text().split()
    for _, lines in stages().values():
        for source in (word for each in lines if each.startswith("COPY ") for word in each.split()[1:-1]):
            if source.startswith(("--from", "/opt/")):
                continue
            is_ignored = False
            for rule in rules:
                pattern = rule.removeprefix("!")
                if any(
                    fnmatch.fnmatch(part, pattern)
                    for part in (source, *[str(each) for each in Path(source).parents][:-1])
                ):
                    is_ignored = not rule.startswith("!")
            assert not is_ignored, source


def test_without_compiled_sources_stay_as_they_are(tmp_path: Path) -> None:
    shutil.copy(IMAGES / "compile.sh", tmp_path)
    (tmp_path / "protos").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "COMPILED"}
    for given in ({}, {"COMPILED": ""}):
        subprocess.run(["./compile.sh", "protos", "./protos"], cwd=tmp_path, env={**environment, **given}, check=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["compile.sh", "protos"]
