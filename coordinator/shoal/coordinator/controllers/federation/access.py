"""How a region reaches the others of its federation, and what it knows of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.negotiation.trade_times import ANSWER_S
from shoal.coordinator.ports import FederationLink, PeerRegions
from shoal.types.offer import Directory, Member, member_of
from shoal.types.units import Seconds

FEDERATION_S: Final = Seconds(ANSWER_S + 1.0)
"""A federation that has not answered by then counts as unreachable."""


@dataclass(frozen=True, slots=True)
class FederationAccess:
    """What both sides of a delegation need of the other regions."""

    # Calls to one other region.
    peers: PeerRegions
    # Calls to the federation; None where the region has none.
    federation: FederationLink | None
    # The newest directory; None where the region is in no federation.
    directory: Callable[[], Directory | None]
    # RTT to other regions, as far as measured.
    rtt: Callable[[], Mapping[str, Seconds]]

    @property
    def members(self) -> tuple[Member, ...]:
        """The regions of the directory, this one included; empty without one."""
        directory = self.directory()
        return directory.members if directory is not None else ()

    def member_of(self, region: str) -> Member | None:
        """The region's entry in the directory; None: not listed."""
        return member_of(self.directory(), region)
