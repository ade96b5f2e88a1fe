"""Benchmarks of compiled modules: which programs run them, and that another build than was asked for is found out."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module. Nothing of it stays for other tests."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "_compiled", raising=False)
    import _compiled

    monkeypatch.setitem(sys.modules, "_compiled", _compiled)
    return _compiled


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A folder in which something has the names of what is compiled, and can be mapped as it is."""
    for distribution in ("protos", "agents"):
        (tmp_path / distribution).mkdir()
        (tmp_path / distribution / f"shoal_{distribution}__mypyc.cpython-311.so").write_bytes(bytes(4096))
    return tmp_path


def test_programs_are_started_with_what_was_compiled_and_others_are_not(
    builds: Any, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    with builds.programs_of(build):
        command = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
        paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [path for path in paths if path.startswith(str(build))] == [str(build / "protos"), str(build / "agents")]
    assert os.environ["PYTHONPATH"] == "/before"
    with builds.programs_of(None):
        assert os.environ["PYTHONPATH"] == "/before"
    monkeypatch.delenv("PYTHONPATH")
    with builds.programs_of(build):
        pass
    assert "PYTHONPATH" not in os.environ


@pytest.mark.parametrize("lacks", ["protos", "agents", "both"])
def test_a_folder_without_both_distributions_is_refused(builds: Any, build: Path, lacks: str) -> None:
    for each in build.glob("*/*.so"):
        if lacks in ("both", each.parent.name):
            each.unlink()
    with pytest.raises(SystemExit, match=r"found: .*; wanted: .*; try: make compiled \(USAGE\)"):
        builds.environment_of(build)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_process_is_compiled_if_it_has_loaded_both(builds: Any, build: Path, count: int) -> None:
    libraries = sorted(map(str, build.glob("*/*.so")))[:count]
    program = (
        "import mmap, os, sys; "
        "held = [mmap.mmap(os.open(each, os.O_RDONLY), 0, access=mmap.ACCESS_READ) for each in sys.argv[1:]]; "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, *libraries]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert builds.is_process_compiled(process.pid) is (count == 2)
        process.communicate()
