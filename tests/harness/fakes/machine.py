"""A machine that answers drivers from a recording (`shoal-agent record`), or from one that was written by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.fakes.nvml import RecordedNvml

RECORDINGS: Final = Path(__file__).parents[2] / "data/devices"


class ReplayedMachine:
    """What was not asked when it was recorded is not there: empty, as a driver finds what a machine does not have."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = dict(answers)

    @classmethod
    def of(cls, name: str) -> "ReplayedMachine":
        return cls(json.loads((RECORDINGS / f"{name}.json").read_text())["answers"])

    def text(self, path: str) -> str:
        return str(self.answers.get(f"text {path}", ""))

    def paths(self, pattern: str) -> tuple[str, ...]:
        return tuple(self.answers.get(f"paths {pattern}", ()))

    def run(self, *command: str) -> str:
        return str(self.answers.get(f"run {' '.join(command)}", ""))

    def library(self, name: str) -> Any:
        return RecordedNvml(self.answers) if any(asked.startswith("nvml") for asked in self.answers) else None
