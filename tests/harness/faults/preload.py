"""Libraries of C in this folder that stand between a process under test and its system (LD_PRELOAD)."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from shoal.types.codes import Code, refuse


def compile_library(name: str, folder: Path) -> Path:
    """`NAME.c` as a library in `folder`. Raises ShoalError where there is no C compiler: such a run covers nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise refuse(Code.NOT_FOUND, "no C compiler", "gcc and libc6-dev", "apt-get install gcc libc6-dev")
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def preload_command(*environments: Mapping[str, str]) -> list[str]:
    """What a command line begins with, for a program with all of these libraries."""
    libraries = ":".join(each["LD_PRELOAD"] for each in environments)
    given = {name: value for each in environments for name, value in each.items()} | {"LD_PRELOAD": libraries}
    return ["env", *(f"{name}={value}" for name, value in given.items())]
