"""The supervisor's part in routes on demand: it follows what the front's clients ask for, and says what to report."""

from collections.abc import Callable

from shoal.agent.core import subscriptions
from shoal.agent.core.partition import LinkState
from shoal.agent.ports import AgentClock, FrontStats
from shoal.types.assignment import DesiredSet, Ingress, Subscriptions


class RouteSubscriptions:
    """What this node subscribes to. `on_change` is called when the region has to hear of it."""

    def __init__(self, clock: AgentClock, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._held: subscriptions.Subscribed = {}
        # The front's counters when they were looked at last.
        self._counted: tuple[Ingress, ...] = ()

    @property
    def report(self) -> Subscriptions:
        """All of them."""
        return subscriptions.to_report(self._held)

    def resume(self, desired: DesiredSet | None) -> None:
        """Go on from the set on disk."""
        self._held = subscriptions.resume(desired, self._clock.now())

    def follow(self, front: FrontStats, desired: DesiredSet | None, link_state: LinkState) -> None:
        """Look at what the front said last. One that cannot wait for routes keeps what it has."""
        if front.asked is None:
            return
        used = subscriptions.used_between(self._counted, front.ingress)
        self._counted = front.ingress
        before, now = self._held, self._clock.now()
        self._held = subscriptions.follow(before, {*front.asked, *used}, desired, link_state, now)
        if before.keys() != self._held.keys():
            self._on_change()
