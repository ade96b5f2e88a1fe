"""A blow at one state of a live move: as soon as the region's log says that it was entered."""

import contextlib
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from harness.stack import Stack
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Region
from shoal.types.codes import ShoalError
from shoal.v1 import operator_pb2


@dataclass
class Blow:
    """SIGKILL of `target`, once, as a move of the workload enters one of `states` from now on.

    migration: which. pids: of what was hit; empty where nothing of it ran. at: the wall clock then."""

    stack: Stack
    target: str
    workload: str
    states: Collection[str]
    migration: str = ""
    pids: list[int] = field(default_factory=list)
    at: float = 0.0
    _ended: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "Blow":
        last = max((event.sequence for event in self.stack.events()), default=0)
        api = self.stack.api()
        thread = threading.Thread(target=self._follow, args=(api, last), name="blow")
        thread.start()
        self._ended.callback(thread.join)
        self._ended.callback(api.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.close()

    def wait(self, deadline_s: float) -> None:
        """Until it has struck, and what it hit is dead."""
        wait_until(lambda: self.at > 0, deadline_s, f"{self.target} to be struck at {' or '.join(self.states)}")
        self.stack.wait_dead(self.pids)

    def state_of(self, migration: operator_pb2.MigrationView) -> str:
        """In which it was when it was struck."""
        return [entered.stage for entered in migration.stages if entered.at <= self.at][-1]

    def _follow(self, api: Region, after: int) -> None:
        codes = {f"MIGRATION_{state.upper()}" for state in self.states}
        with contextlib.suppress(ShoalError):  # the log ends with its coordinator, and with this blow
            for event in api.events(after, follow=True):
                if event.code in codes and event.workload.name == self.workload:
                    self.pids = self.stack.strike(self.target)
                    self.migration, self.at = event.subject, SystemClock().wall()
                    return
