"""Figures that tests found, in `report.json` at the root of the repository; `python -m harness.report [KINDS]` reads
them out, those of these kinds, by default of those that `make test` runs.

Every passed test whose name, or whose file's name, starts with rows of the fault and attack tables has an entry: the
one that it recorded itself with its figures, else one run of the kind that its folder says.
"""

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import flaky

REPORT = Path(__file__).resolve().parents[2] / "report.json"

KINDS = {"simulation": "S", "integration": "P", "compose": "C"}
IN_PROCESS = "I"
"""Kinds: simulator, real processes, containers; all other tests run within one process."""
BY_MAKE_TEST = "SPI"
"""The other kind is `make test-compose`'s."""

DEMANDED: Mapping[str, str] = {
    **dict.fromkeys(("F01", "F02", "F03", "F05", "F14"), "SP"),
    **dict.fromkeys(("F06", "F17"), "SPC"),
    **dict.fromkeys(("F19", "F20", "F21", "F22", "F26", "F27", "F28", "F35", "F47"), "SP"),
    **dict.fromkeys(("F34", "F46"), "SP"),
    **dict.fromkeys(("F23", "F25", "F36", "F44"), "S"),
    "A28": IN_PROCESS + "S",
    **dict.fromkeys(("F29", "F30", "A03", "A04", "A05", "A08", "A09"), "P"),
    **dict.fromkeys(("F07", "F43"), "P"),
    **dict.fromkeys(("F04", "F09", "F10", "F12", "F32", "F41", "F42", "F45", "F48"), "PC"),
    "F08": "SP",
    "F11": "SPC",
    **dict.fromkeys(("A12", "F16"), IN_PROCESS + "P"),
    **dict.fromkeys(("F13", "F15", "F18", "F24", "F31", "F33", "F37", "F38", "F39", "F40"), "P"),
    **dict.fromkeys(("A10", "A11", "A17", "A18", "A19", "A20"), "P"),
    **dict.fromkeys(("A01", "A02", "A06", "A07", "A14", "A29", "A30", "A31", "A32", "A33", "A34", "A36", "A43"), "P"),
    **dict.fromkeys(("A44", "A58", "A61", "A62"), IN_PROCESS + "P"),
    **dict.fromkeys(("A13", "A21", "A24", "A25", "A26", "A27", "A37", "A38", "A50"), IN_PROCESS + "P"),
    **dict.fromkeys(("A39", "A40", "A41", "A42", "A52"), "P"),
    **dict.fromkeys(("A48", "A49"), IN_PROCESS + "P"),
    "A56": "SP",
    "A59": "P",
    "A60": IN_PROCESS + "P",
    **dict.fromkeys(("A15", "A16", "A35"), "P"),
    "A55": IN_PROCESS + "P",
    "A57": IN_PROCESS + "P",
    "F50": IN_PROCESS + "P",
    **dict.fromkeys(("A22", "A23", "A45", "A46", "A47", "A54"), IN_PROCESS),
}
"""Rows that must hold today, and the kinds of run that each needs."""

_ROWS = re.compile(r"test_((?:[af]\d\d_)+)")

Entry = dict[str, Any]


def record(row: str, kind: str, runs: int, **figures: Any) -> None:
    """One entry of the running test: row of the tables, kind (S, P, C, I), number of runs, and what was found.

    An entry of the same test, row and kind is replaced. Tests of several processes may record at once.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    entry = {"row": row, "kind": kind, "test": test, "runs": runs, **figures}
    key = (row, kind, test)
    _rewrite(lambda entries: [*(one for one in entries if (one["row"], one["kind"], one["test"]) != key), entry])


def on_start(test: str) -> None:
    """Discard what an earlier run of this test recorded."""
    if rows_of(test):
        _rewrite(lambda entries: [one for one in entries if one["test"] != test])


def on_passed(test: str) -> None:
    """One run for each row in the test's name that it has not recorded itself."""
    rows = rows_of(test)
    if not rows:
        return
    kind = KINDS.get(test.split("/")[1], IN_PROCESS)

    def with_missing_rows(entries: list[Entry]) -> list[Entry]:
        told = {one["row"] for one in entries if one["test"] == test}
        return [*entries, *({"row": row, "kind": kind, "test": test, "runs": 1} for row in rows if row not in told)]

    _rewrite(with_missing_rows)


def rows_of(test: str) -> tuple[str, ...]:
    """`tests/unit/test_a46_yaml.py::test_x` -> A46; a row in the function's name goes before its file's."""
    path, _, name = test.partition("::")
    found = _ROWS.match(name) or _ROWS.match(Path(path).name)
    return tuple(found[1].upper().strip("_").split("_")) if found else ()


def read() -> list[Entry]:
    text = REPORT.read_text() if REPORT.exists() else ""
    return list(json.loads(text)) if text else []


def missing(entries: Iterable[Entry], of: str = BY_MAKE_TEST) -> list[str]:
    """Rows that are demanded in one of these kinds and have no entry of it."""
    kinds: dict[str, set[str]] = {}
    for entry in entries:
        kinds.setdefault(entry["row"], set()).add(entry["kind"])
    lacking = {
        row: [kind for kind in wanted if kind in of and kind not in kinds.get(row, ())]
        for row, wanted in DEMANDED.items()
    }
    return [f"{row} was not run as {', '.join(kinds)}" for row, kinds in lacking.items() if kinds]


def table(entries: Sequence[Entry]) -> list[str]:
    """One line a row and kind, and one for each test that has figures."""
    lines = []
    for row, kind in sorted({(entry["row"], entry["kind"]) for entry in entries}, key=_faults_first):
        mine = [entry for entry in entries if (entry["row"], entry["kind"]) == (row, kind)]
        runs = sum(entry["runs"] for entry in mine)
        lines.append(f"{row}  {kind}  {runs:>7} runs  {len(mine):>3} tests")
        for entry in mine:
            figures = {name: value for name, value in entry.items() if name not in ("row", "kind", "test", "runs")}
            if figures:
                told = "  ".join(f"{name}={value}" for name, value in figures.items())
                lines.append(f"        {entry['test'].rpartition('::')[2]}: {told}")
    return lines


def main(of: str = BY_MAKE_TEST) -> int:
    """Exit status 1 when a demanded row lacks an entry of one of these kinds."""
    entries = [entry for entry in read() if entry["kind"] in of]
    print("\n".join(table(entries)))
    lacking = missing(entries, of)
    for line in lacking:
        print(f"MISSING  {line}")
    if not lacking:
        demanded = sum(not set(of).isdisjoint(kinds) for kinds in DEMANDED.values())
        print(f"{demanded} rows are demanded, and all of them were shown")
    for line in flaky.FLAKY.read_text().splitlines() if flaky.FLAKY.exists() else ():
        print(f"FLAKY  {line} passed at its second attempt only")
    return 1 if lacking else 0


def _faults_first(group: tuple[str, str]) -> tuple[bool, tuple[str, str]]:
    return group[0].startswith("A"), group


def _rewrite(change: Callable[[list[Entry]], list[Entry]]) -> None:
    with REPORT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        entries = change(json.loads(text) if text else [])
        file.truncate(0)
        json.dump(entries, file, indent=1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
