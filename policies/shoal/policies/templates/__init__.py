"""Commented templates of the kinds, for `shoal policy new`. This is the only module of the package that reads a file,
and it reads only its own."""

from importlib.resources import files
from typing import Final

KINDS: Final = ("policy", "workload", "tenant", "region")


def template(kind: str = "policy") -> str:
    """The template of one of `KINDS`, a valid document."""
    return (files("shoal.policies.templates") / f"{kind}.yaml").read_text(encoding="utf-8")
