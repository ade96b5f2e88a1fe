"""Injects a fault when a live migration enters a state, as the region's event log reports it."""

import contextlib
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from harness.cluster.stack import DevStack
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import RegionClient
from shoal.types.codes import ShoalError
from shoal.v1 import operator_pb2


@dataclass
class MigrationFault:
    """Kills `target` once, with SIGKILL, when a migration of the workload next enters one of `states`."""

    # Where it runs.
    stack: DevStack
    # Member, or `MEMBER/part`.
    target: str
    # Name of the workload.
    workload: str
    # Migration states, in lower case.
    states: Collection[str]
    # Id of the migration that was hit; empty before.
    migration: str = ""
    # Processes that were killed; empty if none of the target ran.
    pids: list[int] = field(default_factory=list)
    # Wall-clock seconds of the kill; 0 before.
    struck_at: float = 0.0
    # Ends the follower on exit.
    _cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "MigrationFault":
        last = max((event.sequence for event in self.stack.events()), default=0)
        api = self.stack.api()
        thread = threading.Thread(target=self._follow, args=(api, last), name="blow")
        thread.start()
        self._cleanup.callback(thread.join)
        self._cleanup.callback(api.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def wait(self, deadline_s: float) -> None:
        """Wait until the fault was injected and the killed processes are dead."""
        wait_until(lambda: self.struck_at > 0, deadline_s, f"{self.target} to be struck at {' or '.join(self.states)}")
        self.stack.wait_dead(self.pids)

    def state_of(self, migration: operator_pb2.MigrationView) -> str:
        """The state that the migration was in at the fault."""
        return [entered.stage for entered in migration.stages if entered.at <= self.struck_at][-1]

    def _follow(self, api: RegionClient, after: int) -> None:
        codes = {f"MIGRATION_{state.upper()}" for state in self.states}
        with contextlib.suppress(ShoalError):  # the log ends when this fault kills its coordinator
            for event in api.events(after, follow=True):
                if event.code in codes and event.workload.name == self.workload:
                    self.pids = self.stack.kill_if_running(self.target)
                    self.migration, self.struck_at = event.subject, SystemClock().wall()
                    return
