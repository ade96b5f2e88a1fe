"""Journals and desired sets for the contract of the Journal port; also for its child processes."""

from pathlib import Path

from harness.builders.agent_values import assignment, desired_set
from harness.fakes.log import RecordingLog
from shoal.agent.journal.files import FileJournal
from shoal.types.assignment import DesiredSet


def journal(folder: Path, heard: RecordingLog | None = None, reserve_bytes: int = 0) -> FileJournal:
    return FileJournal(folder, heard or RecordingLog(), reserve_bytes=reserve_bytes)


def desired_sets(count: int) -> list[DesiredSet]:
    """`count` generations of different sizes, up to several pages."""
    many = [assignment(f"a-{number}") for number in range(60)]
    return [desired_set(generation, *many[: (generation * 17) % 60]) for generation in range(1, count + 1)]
