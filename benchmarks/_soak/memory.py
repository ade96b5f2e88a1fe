"""Memory of a region's processes, second by second, and whether it grows.

Judged is what a process holds: anonymous memory, also where it is swapped out, and its part of shared memory. Mapped
files are left out. Of those the kernel can give back each page at any time, and their proportional size depends on who
else maps them: that of a coordinator's libraries grows when another region's coordinator on the same machine ends.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from shoal.devstack.control import Control
from shoal.types.codes import ShoalError

EVERY_S: Final = 1.0
AGES_S: Final = (15.0, 30.0)
"""Ages between which processes that replaced each other are compared."""
Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """What a process is. One that replaces another has the same."""

    # front, gateway (its front), worker, supervisor, coordinator; other: drivers, programs and idle workers.
    role: str
    # The machine that it belongs to.
    member: str
    # What a worker serves; empty otherwise.
    serves: str = ""

    def __str__(self) -> str:
        return f"{self.member}/{self.role}{f' {self.serves}' if self.serves else ''}"


@dataclass(slots=True)
class ProcessMemory:
    """One process."""

    key: ProcessKey
    # When it was first seen to be this, by the monotonic clock.
    born: float
    # (time, resident bytes, bytes that it holds) of each sample.
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def series(self) -> NDArray[np.float64]:
        """(seconds, bytes held) of each sample."""
        return np.array([(at, held) for at, _, held in self.samples], np.float64).reshape(-1, 2)


class MemorySampler:
    """Samples all processes of a region on a thread, from `start` to `stop`."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")
        self._found: dict[tuple[int, float, ProcessKey], ProcessMemory] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[ProcessMemory]:
        self._stopping.set()
        self._thread.join()
        return list(self._found.values())

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with suppress(ShoalError):  # the region's supervisor is too busy
                self._sample(time.monotonic())

    def _sample(self, now: float) -> None:
        rows = self._control.status()
        served = workers_of(self._control.folder)
        for row in rows:
            if row["pid"]:
                key = key_of(row, served)
                with suppress(OSError, psutil.Error):
                    resident, held = read_memory(row["pid"])
                    identity = row["pid"], psutil.Process(row["pid"]).create_time(), key
                    self._found.setdefault(identity, ProcessMemory(key, now)).samples.append((now, resident, held))


def workers_of(folder: Path) -> dict[int, str]:
    """What each worker serves, by its process."""
    found = dict[int, str]()
    for record in folder.glob("*/run/worker-*.json"):
        with suppress(OSError, ValueError):
            said = json.loads(record.read_text())
            names = sorted({"/".join(each["workload"]) for each in said["assignments"]})
            if names:
                found[said["pid"]] = ",".join(names)
    return found


def key_of(row: Mapping[str, Any], served: Mapping[int, str]) -> ProcessKey:
    role = row["role"]
    if role == "worker":
        role = "worker" if row["pid"] in served else "other"
    elif role == "front" and row["member"] == "gateway":
        role = "gateway"
    return ProcessKey(role, row["name"], served.get(row["pid"], "") if role == "worker" else "")


def read_memory(pid: int) -> tuple[int, int]:
    """Resident bytes, and those that it holds. Raises OSError."""
    lines = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    sizes = {line[0]: 1024 * int(line[1]) for line in lines}
    return sizes["Rss:"], sizes["Anonymous:"] + sizes["Swap:"] + sizes["Pss_Shmem:"]


def medians_in(process: ProcessMemory, first: Window, last: Window) -> tuple[float, float] | None:
    """Median bytes that it held in each; None if it did not live through both."""
    found = process.series()
    early, late = (found[(found[:, 0] >= since) & (found[:, 0] <= until)] for since, until in (first, last))
    if not len(early) or not len(late) or found[0, 0] > first[0] + 2 * EVERY_S or found[-1, 0] < last[1] - 2 * EVERY_S:
        return None
    return float(np.median(early[:, 1])), float(np.median(late[:, 1]))


def growth_of_replaced(processes: Sequence[ProcessMemory]) -> float | None:
    """Bytes by which processes of one key that replaced each other grew, from the first to the last.

    They are compared at equal age, between AGES_S, by Theil and Sen's estimate: the median slope over all pairs. None
    if not two of them became that old.
    """
    points = list[tuple[float, float]]()
    for process in processes:
        found = process.series()
        ages = found[:, 0] - process.born
        inside = found[(ages >= AGES_S[0]) & (ages <= AGES_S[1])]
        if len(inside) and ages[-1] >= AGES_S[1]:
            points.append((process.born, float(np.median(inside[:, 1]))))
    points.sort()
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return float(np.median(slopes)) * (points[-1][0] - points[0][0]) if slopes else None


@dataclass(frozen=True, slots=True)
class Growth:
    """Of what has one key."""

    # What it is.
    key: ProcessKey
    # How many processes.
    count: int
    # Median bytes held at the end of the run; of the last one that lived.
    held: float
    # Of the one that lived through both windows, from one's median to the other's; None: none did.
    lived: float | None
    # The same, of what it held before.
    share: float | None
    # Of those that replaced each other; None: not two of them lived for long enough.
    replaced: float | None


def growths(processes: Iterable[ProcessMemory], first: Window, last: Window) -> list[Growth]:
    by_key = dict[ProcessKey, list[ProcessMemory]]()
    for process in processes:
        by_key.setdefault(process.key, []).append(process)
    found = list[Growth]()
    for key, group in sorted(by_key.items(), key=lambda item: str(item[0])):
        group.sort(key=lambda process: process.born)
        lived = [medians for process in group if (medians := medians_in(process, first, last)) is not None]
        grown = max((late - early for early, late in lived), default=None)
        share = max((late / early - 1 for early, late in lived), default=None)
        held = float(np.median([sample[2] for sample in group[-1].samples[-10:]]))
        found.append(Growth(key, len(group), held, grown, share, growth_of_replaced(group)))
    return found


def largest_share(found: Iterable[Growth]) -> float:
    """By which any process that lived through both windows grew, of what it held before; 0 where none did."""
    return max((each.share for each in found if each.share is not None), default=0.0)


def growth_of_role(found: Iterable[Growth], role: str) -> float | None:
    """The largest of those that lived through; where none did, the largest of those that were replaced."""
    own = [each for each in found if each.key.role == role]
    lived = [each.lived for each in own if each.lived is not None]
    replaced = [each.replaced for each in own if each.replaced is not None]
    return max(lived or replaced, default=None)
