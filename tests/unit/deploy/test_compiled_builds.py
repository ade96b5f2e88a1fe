"""`COMPILED=yes` of images and bundles: what can be said without a container engine."""

import fnmatch
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OTHER = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
IMAGES = ROOT / "deploy/images"
COMPILED = "google._upb._message"
"""A module that is compiled here, whoever runs this."""


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


class Tree:
    """The Makefile, and the sources that it may compile, in short. Each build leaves a line in `builds`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        shutil.copy(ROOT / "Makefile", root)
        self.builds = root / "builds"
        self.builds.touch()
        python = root / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nmkdir -p dist/compiled\necho built >>{self.builds}\n")
        python.chmod(0o755)
        for each in (
            "deploy/compiled/build.py",
            "protos/pyproject.toml",
            "protos/shoal/http2/frames.py",
            "protos/shoal/protos/v1/agent_pb2.pyi",
            "agents/shoal/agent/py.typed",
            "agents/shoal/agent/hardware/profiles/npu/edge.json",
            "agents/shoal/agent/preparation/probes/conv.onnx",
        ):
            self.write(each)

    def write(self, name: str) -> None:
        """Another content, with a time from before the last build, as a checkout or a copy may bring it."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("#\n")
        os.utime(path, ns=(0, 0))

    def is_built(self, **environment: str) -> bool:
        """Whether `make compiled` compiles anything, as of now."""
        before = self.builds.read_text()
        command = ["make", "--no-print-directory", "--old-file=.venv/.installed-tests", "compiled"]
        changed = {**os.environ, **environment}
        subprocess.run(command, cwd=self.root, check=True, timeout=60, capture_output=True, env=changed)
        return self.builds.read_text() != before


def test_what_is_compiled_is_made_again_after_any_change_of_its_sources(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.is_built()
    assert not tree.is_built(), "nothing has changed"
    files = [path for folder in ("deploy", "protos", "agents") for path in (tmp_path / folder).rglob("*.*")]
    assert len(files) == 7
    for path in files:
        tree.write(str(path.relative_to(tmp_path)))
        assert tree.is_built(), path
    assert not tree.is_built()


def test_what_is_compiled_is_made_again_when_a_file_came_or_went(tmp_path: Path) -> None:
    """Whatever its time: what a checkout or a copy brings may be older than the last build."""
    tree = Tree(tmp_path)
    assert tree.is_built()
    profile = tmp_path / "agents/shoal/agent/hardware/profiles/npu/edge.json"
    moved = profile.with_name("other.json")
    profile.rename(moved)
    assert tree.is_built(), "renamed"
    moved.unlink()
    assert tree.is_built(), "removed"
    assert not tree.is_built()


def test_another_locale_is_no_change(tmp_path: Path) -> None:
    """Locales order names differently. Few machines have two of them, so a `sort` stands in whose order depends on the
    locale that it is called in."""
    tree = Tree(tmp_path / "tree")
    programs = tmp_path / "bin"
    programs.mkdir()
    sort = programs / "sort"
    sort.write_text(f'#!/bin/sh\n[ "$LC_ALL" = C ] || set -- -r "$@"\nexec {shutil.which("sort")} "$@"\n')
    sort.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    assert tree.is_built(LC_ALL="C", PATH=path)
    assert not tree.is_built(LC_ALL="de_DE.UTF-8", PATH=path)


def test_what_python_keeps_beside_sources_is_none_of_them(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.is_built()
    for name in ("protos/shoal/http2/__pycache__/frames.cpython-311.pyc", "agents/shoal.egg-info/PKG-INFO"):
        tree.write(name)
    assert not tree.is_built()


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


@pytest.mark.parametrize(
    ("of_agents", "errors"), [(COMPILED, ""), ("shoal.types.units", "shoal.types.units is not compiled\n")]
)
def test_an_image_is_refused_unless_every_part_of_it_is_compiled(tmp_path: Path, of_agents: str, errors: str) -> None:
    (tmp_path / "deploy/compiled").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/compiled/check.py", tmp_path / "deploy/compiled")
    for name, module in (("protos", COMPILED), ("agents", of_agents)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f'[tool.shoal.compiled]\nmodules = ["{module}"]\n')
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/pyproject.toml").write_text("[project]\n")
    *_, check = (IMAGES / "install.sh").read_text().splitlines()
    script = f"cd /\n{check.replace('/opt/shoal/bin/python', sys.executable)}"
    command = ["sh", "-euc", script, "install.sh", "./protos", "./policies", "./agents[cpu]"]
    for compiled in ("yes", ""):
        environment = {**os.environ, "COMPILED": compiled}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stderr == (errors if compiled else "")
        assert done.returncode == bool(done.stderr)


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
