"""A copy of the distributions whose modules can be compiled, with those modules compiled in place.

`python deploy/compiled/build.py FOLDER` copies `protos` and `agents` into FOLDER, compiles there what each lists in its
`[tool.shoal.compiled]`, and leaves `pip wheel FOLDER/protos` to make a wheel for this platform and this Python. Needs
mypy, setuptools and a C compiler. The sources stay beside what is compiled of them: Python prefers the latter, and
tracebacks show the former. Why, and what it gains: docs/decisions/0038-compiled-transport.md.
"""

import argparse
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DISTRIBUTIONS: Final = ("protos", "agents")
HOOK: Final = "platform_wheel.py"
WHEEL_SETTINGS: Final = f"""
[tool.hatch.build]
ignore-vcs = true

[tool.hatch.build.hooks.custom]
path = "{HOOK}"
"""
"""Of a copy. Its wheel is for one platform, and has what no repository holds."""
OPTIMIZATION: Final = "1"
"""gcc's -O. Python's own settings ask for -O3, with which the transport took several times as long to compile."""


def listed_modules(distribution: str) -> list[str]:
    """Files to compile, relative to the distribution, in order."""
    settings = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())
    return [f"{name.replace('.', '/')}.py" for name in settings["tool"]["shoal"]["compiled"]["modules"]]


def copy(distribution: str, folder: Path) -> Path:
    """The distribution's copy, ready to become a wheel for this platform."""
    to = folder / distribution
    shutil.copytree(ROOT / distribution, to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    shutil.copy(Path(__file__).with_name(HOOK), to)
    with (to / "pyproject.toml").open("a") as settings:
        settings.write(WHEEL_SETTINGS)
    return to


def compile_modules(distribution: str, at: Path, scratch: Path) -> None:
    """Compile what the distribution lists, in its copy. What distributions have of each other stays Python to both:
    compiled modules depend on the layout of each other's objects, and wheels are installed one by one."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    os.chdir(at)
    os.environ["MYPYPATH"] = ":".join(str(ROOT / each) for each in (*DISTRIBUTIONS, "policies"))
    settings = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(scratch / "cache"))
    modules = listed_modules(distribution)
    extensions = mypycify(
        [*settings, *modules],
        opt_level=OPTIMIZATION,
        debug_level="0",
        group_name=f"shoal_{distribution}",
        target_dir=str(scratch / distribution),
    )
    command = build_ext(Distribution({"name": distribution, "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(at), str(scratch / "objects")
    command.ensure_finalized()
    command.run()
    print(f"{distribution}: {len(modules)} modules compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the copies go; what is there of them is replaced")
    parser.add_argument("--only", choices=DISTRIBUTIONS, nargs="+", default=DISTRIBUTIONS)
    options = parser.parse_args()
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        sys.exit("found: no C compiler; wanted: cc; try: apt-get install gcc, or the wheels without COMPILED (USAGE)")
    os.environ.update(OPT="-DNDEBUG", CFLAGS="-g0")
    folder = options.folder.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        for each in options.only:
            shutil.rmtree(folder / each, ignore_errors=True)
            compile_modules(each, copy(each, folder), Path(scratch))


if __name__ == "__main__":
    main()
