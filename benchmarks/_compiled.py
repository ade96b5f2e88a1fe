"""Programs that run Shoal's compiled modules (docs/decisions/0038-compiled-transport.md)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FOLDER: Final = Path("dist/compiled")
"""Where `make test-compiled` and `make wheels COMPILED=yes` have them compiled."""
DISTRIBUTIONS: Final = ("protos", "agents")


def environment_of(folder: Path) -> dict[str, str]:
    """In which Python's programs run what `deploy/compiled/build.py` has compiled in the folder. Raises SystemExit."""
    found = [folder.absolute() / each for each in DISTRIBUTIONS]
    if not all([*each.glob("*__mypyc*.so")] for each in found):
        raise SystemExit(f"found: nothing compiled in {folder}; wanted: both distributions; try: make compiled (USAGE)")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, found))}


@contextmanager
def programs_of(folder: Path | None) -> Iterator[None]:
    """What this process starts meanwhile runs what is compiled in the folder; None: Python. Raises SystemExit."""
    before = os.environ.get("PYTHONPATH")
    if folder is not None:
        os.environ.update(environment_of(folder))
    try:
        yield
    finally:
        if folder is not None:
            del os.environ["PYTHONPATH"]
            os.environ.update({} if before is None else {"PYTHONPATH": before})


def is_process_compiled(pid: int) -> bool:
    """Whether it has loaded compiled modules of both distributions. Raises OSError."""
    return all(has_mapped(pid, f"/shoal_{each}__mypyc.") for each in DISTRIBUTIONS)


def has_mapped(pid: int, name: str) -> bool:
    """Whether it has mapped a file with that in its path. Raises OSError."""
    return name in Path(f"/proc/{pid}/maps").read_text()
