"""Commented templates for `shoal policy new`: of the kinds, and of policies by need. No other module of the package
reads files, and this one reads only its own."""

from importlib.resources import files
from typing import Final

KINDS: Final = ("policy", "workload", "tenant", "region")
NEEDS: Final[tuple[str, ...]] = tuple(
    sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("shoal.policies.templates").joinpath("needs").iterdir()
        if entry.name.endswith(".yaml")
    )
)
_NEED: Final = "# Need: "


def template(kind: str = "policy") -> str:
    """The template of one of `KINDS`, a valid document."""
    return (files("shoal.policies.templates") / f"{kind}.yaml").read_text(encoding="utf-8")


def need_template(need: str) -> str:
    """The template of one of `NEEDS`: a policy and a workload, valid, with questions (`shoal.policies.questions`)."""
    return (files("shoal.policies.templates") / "needs" / f"{need}.yaml").read_text(encoding="utf-8")


def summary(need: str) -> str:
    """What a need is, in a sentence."""
    return next(line.removeprefix(_NEED) for line in need_template(need).splitlines() if line.startswith(_NEED))
