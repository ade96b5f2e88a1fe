"""Hatchling's hook for a copy that `build.py` has compiled in place: its wheel is for this platform and this Python."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface  # type: ignore[import-not-found,unused-ignore]


class PlatformWheelHook(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
    """Adds what the compiled modules share, which lies outside the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(each): each.name for each in Path(self.root).glob("*__mypyc.*")})
