"""The modules of a benchmark, which is a program and no package that tests could import."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

_FOLDER: Final = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(monkeypatch: pytest.MonkeyPatch, package: str, names: Sequence[str]) -> dict[str, Any]:
    """The modules of these names, in the order of their imports. Nothing of them stays for other tests."""
    monkeypatch.syspath_prepend(str(_FOLDER))
    full = [f"{package}.{name}" for name in names]
    for each in (package, *full):
        monkeypatch.delitem(sys.modules, each, raising=False)
    loaded = {name: importlib.import_module(each) for name, each in zip(names, full, strict=True)}
    for each in (package, *full):
        monkeypatch.setitem(sys.modules, each, sys.modules[each])
    return loaded
