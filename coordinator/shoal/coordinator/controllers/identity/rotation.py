"""Rotation of a CA in stages: a region's own, or a federation's.

A stage ends as soon as no participant lags behind; `Rotation.laggards` lists those that do. What a stage needs of a
participant is the same for all: at `trust` that it trusts the next CA, at `issue` a certificate of that CA.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.identity.certificates import IDENTITIES, IdentityRecord
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.ports import Clock, RootInfo, RotatingAuthority, Store
from shoal.types.codes import Code, refuse
from shoal.types.device import Role
from shoal.types.units import Wall

LACKS_TRUST: Final = "trust in the next CA"
LACKS_CERTIFICATE: Final = "a certificate of the CA that issues"
_FOLLOWING: Final = {"trust": "issue", "issue": "retire"}
_EVENTS: Final = {"issue": "CA_ISSUES", "retire": "CA_RETIRED"}


@dataclass(frozen=True, slots=True)
class Laggard:
    """A member that a rotation waits for."""

    # URI name of the member.
    uri: str
    # What it still has to get.
    lacks: str
    # True if it has a session; for the broker, if it shows a certificate; for a member region, if it advertises.
    is_connected: bool
    # When its certificate expires; 0: unknown.
    not_after: Wall


@dataclass(frozen=True, slots=True)
class Participants:
    """Who takes part in a rotation at its present stage."""

    # How many they are, laggards included.
    count: int
    # Those that the stage waits for.
    laggards: tuple[Laggard, ...]


@dataclass(frozen=True, slots=True)
class Rotation:
    """State of the CA's rotation."""

    # One of idle, trust and issue; idle: no rotation is in progress.
    stage: str
    # When the stage began.
    since: Wall
    # All CAs there have been.
    roots: tuple[RootInfo, ...]
    # Members that the stage waits for, by URI name.
    laggards: tuple[Laggard, ...]
    # Number of members that take part: nodes or member regions, people, the broker, and for a region its federation
    # while it is waited for.
    members: int


class CaRotation:
    """participants: asked whenever the rotation could go on. on_stage: called when another CA is trusted or issues.
    note: writes an event. exclusive: held during a change of stage, where several processes share the CA's files.
    """

    def __init__(
        self,
        name: str,
        authority: RotatingAuthority,
        clock: Clock,
        *,
        participants: Callable[[], Awaitable[Participants]],
        on_stage: Callable[[], None],
        note: Callable[[LogEvent], Awaitable[None]],
        exclusive: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._name = name
        self._authority = authority
        self._clock = clock
        self._participants = participants
        self._on_stage = on_stage
        self._note = note
        self._exclusive = exclusive
        self._rotating = asyncio.Lock()

    async def state(self) -> Rotation:
        authority, found = self._authority, await self._participants()
        laggards = tuple(sorted(found.laggards, key=lambda each: each.uri))
        return Rotation(authority.stage, authority.since, authority.infos(), laggards, found.count)

    async def rotate(self, stage: str, actor: str) -> None:
        """stage: empty begins; `issue` and `retire` proceed without the laggards.

        Raises ShoalError(FIELD_INVALID | CONFLICT).
        """
        if stage not in ("", "issue", "retire"):
            raise refuse(Code.FIELD_INVALID, f"stage {stage!r:.40}", "issue or retire", "leave it out to begin")
        await self._set_stage(stage, actor)

    async def advance(self) -> None:
        """Goes on to the next stage if nobody lags behind. Raises ShoalError(CONFLICT | STORE_*), StaleRevision."""
        following = _FOLLOWING.get(self._authority.stage)
        if following is not None and not (await self._participants()).laggards:
            await self._set_stage(following, "coordinator")

    async def _set_stage(self, stage: str, actor: str) -> None:
        async with self._rotating, self._exclusive():
            wall = self._clock.wall()
            match stage:
                case "issue":
                    await self._authority.promote(wall)
                case "retire":
                    await self._authority.retire(wall)
                case _:
                    await self._authority.begin(wall)
            self._on_stage()
            message = f"{self._authority.fingerprint[:16]} issues; {len(self._authority.roots)} trusted"
            await self._note(LogEvent(_EVENTS.get(stage, "CA_FOLLOWED"), self._name, message, actor))


def trusts_all(authority: RotatingAuthority, fingerprints: Iterable[str]) -> bool:
    """Whether someone who trusts the CAs of these fingerprints trusts each CA that is trusted now."""
    return {*authority.fingerprints} <= {*fingerprints}


async def valid_people(store: Store, roles: Iterable[Role], wall: Wall) -> list[IdentityRecord]:
    """Those of these roles whose certificate is valid: operators, viewers and tenants."""
    found = []
    for role in roles:
        for each in await store.scan(f"{IDENTITIES}{role}/"):
            record = codec.load(IdentityRecord, each.value)
            if record.not_after > wall and not record.revoked:
                found.append(record)
    return found


def people_laggards(people: Iterable[IdentityRecord], authority: RotatingAuthority) -> list[Laggard]:
    """Those whose certificate is of another CA than the one that issues now."""
    return [
        Laggard(record.uri, LACKS_CERTIFICATE, False, record.not_after)
        for record in people
        if record.issuer != authority.fingerprint
    ]
