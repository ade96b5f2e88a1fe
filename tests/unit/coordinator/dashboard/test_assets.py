"""The built files are those of their sources, and all that the page loads is among them."""

import hashlib
import json
import re
from pathlib import Path

from shoal.coordinator.api.dashboard import assets

ROOT = Path(__file__).parents[4] / "coordinator"
SOURCES = ROOT / "dashboard"
BUILT = ROOT / "shoal/coordinator/api/dashboard/static"


def digest_of_sources() -> str:
    """As build.mjs computes it."""

    def walk(folder: Path) -> list[Path]:
        return [file for each in sorted(folder.iterdir()) for file in (walk(each) if each.is_dir() else [each])]

    digest = hashlib.sha256()
    for path in [*walk(SOURCES / "src"), *(SOURCES / n for n in ("build.mjs", "package.json", "package-lock.json"))]:
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_built_files_are_those_of_the_sources() -> None:
    build = json.loads((BUILT / "build.json").read_text())
    assert build["sources"] == digest_of_sources(), "the sources changed: make assets"
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in BUILT.iterdir()}
    found.pop("build.json")
    assert found == build["files"], "a built file was edited: make assets"


def test_the_page_loads_its_own_files_alone() -> None:
    served = assets.load()
    page = served[assets.PAGE].content.decode()
    assert "<script>" not in page, "an inline script would not run"
    assert "style=" not in page
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name.removeprefix("/assets/") in served
    assert served[assets.PAGE].headers["cache-control"] == "no-cache"
    assert all("immutable" in each.headers["cache-control"] for name, each in served.items() if name != assets.PAGE)
    assert sum(len(each.content) for each in served.values()) < 300_000


def test_the_licences_of_what_is_built_in_are_beside_it() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    text = (BUILT / "licences.txt").read_text()
    for name in json.loads((SOURCES / "package.json").read_text())["dependencies"]:
        package = lock[f"node_modules/{name}"]
        assert f"{name} {package['version']} ({package['license']})" in text
        assert package["license"] in ("MIT", "Apache-2.0", "ISC", "BSD-3-Clause")
    assert all("resolved" not in package for package in lock.values()), "a registry's name does not belong there"
