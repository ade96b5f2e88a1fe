"""A54: the supply chain. A build uses only what is listed by hash, and no version that is known to be vulnerable."""

import hashlib
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
LIST = f"wheels-{platform.machine()}.sha256"
FLOORS = {"onnx": (1, 22), "protobuf": (6, 33, 5), "h2": (4, 3), "h11": (0, 16), "onnxruntime": (1, 31, 1)}
"""Older ones have known holes."""
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9]+(?:\.[0-9]+)*[a-z0-9.]*)")


def name_of(text: str) -> str:
    """As registries compare names."""
    return re.sub(r"[-_.]+", "-", text).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    found = [PIN.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(found), "one exact version a line, and nothing else"
    return {name_of(each[1]): each[2] for each in found if each}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Two of them, the lists that they are on, and what compares the two, in a folder of their own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("one-1.0-py3-none-any.whl", "two-2.0-py3-none-any.whl"):
        (folder / name).write_bytes(name.encode() * 100)
    shutil.copy(ROOT / "deploy/images/verify.sh", tmp_path)
    (tmp_path / LIST).write_text("".join(line(path) for path in sorted(folder.iterdir())))
    return folder


def line(wheel: Path) -> str:
    """As `sha256sum` writes it."""
    return f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"


def verify(wheels: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([wheels.parent / "verify.sh", wheels], capture_output=True, text=True, check=False)


def test_what_is_on_the_list_is_taken_and_fewer_are_too(wheels: Path) -> None:
    assert verify(wheels).returncode == 0
    (wheels / "one-1.0-py3-none-any.whl").unlink()
    assert verify(wheels).returncode == 0, "an image may need fewer"


@pytest.mark.parametrize("how", ["a bit of a wheel", "a digit of the list", "not on the list", "another's hash"])
def test_what_was_changed_ends_the_build(wheels: Path, how: str) -> None:
    victim, listed = wheels / "two-2.0-py3-none-any.whl", wheels.parent / LIST
    match how:
        case "a bit of a wheel":
            content = bytearray(victim.read_bytes())
            content[7] ^= 1
            victim.write_bytes(content)
        case "a digit of the list":
            text = listed.read_text()
            at = text.index(line(victim))
            listed.write_text(text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :])
        case "not on the list":
            victim.rename(wheels / "three-3.0-py3-none-any.whl")
            victim = wheels / "three-3.0-py3-none-any.whl"
        case _:
            victim.write_bytes((wheels / "one-1.0-py3-none-any.whl").read_bytes())
    done = verify(wheels)
    assert done.returncode == 1
    assert victim.name in done.stderr


def test_no_list_is_no_leave(wheels: Path) -> None:
    (wheels.parent / LIST).unlink()
    done = verify(wheels)
    assert done.returncode == 1
    assert "make lock" in done.stderr


def test_images_are_built_of_what_was_verified() -> None:
    """Both where wheels were made before and where the image makes its own."""
    steps = (ROOT / "deploy/images/install.sh").read_text()
    assert steps.index("./verify.sh dist/wheels") < steps.index("pip install --no-index --find-links dist/wheels")
    planned = subprocess.run(
        ["make", "-n", "-B", "dist/wheels/.made"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert planned.index("pip wheel") < planned.index("deploy/images/verify.sh dist/wheels") < planned.rindex("touch")


def test_the_list_agrees_with_the_pins() -> None:
    listed = {}
    for each in sorted((ROOT / "deploy/images").glob("wheels-*.sha256")):
        for row in each.read_text().splitlines():
            digest, _, wheel = row.partition("  ")
            name, version, *_ = wheel.removesuffix(".whl").split("-")
            assert re.fullmatch("[0-9a-f]{64}", digest)
            listed[name_of(name)] = version
    wanted = pins()
    assert listed, "nothing is listed"
    assert {name: wanted.get(name) for name in listed} == listed


def test_every_version_is_exact_and_none_is_known_to_be_broken() -> None:
    for name, version in pins().items():
        if name in FLOORS:
            assert tuple(int(part) for part in re.findall(r"\d+", version)) >= FLOORS[name], f"{name} {version}"
    assert {"onnx", "protobuf", "h11", "onnxruntime"} <= {*pins()}


def test_no_image_comes_from_elsewhere_but_the_one_below_all_of_them() -> None:
    dockerfile = (ROOT / "deploy/images/Dockerfile").read_text()
    stages: set[str] = set()
    for base, stage in re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, re.MULTILINE):
        assert base == "${BASE}" or base in stages, base
        stages.add(stage)
    assert len(stages) == len(re.findall(r"^FROM", dockerfile, re.MULTILINE))
    assert not re.findall(r"^ADD|curl|wget", dockerfile, re.MULTILINE)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    foreign = services.pop("grafana")["image"]
    assert re.search(r"(:\d+\.\d+\.\d+|@sha256:[0-9a-f]{64})$", foreign), "of one exact version"
    named = {service["image"].partition(":")[0] for service in services.values()}
    assert named <= {f"shoal/{stage}" for stage in stages}


def test_nothing_is_installed_without_its_pin() -> None:
    scripts = ("Makefile", ".ci/run", "deploy/images/install.sh", "deploy/images/compile.sh")
    commands = [(ROOT / name).read_text() for name in scripts]
    text = "\n".join(commands).replace("\\\n", " ")
    installs = [each.strip() for each in text.splitlines() if re.search(r"\bpip (install|wheel|download)\b", each)]
    assert installs
    of_ours_alone = re.compile(r" --no-deps -w \S+( \./\w+)+$")
    pinned = re.compile(r" (-c|--constraint) (\$\(abspath )?constraints\.txt\b")
    assert [each for each in installs if not (pinned.search(each) or of_ours_alone.search(each))] == []
