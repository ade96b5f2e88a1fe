"""Whether what distributions list to be compiled is so where they are installed, and loads there.

`python deploy/compiled/check.py ./protos './agents[cpu]'`, with the Python of that installation. Exit status 1, and a
line for each module that is not compiled.
"""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Final

from shoal.host.compiled import is_compiled

ROOT: Final = Path(__file__).parents[2]


def listed_modules(distribution: str) -> list[str]:
    """Of a folder, with or without extras; none where nothing can be compiled."""
    folder, _, _ = distribution.partition("[")
    settings = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    modules: list[str] = settings.get("tool", {}).get("shoal", {}).get("compiled", {}).get("modules", [])
    return modules


def main() -> None:
    modules = [module for each in sys.argv[1:] for module in listed_modules(each)]
    missing = [module for module in modules if not is_compiled(module)]
    for module in missing:
        print(f"{module} is not compiled", file=sys.stderr)
    for module in modules:
        import_module(module)
    sys.exit(bool(missing) or not modules)


if __name__ == "__main__":
    main()
