"""A refusal as every program of Shoal prints it."""

import shutil
import sys
import textwrap
from typing import Final

from shoal.types.codes import Refusal

_LABEL: Final = 8
"""Characters of a label, with the space after it."""


def printable(text: str) -> str:
    """Remove control characters, so that untrusted text cannot control the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def parts_of(refusal: Refusal, width: int) -> list[tuple[str, str]]:
    """(label, words) of what was found, wanted and can be tried, with the code at the end. The words are wrapped, under
    their own beginning, so that label and words fit `width`."""
    named = (("found:", refusal.found), ("wanted:", refusal.asked), ("try:", refusal.remedy))
    parts = [(label, f"{printable(said)} ") for label, said in named if said] or [("", "")]
    parts[-1] = (parts[-1][0], f"{parts[-1][1]}({refusal.code})")
    indent = " " * _LABEL
    return [
        (
            label.ljust(_LABEL),
            textwrap.fill(
                words.rstrip(), max(width, _LABEL + 20), initial_indent=indent, subsequent_indent=indent,
                break_long_words=False, break_on_hyphens=False,
            )[_LABEL:],
        )
        for label, words in parts
    ]  # fmt: skip


def print_refusal(refusal: Refusal) -> None:
    """On stderr: a line for each part on a terminal, one line in a pipe."""
    if sys.stderr.isatty():
        lines = [label + words for label, words in parts_of(refusal, shutil.get_terminal_size().columns)]
    else:
        lines = [printable(str(refusal))]
    print("\n".join(lines), file=sys.stderr)
