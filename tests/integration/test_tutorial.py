"""The tutorial on processes of this machine; `tests/compose/test_tutorial.py` has the same on containers."""

import os
from pathlib import Path

import pytest

from harness.clients import tutorial
from shoal.client import Contexts
from shoal.devstack.control import Control

pytestmark = pytest.mark.timeout(300)


def test_the_tutorial_on_processes(tmp_path: Path) -> None:
    contexts = Contexts(tmp_path / "home")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    own = {"SHOAL_HOME": str(contexts.folder), "SHOAL_DEV_DIR": str(tmp_path / "dev"), "COLUMNS": "300"}
    (tmp_path / "root").mkdir()
    try:
        with tutorial.terminal(tmp_path / "root", plain | own) as terminal:
            tutorial.start_regions(terminal, tutorial.PROCESSES)
            walk = tutorial.run_walkthrough(terminal, contexts)
    finally:
        Control(tmp_path / "dev", contexts).down()
    assert (walk.lost_count, walk.wrong_count) == (0, 0), walk
