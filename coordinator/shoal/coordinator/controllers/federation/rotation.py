"""Rotation of a federation's own CA: as a region's, with member regions in place of nodes.

Regions learn the CAs from the answers to their advertisements, and tell in the next advertisement which ones they
trust. A region without a valid advertisement is not waited for, as a lost node is not: when it comes back, the CA that
it knows vouches for its successor.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from shoal.coordinator.controllers.identity.rotation import (
    LACKS_TRUST,
    CaRotation,
    Laggard,
    Participants,
    Rotation,
    people_laggards,
    trusts_all,
    valid_people,
)
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.elections import while_elected
from shoal.coordinator.ports import Election, SharedAuthority, StaleRevision
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import uri_of
from shoal.types.offer import Advertisement
from shoal.types.units import Seconds, Wall

TICK_S: Final = Seconds(1.0)
SHARED_STAGE_S: Final = Seconds(5.0)
"""How long a stage lasts at least where there may be other replicas: each reads every TICK_S what stage it is."""
ELECTION_S: Final = 15.0
"""Another replica holds the election for the moment of a change, or until its lease ends if it died then."""
LACKS_VERSION: Final = f"{LACKS_TRUST}: its version does not follow a federation's CA; update its coordinators"

log: Final = structlog.get_logger("shoal.coordinator.federation")


class FederationRotation:
    """advertisements: of its members, those that are valid now. election: makes replicas change the stage one at a
    time. roles: of people whom the federation certifies. on_stage: called when another CA is trusted or issues. Call
    `run`, until cancelled.
    """

    def __init__(
        self,
        context: ControllerContext,
        authority: SharedAuthority,
        election: Election,
        *,
        advertisements: Callable[[], Iterable[Advertisement]],
        roles: Iterable[Role],
        on_stage: Callable[[], None],
    ) -> None:
        self._context = context
        self._authority = authority
        self._election = election
        self._advertisements = advertisements
        self._roles = tuple(roles)
        self._failure: Code | None = None
        self._rotation = CaRotation(
            context.name,
            authority,
            context.clock,
            participants=self._participants,
            on_stage=on_stage,
            note=context.events.write,
            exclusive=self._as_only_replica,
        )

    async def run(self) -> None:
        while True:
            try:
                await self._step()
                self._failure = None
            except StaleRevision:
                pass  # another replica was first
            except ShoalError as error:  # the store takes no writes now, say; the next iteration tries again
                if error.code not in (Code.CONFLICT, self._failure):
                    log.warning("ca_rotation_failed", code=error.code, error=str(error))
                self._failure = error.code
            await self._context.clock.sleep(TICK_S)

    async def _step(self) -> None:
        if self._election.is_shared:
            await self._authority.reload()
        if self._may_advance():
            await self._rotation.advance()

    async def state(self) -> Rotation:
        return await self._rotation.state()

    async def rotate(self, stage: str, actor: str) -> None:
        """As `CaRotation.rotate`."""
        await self._rotation.rotate(stage, actor)

    def _may_advance(self) -> bool:
        lasted = self._context.clock.wall() - self._authority.since
        return not self._election.is_shared or not 0 <= lasted < SHARED_STAGE_S  # a clock set back holds nothing up

    async def _participants(self) -> Participants:
        authority = self._authority
        live = tuple(self._advertisements())
        people = await valid_people(self._context.store, self._roles, self._context.clock.wall())
        found = []
        if authority.stage == "trust":
            found += [_laggard(each) for each in live if not trusts_all(authority, each.trusted_roots)]
        elif authority.stage == "issue":
            found += [_laggard(each) for each in live if authority.fingerprint not in each.trusted_roots]
            found += people_laggards(people, authority)
        return Participants(len(live) + len(people), tuple(found))

    @asynccontextmanager
    async def _as_only_replica(self) -> AsyncIterator[None]:
        """Ends the change where another replica could begin one. Raises ShoalError(CONFLICT | STATE_CORRUPT)."""
        try:
            await self._campaign()
            async with while_elected(self._election):
                await self._authority.reload()
                yield
        finally:
            await self._election.resign()

    async def _campaign(self) -> None:
        try:
            async with asyncio.timeout(ELECTION_S):
                await self._election.campaign()
        except TimeoutError as cause:
            found = "another replica that is about to change the CA, or a store that does not answer"
            raise refuse(Code.CONFLICT, found, "one change at a time", "try again") from cause


def _laggard(advertisement: Advertisement) -> Laggard:
    uri = uri_of(advertisement.region, Role.COORDINATOR, str(Role.COORDINATOR))
    return Laggard(uri, LACKS_TRUST if advertisement.trusted_roots else LACKS_VERSION, True, Wall(0.0))
