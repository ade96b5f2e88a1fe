"""Who belongs to the region: revoking, settling twins, and following one CA by another.

A revocation is in the store, with the node's next epoch, before anything is told; then every listener refuses by what
is kept here in memory, call by call, and every front by the list in its desired set. A rotation goes on by itself, step
by step, as soon as nobody is left to wait for; what it waits for is listed.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.enrolment import LIFETIME_S
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.identities import GRACE_S, IDENTITIES, Held, IdentityRecord, key_of
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.ports import Broker, Clock, RootInfo, RotatingAuthority, StaleRevision, Store
from shoal.types.assignment import Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.identity import NODES, Identity, parse_name, uri_of

REVOKED: Final = "revoked/"
TOLD_MOST: Final = 500
"""Revoked gateways that other regions are told of: a message to them has its bounds."""
TICK_S: Final = Seconds(1.0)
KEEP: Final = ("running", "none")
NEAR_END: Final = 1 / 6
"""Of a certificate's life: it should have been renewed when a third was left."""


@dataclass(frozen=True, slots=True)
class Revocation:
    """One certificate that is refused though its time is not over. Kept until it could not be renewed any more."""

    serial: str
    uri: str
    not_after: Wall
    reason: str
    actor: str
    at: Wall


@dataclass(frozen=True, slots=True)
class Laggard:
    """Whom a rotation waits for. lacks: what it has to get."""

    uri: str
    lacks: str
    connected: bool
    not_after: Wall


@dataclass(frozen=True, slots=True)
class Rotation:
    stage: str
    since: Wall
    roots: tuple[RootInfo, ...]
    laggards: tuple[Laggard, ...]
    members: int


