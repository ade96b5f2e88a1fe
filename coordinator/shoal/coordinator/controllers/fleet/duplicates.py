"""Detects two agents that show the same identity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.coordinator.core.fleet.state import DuplicateIdentity
from shoal.coordinator.ports import Clock
from shoal.types.units import Elapsed, Seconds


@dataclass(frozen=True, slots=True)
class SuspectedDuplicate:
    """A hello that was refused because the node's session was alive.

    An agent that merely reconnected has closed its old session, and what it had sent there arrives at once. So only a
    status that comes a heartbeat after the first one shows that two agents run.
    """

    # Where the refused hello came from.
    other_address: str
    # When the session sent its first status since; None: none yet.
    heartbeat_at: Elapsed | None = None
    # True: the session is alive a heartbeat later, so two agents run.
    is_confirmed: bool = False


class DuplicateDetector:
    """By the addresses of sessions, and of hellos that were refused."""

    def __init__(self, clock: Clock) -> None:
        self.suspected: dict[str, SuspectedDuplicate] = {}
        """By node."""
        self._clock = clock
        self._addresses: dict[str, str] = {}

    def on_session(self, node: str, address: str) -> None:
        """A session was opened from there: nothing before it counts."""
        self._addresses[node] = address
        self.suspected.pop(node, None)

    def on_refused_hello(self, node: str, address: str) -> bool:
        """Whether this is the first one that makes the node suspected."""
        if node in self.suspected:
            return False
        self.suspected[node] = SuspectedDuplicate(address)
        return True

    def on_status(self, node: str, heartbeat_s: Seconds) -> None:
        """For a status of a suspected node's session. One that comes a heartbeat after the first one confirms that two
        agents run.
        """
        doubt, now = self.suspected[node], self._clock.now()
        if doubt.heartbeat_at is None:
            self.suspected[node] = replace(doubt, heartbeat_at=now)
        elif now - doubt.heartbeat_at >= heartbeat_s:
            self.suspected[node] = replace(doubt, is_confirmed=True)

    def confirmed_duplicates(self) -> Sequence[tuple[str, SuspectedDuplicate]]:
        """Nodes of which a second agent is known to run."""
        return [(node, doubt) for node, doubt in self.suspected.items() if doubt.is_confirmed]

    def identity_of(self, node: str, doubt: SuspectedDuplicate) -> DuplicateIdentity:
        """Where the two agents are."""
        return DuplicateIdentity(self._addresses.get(node, ""), doubt.other_address, self._clock.wall())

    def forget(self, node: str, doubt: SuspectedDuplicate | None = None) -> None:
        """Ends a suspicion. doubt: unless there is another one since."""
        if doubt is None or self.suspected.get(node) == doubt:
            self.suspected.pop(node, None)
