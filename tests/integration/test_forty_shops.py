"""The guide `fleet.md` as a user types it, block after block into one shell: emulated shops with a policy each, and one
upgrade of all of them, in waves and under load."""

import os
import re
from pathlib import Path
from typing import Final

import psutil
import pytest

from harness.clients import tutorial
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Contexts, RegionClient
from shoal.devstack.control import CONTEXT, Control

PAGE: Final = tutorial.ROOT / "docs" / "guides" / "fleet.md"
KIOSKS: Final = 2
"""Agents that the page starts by a line of `token create` each."""
READY_WITHIN_S: Final = 60.0
"""For agents that join by themselves, and for processes that were told to end."""
BLOCK_WITHIN_S: Final = 900.0
"""For the slowest block, with forty shops on two cores that other programs share."""
START, APPLY, UPGRADE, JOIN, END = "shoal dev up", "shoal apply -f shops --wait", "--wave", "token create", "dev down"
"""Of the blocks, by what only one of them has."""
EMULATED: Final = r"rk3588s \(emulated\)"


class FleetWalkthrough:
    """What is typed, with so many shops, and what each block printed."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self.folder = folder
        self.contexts = Contexts(folder / "home")
        self.control = Control(folder / "dev", self.contexts)
        self.printed = dict[str, str]()
        self.took_s = dict[str, float]()
        self._settings = settings

    def type_block(self, terminal: tutorial.Terminal, block: tutorial.Block) -> str:
        """Its mark, empty for a block that has none."""
        clock = SystemClock()
        began = clock.now()
        text = block.text
        for name, value in self._settings.items():
            text = re.sub(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        if block.language == "python":
            (terminal.folder / "block.py").write_text(text)
            text = "python block.py"
        (mark,) = [each for each in (START, APPLY, UPGRADE, JOIN, END) if each in text] or [""]
        self.printed[mark] = terminal.type(text, BLOCK_WITHIN_S)
        self.took_s[mark] = clock.now() - began
        return mark

    def lines(self, mark: str, pattern: str) -> list[str]:
        """First groups of the lines that match."""
        return re.findall(pattern, self.printed[mark], re.MULTILINE)

    def ready_nodes(self, group: str) -> list[str]:
        with RegionClient(self.contexts.get(CONTEXT)) as api:
            views = api.get("nodes").nodes
        return [one.node.name for one in views if one.node.labels.get("group") == group and one.liveness == "ready"]

    def memory_mib(self) -> float:
        """PSS of every process of the stack, its CLI's aside."""
        pids = {row["pid"] for row in self.control.status() if row["pid"]}
        return sum(_pss_kib(pid) for pid in pids) / 1024


def _pss_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # it ended meanwhile
    return int(re.findall(r"^Pss: +(\d+)", text, re.MULTILINE)[0])


def processes_below(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                found.append(" ".join(words))
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(2 * BLOCK_WITHIN_S)
@pytest.mark.parametrize(
    ("shops", "wave"),
    [
        pytest.param(4, "100%", id="four"),
        pytest.param(40, "10%", id="forty", marks=[pytest.mark.long, pytest.mark.alone]),
    ],
)
def test_shops_with_a_policy_each_and_one_upgrade(tmp_path: Path, shops: int, wave: str) -> None:
    walk = FleetWalkthrough(tmp_path, {"SHOPS": str(shops), "WAVE": wave})
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    own = {"SHOAL_HOME": str(walk.contexts.folder), "SHOAL_DEV_DIR": str(walk.control.folder), "COLUMNS": "300"}
    (tmp_path / "root").mkdir()
    memory_mib = 0.0
    try:
        with tutorial.terminal(tmp_path / "root", plain | own) as terminal:
            terminal.type("set -e")
            for block in tutorial.blocks_of(PAGE.read_text()):
                mark = walk.type_block(terminal, block)
                if mark == APPLY:
                    memory_mib = walk.memory_mib()
                if mark == JOIN:
                    wait_until(lambda: len(walk.ready_nodes("kiosk")) == KIOSKS, READY_WITHIN_S, "the kiosks to join")
            wait_until(lambda: not processes_below(tmp_path), READY_WITHIN_S, "all of it to end")
    finally:
        walk.control.down()
    assert walk.printed.keys() == {"", START, APPLY, UPGRADE, JOIN, END}
    names = [f"shop-{number:0{len(str(shops))}d}" for number in range(1, shops + 1)]
    assert walk.lines(START, rf"^(shop-\d+) +agent +ready +{EMULATED}") == names
    assert walk.lines(APPLY, rf"^default/(shop-\d+) +\1/{EMULATED} +ready +yes") == names
    moved = walk.lines(UPGRADE, rf"^m-\w+ +default/(shop-\d+) +\1/{EMULATED} +\1/{EMULATED} +done +100% +yes")
    assert sorted(moved) == names, walk.printed[UPGRADE]
    assert len(walk.lines(UPGRADE, r"^wave \d+ of \d+: (.+)$")) > 1, walk.printed[UPGRADE]
    assert walk.lines(UPGRADE, r"^wave 1 of \d+: (.+)$") == names[:1], "one shop alone is the first"
    for mark, printed in walk.printed.items():
        assert not re.findall(r"/rk3588s(?! \(emulated\))", printed), f"{mark}: a stand-in that is not labelled"
    load = re.split(r" {2,}", walk.lines(UPGRADE, rf"^{shops}/s .*$")[0].strip())
    answers, refused = int(load[1].replace(",", "")), load[6]
    assert answers > shops * walk.took_s[UPGRADE] / 2, walk.printed[UPGRADE]
    assert refused == "0", walk.printed[UPGRADE]
    record(
        "emulated shops", "P", 1, shops=shops, ready_s=round(walk.took_s[START], 1), memory_mib=round(memory_mib),
        applied_s=round(walk.took_s[APPLY], 1), upgraded_s=round(walk.took_s[UPGRADE], 1), answers=answers, lost=0,
        p50_ms=float(load[3]), p99_ms=float(load[5]),
    )  # fmt: skip
