"""Keeps the agent's time on disk (`journal/clock`), and tells when the machine's clock jumped."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from shoal.agent.clock import FollowedClock, SystemClock
from shoal.agent.core.timekeeping import MACHINE, OPERATOR, Kept
from shoal.agent.identity.host import boot_id
from shoal.agent.journal.slots import Slots, peek, replace_file
from shoal.agent.ports import Log
from shoal.types.codes import Code
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds

NAME: Final = "clock"
SAVE_EVERY_S: Final = Seconds(15.0)
LOOK_EVERY_S: Final = Seconds(1.0)
CONFIRMED: Final = "clock.confirmed"
"""Laid down by `shoal-agent clock --confirm`, taken up by the agent that runs."""
Tell = Callable[[str, str, str], None]


class Timekeeper:
    """The supervisor's clock, and `ports.Sightings`: what the coordinator last said is kept beside the time."""

    def __init__(self, folder: Path, least: Wall, log: Log) -> None:
        """folder: the journal's."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._log = log
        self._slots = Slots(folder, NAME, lambda aside: log("state_corrupt", error=True, found=aside.name))
        kept = _decode(self._slots.load())
        self.clock = SystemClock(kept, boot=boot_id(), least=least)
        self._heard = kept.heard if kept else None
        self._cut_wall = _cut_wall(kept)
        self._linked = False
        self._dirty = asyncio.Event()
        self._saving = threading.Lock()
        self._unread = False
        """A confirmation lies there that cannot be read; said once."""
        self.save()

    def heard(self) -> Elapsed | None:
        return self.clock.now() if self._linked else self._heard

    def linked(self, coordinator_time: Wall) -> None:
        self._linked = True
        self._cut_wall = None
        self.confirm("coordinator", coordinator_time)
        self._dirty.set()

    def cut_off(self) -> None:
        if self._linked:
            self._heard, self._cut_wall = self.clock.now(), self.clock.wall()
            self._linked = False
            self._dirty.set()

    def confirm(self, source: str, wall: Wall) -> None:
        """`source`, authenticated by the caller, says that it is `wall` now."""
        before = self.clock.wall()
        if self.clock.told(source, wall):
            self._log("clock_believed", seconds=round(self.clock.wall() - before, 3), source=source)
            self._dirty.set()

    async def keep(self, node: str, tell: Tell) -> None:
        """Until cancelled: saves now and then and when something changed; looks at the machine's clock every second."""
        saved_at = self.clock.now()
        jumped = False
        while True:
            self._take_confirmation()
            found = self.clock.jumped()
            if found is not None:
                self.confirm(MACHINE, self.clock.machine())
            if found is not None and not jumped:
                tell(Code.CLOCK_SKEW, node, f"this machine's clock jumped by {found:.0f}s: {_GOES_ON}")
            jumped = found is not None
            if self._dirty.is_set() or self.clock.now() - saved_at >= SAVE_EVERY_S:
                self._dirty.clear()
                await asyncio.to_thread(self.save)
                saved_at = self.clock.now()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._dirty.wait(), LOOK_EVERY_S)

    def save(self) -> None:
        """Blocking."""
        with self._saving:
            kept = self.clock.kept(self.heard(), self._cut_wall)
            try:
                self._slots.save(json.dumps(astuple(kept)).encode())
            except OSError as error:
                self._log("time_not_saved", error=True, reason=str(error))

    def _take_confirmation(self) -> None:
        path = self._folder / CONFIRMED
        try:
            boot, ticks, wall = json.loads(path.read_text())
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._unread:
                self._log("confirmation_not_read", error=True, reason=str(error), remedy="say it as this agent's user")
            self._unread = True
            boot, ticks, wall = None, 0.0, 0.0
        except (ValueError, TypeError):
            boot, ticks, wall = None, 0.0, 0.0  # not our own writing
        now = self.clock.kept(None, None)
        if boot == now.boot:  # else it was for a clock that has been off since
            self.confirm(OPERATOR, Wall(wall + (now.ticks - ticks)))
        with suppress(OSError):
            path.unlink(missing_ok=True)


_GOES_ON: Final = (
    "the time from before it goes on; once the coordinator says the same it is believed, or confirm it with"
    " `shoal-agent clock --confirm`"
)


def followed(folder: Path) -> FollowedClock:
    """The clock of the front of the agent with this journal. Without a record it is the machine's."""
    stamp: tuple[int, ...] = ()
    kept: Kept | None = None

    def read() -> Kept | None:
        nonlocal stamp, kept
        newest = tuple(path.stat().st_mtime_ns for path in sorted(folder.glob(f"{NAME}.[ab]")))
        if newest != stamp:
            stamp, kept = newest, _decode(peek(folder, NAME))
        return kept

    return FollowedClock(read, boot_id())


def show(folder: Path, *, confirmed: bool) -> int:
    """Prints what time the node with this journal believes it is. confirmed: an operator says that the machine's clock
    is right; the agent believes it within a second, or when it starts."""
    kept = _decode(peek(folder, NAME))
    clock = SystemClock(kept, boot=boot_id())
    jumped = clock.jumped()
    print(f"machine's clock   {_iso(clock.machine())}")
    print(f"believed          {_iso(clock.wall())}")
    if jumped is not None:
        print(f"{Code.CLOCK_SKEW}  the machine's clock is {show_seconds(jumped)} off; right? then: --confirm")
    if kept is not None and kept.heard is not None:
        print(f"coordinator       heard {show_seconds(max(0.0, clock.now() - kept.heard))} ago, of the time it was up")
    if kept is not None and kept.cut_wall is not None:
        print(f"cut off since     {_iso(kept.cut_wall)}; certificates and tokens that were valid then still count here")
    if confirmed:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        now = clock.kept(None, None)
        replace_file(folder / CONFIRMED, json.dumps((now.boot, now.ticks, clock.machine())).encode())
        if os.geteuid() == 0:  # for the agent to read, whose folder it is
            owner = folder.stat()
            os.chown(folder / CONFIRMED, owner.st_uid, owner.st_gid)
        print("confirmed")
    return 0


def _iso(wall: Wall) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


def _cut_wall(kept: Kept | None) -> Wall | None:
    """Until the link is up a run is cut off, since the earlier one was or since that last kept its time."""
    if kept is None:
        return None
    return kept.wall if kept.cut_wall is None else kept.cut_wall


def _decode(content: bytes | None) -> Kept | None:
    if content is None:
        return None
    try:
        boot, ticks, elapsed, wall, heard, cut_wall = json.loads(content)
    except (ValueError, TypeError):
        return None  # another version's
    return Kept(
        boot,
        Seconds(ticks),
        Elapsed(elapsed),
        Wall(wall),
        None if heard is None else Elapsed(heard),
        None if cut_wall is None else Wall(cut_wall),
    )
