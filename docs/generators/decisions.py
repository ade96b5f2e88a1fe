"""The list of decisions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from generators.markdown import GENERATED, page, table

FOLDER: Final = Path(__file__).parents[1] / "decisions"

_HEAD = f"""# Decisions

{GENERATED}

Why things are as they are: for each decision its context, what was decided, what it costs, and when
to look at it again.
"""


def decisions() -> str:
    return page(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    rows = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(" ")
        rows.append((number, f"[{title}]({path.name})"))
    yield from table(("number", "decision"), rows)
