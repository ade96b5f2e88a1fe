"""A commented template of each kind, for `shoal policy new`. The one module here that reads a file, its own."""

from importlib.resources import files
from typing import Final

KINDS: Final = ("policy", "workload", "tenant", "region")


def template(kind: str = "policy") -> str:
    """The template of one of `KINDS`; valid as it stands."""
    return (files("shoal.policies.templates") / f"{kind}.yaml").read_text(encoding="utf-8")
