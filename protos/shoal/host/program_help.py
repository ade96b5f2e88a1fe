"""Examples in a program's help."""

from collections.abc import Iterable
from typing import Final

Example = tuple[str, str]
"""(command line, what it does)."""
HEADING: Final = "Examples:"


def format_examples(examples: Iterable[Example]) -> str:
    """Side by side where both fit into 80 columns, else the command beneath what it does."""
    lines = [HEADING]
    listed = tuple(examples)
    widest = max(len(command) for command, _ in listed)
    aside = all(not what or widest + 4 + len(what) <= 78 for _, what in listed)
    for command, what in listed:
        if aside:
            lines.append(f"  {command.ljust(widest)}  {what}".rstrip())
        else:
            lines += [f"  # {what}"] if what else []
            lines.append(f"  {command}")
    return "\n".join(lines)
