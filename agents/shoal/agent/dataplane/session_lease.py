"""The lease of a front's sessions: while it lasts, this front is their only owner."""

from shoal.agent.ports import AgentClock
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Elapsed


class SessionLease:
    """Until when sessions may go on at this node, and under which claim of the region."""

    def __init__(self, node: str, clock: AgentClock) -> None:
        self._node = node
        self._clock = clock
        self.until = Elapsed(float("-inf"))
        self.claim = ""

    @property
    def is_over(self) -> bool:
        return self._clock.now() >= self.until

    def extend(self, until: Elapsed, claim: str) -> bool:
        """Whether the sessions go on. After a gap they do if `claim` is the same: then the region did not declare this
        node lost, so nobody else has them."""
        is_continued = not self.is_over or (claim != "" and claim == self.claim)
        self.claim = claim
        self.until = Elapsed(max(self.until, until))
        return is_continued

    def check(self) -> None:
        """Raises ShoalError(LEASE_ENDED)."""
        if self.is_over:
            raise ShoalError(
                Refusal(
                    Code.LEASE_ENDED,
                    f"{self._node} has not heard from its region: no session may go on there",
                    "a node that is linked",
                    "try again: it goes on once the node is linked; or begin it anew (sequence_start) at another front",
                )
            )
