"""Keeps the agent's time on disk (`journal/clock`), and reports jumps of the machine's clock."""

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

from shoal.agent.clock import FollowerClock, SystemClock
from shoal.agent.core.timekeeping import MACHINE, OPERATOR, SavedClock
from shoal.agent.identity.host import boot_id
from shoal.agent.journal.slots import Slots, peek, replace_file
from shoal.agent.ports import Log
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds

CLOCK_SLOT: Final = "clock"
SAVE_EVERY_S: Final = Seconds(15.0)
CHECK_EVERY_S: Final = Seconds(1.0)
CONFIRMATION_FILE: Final = "clock.confirmed"
"""Written by `shoal-agent clock --confirm`, and consumed by the running agent."""
ReportEvent = Callable[[str, str, str], None]


class Timekeeper:
    """The supervisor's clock, and its `ports.CoordinatorContact`: the last contact is stored with the time."""

    def __init__(self, folder: Path, least: Wall, log: Log) -> None:
        """`folder` is the journal's. `least`: no date before it can be true."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._log = log
        self._slots = Slots(
            folder, CLOCK_SLOT, lambda aside: log.error("state_corrupt", code=Code.STATE_CORRUPT, file=aside.name)
        )
        kept = _decode(self._slots.load())
        self.clock = SystemClock(kept, boot=boot_id(), earliest=least)
        self._last_contact = kept.last_contact if kept else None
        self._cutoff_wall = _cutoff_wall(kept)
        self._is_linked = False
        self._dirty = asyncio.Event()
        self._saving = threading.Lock()
        # True if a confirmation cannot be read; logged once.
        self._has_unreadable_confirmation = False
        self.save()

    def last_contact(self) -> Elapsed | None:
        return self.clock.now() if self._is_linked else self._last_contact

    def on_link_up(self, coordinator_time: Wall) -> None:
        self._is_linked = True
        self._cutoff_wall = None
        self.confirm("coordinator", coordinator_time)
        self._dirty.set()

    def on_link_lost(self) -> None:
        if self._is_linked:
            self._last_contact, self._cutoff_wall = self.clock.now(), self.clock.wall()
            self._is_linked = False
            self._dirty.set()

    def confirm(self, source: str, wall: Wall) -> None:
        """`source`, authenticated by the caller, claims that it is now `wall`."""
        before = self.clock.wall()
        if self.clock.add_claim(source, wall):
            self._log.info("clock_changed", offset_s=round(self.clock.wall() - before, 3), source=source)
            self._dirty.set()

    async def run(self, node: str, report: ReportEvent) -> None:
        """Runs until cancelled. Saves every SAVE_EVERY_S and after a change, and checks the machine's clock every
        CHECK_EVERY_S."""
        saved_at = self.clock.now()
        jumped = False
        while True:
            self._take_confirmation()
            found = self.clock.clock_jump()
            if found is not None:
                self.confirm(MACHINE, self.clock.machine_wall())
            if found is not None and not jumped:
                report(Code.CLOCK_SKEW, node, f"this machine's clock jumped by {found:.0f}s: {_JUMP_HINT}")
            jumped = found is not None
            if self._dirty.is_set() or self.clock.now() - saved_at >= SAVE_EVERY_S:
                self._dirty.clear()
                await asyncio.to_thread(self.save)
                saved_at = self.clock.now()
            await wait_or_timeout(self._dirty, CHECK_EVERY_S)

    def save(self) -> None:
        """Blocking. A failure is logged; the next save tries again."""
        with self._saving:
            kept = self.clock.to_saved_clock(self.last_contact(), self._cutoff_wall)
            try:
                self._slots.save(json.dumps(astuple(kept)).encode())
            except OSError as error:
                self._log.error("clock_write_failed", error=str(error))

    def _take_confirmation(self) -> None:
        path = self._folder / CONFIRMATION_FILE
        try:
            boot, ticks, wall = json.loads(path.read_text())
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._has_unreadable_confirmation:
                self._log.error(
                    "clock_confirmation_unreadable", error=str(error), remedy="confirm as this agent's user"
                )
            self._has_unreadable_confirmation = True
            boot, ticks, wall = None, 0.0, 0.0
        except (ValueError, TypeError):
            boot, ticks, wall = None, 0.0, 0.0  # not written by this program
        now = self.clock.to_saved_clock(None, None)
        if boot == now.boot:  # a confirmation from before a reboot is ignored
            self.confirm(OPERATOR, Wall(wall + (now.ticks - ticks)))
        with suppress(OSError):
            path.unlink(missing_ok=True)


_JUMP_HINT: Final = (
    "the time from before it goes on; once the coordinator says the same it is believed, or confirm it with"
    " `shoal-agent clock --confirm`"
)


def make_front_clock(folder: Path) -> FollowerClock:
    """The clock of the front of the agent with this journal. Without a saved clock it is the machine's."""
    stamp: tuple[int, ...] = ()
    kept: SavedClock | None = None

    def read() -> SavedClock | None:
        nonlocal stamp, kept
        newest = tuple(path.stat().st_mtime_ns for path in sorted(folder.glob(f"{CLOCK_SLOT}.[ab]")))
        if newest != stamp:
            stamp, kept = newest, _decode(peek(folder, CLOCK_SLOT))
        return kept

    return FollowerClock(read, boot_id())


def show_clock(folder: Path, *, confirmed: bool) -> int:
    """Print the time that the node with this journal believes.

    `confirmed`: an operator states that the machine's clock is right. A running agent accepts that within a second,
    otherwise the next one does at its start.
    """
    kept = _decode(peek(folder, CLOCK_SLOT))
    clock = SystemClock(kept, boot=boot_id())
    jumped = clock.clock_jump()
    print(f"machine's clock   {_iso(clock.machine_wall())}")
    print(f"believed          {_iso(clock.wall())}")
    if jumped is not None:
        print(f"{Code.CLOCK_SKEW}  the machine's clock is {show_seconds(jumped)} off; right? then: --confirm")
    if kept is not None and kept.last_contact is not None:
        silence = show_seconds(max(0.0, clock.now() - kept.last_contact))
        print(f"coordinator       last contact {silence} ago, counting the time that this agent ran")
    if kept is not None and kept.cutoff_wall is not None:
        print(
            f"cut off since     {_iso(kept.cutoff_wall)}; certificates and tokens that were valid then still count here"
        )
    if confirmed:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        now = clock.to_saved_clock(None, None)
        replace_file(folder / CONFIRMATION_FILE, json.dumps((now.boot, now.ticks, clock.machine_wall())).encode())
        if os.geteuid() == 0:  # so that the agent, which owns the folder, can read it
            owner = folder.stat()
            os.chown(folder / CONFIRMATION_FILE, owner.st_uid, owner.st_gid)
        print("confirmed")
    return 0


def _iso(wall: Wall) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


def _cutoff_wall(kept: SavedClock | None) -> Wall | None:
    """A run starts cut off: since the earlier run was, or since that run last saved its time."""
    if kept is None:
        return None
    return kept.wall if kept.cutoff_wall is None else kept.cutoff_wall


def _decode(content: bytes | None) -> SavedClock | None:
    if content is None:
        return None
    try:
        boot, ticks, elapsed, wall, heard, cut_wall = json.loads(content)
    except (ValueError, TypeError):
        return None  # written by another version
    return SavedClock(
        boot,
        Seconds(ticks),
        Elapsed(elapsed),
        Wall(wall),
        None if heard is None else Elapsed(heard),
        None if cut_wall is None else Wall(cut_wall),
    )
