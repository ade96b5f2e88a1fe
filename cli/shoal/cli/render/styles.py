"""Colours: what is well is green, what is on its way yellow or blue, what is wrong red. Colour never says it alone."""

from collections.abc import Mapping
from typing import Final

from shoal.cli.render.columns import Cell

STYLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ready", "done", "yes", "ok", "active", "settled", "serving", "CHOSEN", "WOULD WIN"), "green"),
    **dict.fromkeys(
        ("pending", "suspect", "standby", "STANDBY", "short", "silent", "cordoned", "rolling back", "deleting",
         "yes-with", "not judged", "unseen", "degraded", "front down"),
        "yellow",
    ),
    **dict.fromkeys(
        ("lost", "failed", "aborted", "no", "FAIL", "never-seen", "quarantined", "revoked", "duplicate", "broken",
         "dead"),
        "red",
    ),
    **dict.fromkeys(
        ("progressing", "fetching", "loading", "warming", "verifying", "staged", "staging", "shifting", "draining",
         "queued", "planned", "reserved", "starting", "stopping", "paused", "idle", "waking"),
        "cyan",
    ),
}  # fmt: skip
"""A word for a state -> a style of rich."""
SIGNS: Final[Mapping[str, str]] = {"+": "green", "-": "red", "~": "yellow"}
"""First character of a line of a plan -> a style of rich."""
_GRAVEST_FIRST: Final = ("red", "yellow", "cyan", "green")


def style_of(text: str) -> str:
    """The gravest style among the words between commas, each by itself or by its first word; empty: none."""
    found = {STYLES.get(word) or STYLES.get(word.partition(" ")[0], "") for word in text.split(", ")}
    return next((style for style in _GRAVEST_FIRST if style in found), "")


def state(text: str) -> Cell:
    """A state in its colour."""
    return Cell(text, style=style_of(text))