class Members:
    """ended: told the serials that were just refused, so that what is open with them ends. turned: called when another
    CA is trusted or issues. `run` until cancelled."""

    def __init__(
        self,
        region: Region,
        store: Store,
        authority: RotatingAuthority,
        clock: Clock,
        *,
        broker: Broker | None = None,
        ended: Callable[[frozenset[str]], None],
        turned: Callable[[], None],
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
    ) -> None:
        self._region = region
        self._store = store
        self._authority = authority
        self._clock = clock
        self._broker = broker
        self._ended = ended
        self._turned = turned
        self._lifetimes = lifetimes
        self._revoked: dict[str, Revocation] = {}
        self._turning = asyncio.Lock()

    async def start(self) -> None:
        for record in await self._store.scan(REVOKED):
            revocation = records.load(Revocation, record.value)
            self._revoked[revocation.serial] = revocation
        self._publish()

    async def run(self) -> None:
        while True:
            try:
                await self._prune()
                await self._advance()
            except (ShoalError, StaleRevision):
                pass  # the store takes nothing for now; nothing was lost by waiting
            await self._clock.sleep(TICK_S)

    @property
    def wall(self) -> Wall:
        return self._clock.wall()

    @property
    def revoked(self) -> tuple[Revocation, ...]:
        return tuple(sorted(self._revoked.values(), key=lambda each: (each.at, each.serial)))

    def check(self, serial: str) -> Refusal | None:
        """Why a certificate is refused, whatever its dates."""
        revocation = self._revoked.get(serial)
        if revocation is None:
            return None
        return Refusal(
            Code.CERT_REVOKED,
            f"the certificate of {revocation.uri} was revoked: {revocation.reason}",
            "one that is good",
            "enrol again with a new token",
        )

    def forbids(self, identity: Identity) -> Refusal | None:
        """Why a certificate may not be renewed."""
        if (refusal := self.check(identity.serial)) is not None:
            return refusal
        state = self._region.fleet.fleet.nodes.get(identity.name) if identity.role in NODES else None
        if state is not None and state.twins is not None:
            return Refusal(
                Code.TWIN_REFUSED,
                f"two agents show {identity.uri}",
                "an operator's word",
                f"shoal node settle {identity.name}",
            )
        return None

    async def near_end(self) -> tuple[tuple[str, float], ...]:
        """(URI name, seconds left) of nodes and people who should have renewed by now; below zero when it ended.

        Of people only while it is good: who never came back since needs no alarm.
        """
        wall = self._clock.wall()
        nodes = self._region.fleet.fleet.nodes.values()
        held = [await self._store.read(key_of(each.node.role, each.name)) for each in nodes]
        known = [records.load(IdentityRecord, each.value) for each in held if each is not None]
        found = [
            (record.uri, record.not_after - wall)
            for record in (*known, *await self._people())
            if not record.revoked and record.not_after - wall < NEAR_END * self._lifetimes[parse_name(record.uri)[1]]
        ]
        return tuple(sorted(found, key=lambda each: (each[1], each[0])))

    # revoking and settling

    async def revoke(self, name: str, role: str, reason: str, actor: str) -> tuple[str, ...]:
        """The serials that are refused from now on. role: empty for the node of that name.

        Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID | CONFLICT)."""
        state = self._region.fleet.fleet.nodes.get(name)
        found = await self._identity(_role(role), name, state)
        key = key_of(found.role, name)
        wall = self._clock.wall()
        stored = await self._store.read(key)
        record = None if stored is None else records.load(IdentityRecord, stored.value)
        held = [] if record is None or record.revoked else list(record.certificates(wall))
        if found.serial and all(each.serial != found.serial for each in held):
            held.append(Held(found.serial, Wall(wall + max(LIFETIME_S.values())), ""))
        uri = uri_of(self._region.config.name, found.role, name)
        fresh = [Revocation(each.serial, uri, each.not_after, reason, actor, wall) for each in held]
        puts = {REVOKED + each.serial: records.dump(each) for each in fresh}
        if record is not None:
            puts[key] = records.dump(replace(record, revoked=True))
        if found.role in NODES and state is not None:
            await self._region.fleet.revoke(name, reason, actor, puts)
        else:
            await self._region.truth.commit(puts, events=[Event("REVOKED", uri, reason, actor)])
        self._revoked.update((each.serial, each) for each in fresh)
        self._publish()
        self._ended(frozenset(each.serial for each in fresh))
        if self._broker is not None and found.role in NODES:
            await self._broker.expel(name)
        return tuple(each.serial for each in fresh)

    async def settle(self, node: str, keep: str, actor: str) -> None:
        """keep: `running` (whoever has the session stays), `none` (nobody: both must enrol again).

        Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID | CONFLICT)."""
        if keep not in KEEP:
            raise refuse(Code.FIELD_INVALID, f"keep {keep!r:.40}", " or ".join(KEEP), "say which of the two stays")
        if keep == "running":
            await self._region.fleet.settle(node, actor)
        else:
            await self.revoke(node, "", "two agents showed this identity", actor)

    async def _identity(self, role: Role | None, name: str, state: NodeState | None) -> "_Found":
        if state is not None and role in (None, state.node.role):
            return _Found(state.node.role, state.serial)
        for each in NODES if role is None else (role,):
            if await self._store.read(key_of(each, name)) is not None:
                return _Found(each, "")
        what = "node" if role is None else str(role)
        raise refuse(Code.NODE_UNKNOWN, f"no {what} {name!r:.80}", "one that enrolled", "see `shoal get nodes`")

    async def _prune(self) -> None:
        wall = self._clock.wall()
        over = [each for each in self._revoked.values() if each.not_after + GRACE_S <= wall]
        if over:
            await self._region.truth.commit({}, deletes=tuple(REVOKED + each.serial for each in over))
            for each in over:
                del self._revoked[each.serial]
        self._publish()

    def _publish(self) -> None:
        """What every node shall believe. A certificate that has ended is refused for that."""
        wall = self._clock.wall()
        lasting = [each for each in self._revoked.values() if each.not_after > wall]
        serials = tuple(sorted(each.serial for each in lasting))
        gateways = sorted(each.serial for each in lasting if parse_name(each.uri)[1] is Role.GATEWAY)
        self._region.workloads.adopt_trust(Trust(self._authority.roots, serials), tuple(gateways[:TOLD_MOST]))

    # the authority

    async def rotation(self) -> Rotation:
        authority = self._authority
        nodes = [state for state in self._region.fleet.fleet.nodes.values() if _counts(state)]
        people = await self._people()
        laggards = await self._laggards(nodes, people)
        members = len(nodes) + len(people) + (self._broker is not None)
        return Rotation(authority.stage, authority.since, authority.infos(), laggards, members)

    async def rotate(self, stage: str, actor: str) -> None:
        """stage: empty begins; `issue` and `retire` go on without those that are waited for.

        Raises ShoalError(FIELD_INVALID | CONFLICT)."""
        if stage not in ("", "issue", "retire"):
            raise refuse(Code.FIELD_INVALID, f"stage {stage!r:.40}", "issue or retire", "leave it out to begin")
        await self._turn(stage, actor)

    async def _advance(self) -> None:
        following = {"trust": "issue", "issue": "retire"}.get(self._authority.stage)
        if following is not None and not (await self.rotation()).laggards:
            await self._turn(following, "coordinator")

    async def _turn(self, stage: str, actor: str) -> None:
        async with self._turning:
            wall = self._clock.wall()
            match stage:
                case "issue":
                    await self._authority.promote(wall)
                case "retire":
                    await self._authority.retire(wall)
                case _:
                    await self._authority.begin(wall)
            self._turned()
            self._publish()
            word = {"issue": "CA_ISSUES", "retire": "CA_RETIRED"}.get(stage, "CA_FOLLOWED")
            message = f"{self._authority.fingerprint[:16]} issues; {len(self._authority.roots)} trusted"
            await self._region.truth.note(Event(word, self._region.config.name, message, actor))

    async def _laggards(self, nodes: list[NodeState], people: list[IdentityRecord]) -> tuple[Laggard, ...]:
        authority = self._authority
        found = []
        if authority.stage == "trust":
            wanted = set(authority.fingerprints)
            found = [self._laggard(state, "trust in the next CA") for state in nodes if not wanted <= {*state.roots}]
        elif authority.stage == "issue":
            lacks = "a certificate of the CA that issues"
            for state in nodes:
                if await self._issuer(state) != authority.fingerprint:
                    found.append(self._laggard(state, lacks))
            for record in people:
                if record.issuer != authority.fingerprint:
                    found.append(Laggard(record.uri, lacks, False, record.not_after))
            found += await self._lagging_broker()
        return tuple(sorted(found, key=lambda each: each.uri))

    async def _lagging_broker(self) -> list[Laggard]:
        """A broker has its files from an operator: without new ones nodes would believe it no more."""
        if self._broker is None:
            return []
        shown = await self._broker.certificate()
        if shown is not None and self._authority.recognise(shown) == self._authority.fingerprint:
            return []
        lacks = "a certificate of the CA that issues: shoal-coordinator broker-config again, then reload it"
        ends = Wall(0.0) if shown is None else Wall(shown.not_valid_after_utc.timestamp())
        return [Laggard(uri_of(self._region.config.name, Role.BROKER, "broker"), lacks, shown is not None, ends)]

    def _laggard(self, state: NodeState, lacks: str) -> Laggard:
        uri = uri_of(self._region.config.name, state.node.role, state.name)
        return Laggard(uri, lacks, state.connected, Wall(0.0))

    async def _issuer(self, state: NodeState) -> str:
        """The fingerprint of the CA that signed the certificate which the node says it has."""
        stored = await self._store.read(key_of(state.node.role, state.name))
        held = () if stored is None else records.load(IdentityRecord, stored.value).held
        return next((each.issuer for each in held if each.serial == state.serial), "")

    async def _people(self) -> list[IdentityRecord]:
        """Operators, viewers and tenants whose certificate is good."""
        wall = self._clock.wall()
        found = []
        for role in LIFETIME_S.keys() - NODES:
            for each in await self._store.scan(f"{IDENTITIES}{role}/"):
                record = records.load(IdentityRecord, each.value)
                if record.not_after > wall and not record.revoked:
                    found.append(record)
        return found


@dataclass(frozen=True, slots=True)
class _Found:
    role: Role
    serial: str


def _role(text: str) -> Role | None:
    if not text:
        return None
    try:
        role = Role(text)
    except ValueError:
        role = Role.COORDINATOR
    if role not in LIFETIME_S:
        allowed = ", ".join(sorted(LIFETIME_S))
        raise refuse(Code.FIELD_INVALID, f"role {text!r:.40}", f"one of {allowed}", "name one of these roles")
    return role


def _counts(state: NodeState) -> bool:
    """Whether a rotation waits for it: one that was lost finds its way back by renewing."""
    return not state.revoked and state.liveness is not Liveness.LOST
