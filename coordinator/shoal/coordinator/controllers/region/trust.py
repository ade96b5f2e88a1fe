"""Membership of identities in the region: revocation, duplicate identities, and CA rotation.

A revocation (`identity/revocation.py`) is stored before it takes effect. Then every listener checks each call against
the list in memory, and every front against the list in its desired set. A rotation advances by itself as soon as no
member lags behind; `Rotation.laggards` lists those that do.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.identity.certificates import CertificateRecord, IdentityRecord, key_of
from shoal.coordinator.controllers.identity.enrolment import BEARER, LIFETIME_S, TOKENS, Token
from shoal.coordinator.controllers.identity.revocation import (
    Revocation,
    RevocationKind,
    RevocationOrder,
    Revocations,
    RevokedItem,
)
from shoal.coordinator.controllers.identity.rotation import (
    LACKS_CERTIFICATE,
    LACKS_TRUST,
    CaRotation,
    Laggard,
    Participants,
    Rotation,
    people_laggards,
    trusts_all,
    valid_people,
)
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.ports import BrokerAccess, Clock, SharedAuthority, StaleRevision, Store
from shoal.types.assignment import Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import NODES, Identity, parse_name, uri_of
from shoal.types.units import Seconds, Wall

SHARED_SERIALS_MOST: Final = 500
"""Revoked gateways sent to other regions at most, because messages to them have a size limit."""
TICK_S: Final = Seconds(1.0)
KEEP_CHOICES: Final = ("running", "none")
OVERDUE_FRACTION: Final = 1 / 6
"""A certificate with less than this fraction of its lifetime left is overdue: renewal is due when a third is left."""


class TrustController:
    """on_serials_revoked: called with newly revoked serials, so that open connections with them are closed.
    on_rotation: called when another CA is trusted or issues. is_listed: whether the federation, where there is one,
    knows all CAs of this region. Call `run`, until cancelled.
    """

    def __init__(
        self,
        region: RegionalCoordinator,
        store: Store,
        authority: SharedAuthority,
        clock: Clock,
        *,
        broker: BrokerAccess | None = None,
        on_serials_revoked: Callable[[frozenset[str]], None],
        on_rotation: Callable[[], None],
        is_listed: Callable[[], bool] = lambda: True,
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
    ) -> None:
        self._region = region
        self._store = store
        self._authority = authority
        self._clock = clock
        self._broker = broker
        self._on_rotation = on_rotation
        self._is_listed = is_listed
        self._lifetimes = lifetimes
        self.revocations = Revocations(
            region.config.name,
            store,
            region.events,
            clock,
            on_serials_revoked=on_serials_revoked,
            on_revocation=self._on_revocation,
        )
        self._resumed = False
        self._rotation = CaRotation(
            region.config.name,
            authority,
            clock,
            participants=self._participants,
            on_stage=self._on_stage,
            note=region.fence.note,
            exclusive=self._as_leader,
        )

    async def start(self) -> None:
        await self.revocations.start()
        self._publish()

    async def run(self) -> None:
        while True:
            try:
                if not self._resumed:
                    await self.revocations.resume()
                    self._resumed = True
                await self.revocations.prune()
                self._publish()
                await self._advance()
            except (ShoalError, StaleRevision):
                pass  # the store takes no writes now; the next iteration tries again
            await self._clock.sleep(TICK_S)

    @property
    def wall(self) -> Wall:
        return self._clock.wall()

    @property
    def revocation_list(self) -> tuple[Revocation, ...]:
        return self.revocations.all

    def check(self, serial: str) -> Refusal | None:
        """Why a certificate is refused, whatever its dates; None if it is not revoked."""
        return self.revocations.check(serial)

    def forbids(self, identity: Identity) -> Refusal | None:
        """Why a certificate may not be renewed; None if it may."""
        if (refusal := self.check(identity.serial)) is not None:
            return refusal
        state = self._region.fleet.fleet.nodes.get(identity.name) if identity.role in NODES else None
        if state is not None and state.duplicate is not None:
            return Refusal(
                Code.DUPLICATE_IDENTITY,
                f"two agents show {identity.uri}",
                "an operator's word",
                f"shoal node settle {identity.name}",
            )
        return None

    async def overdue_renewals(self) -> tuple[tuple[str, float], ...]:
        """(URI name, seconds left) of nodes and people that should have renewed by now; negative after expiry.

        People count only while their certificate is valid: nobody needs an alarm about a person who never came back.
        """
        wall = self._clock.wall()
        nodes = self._region.fleet.fleet.nodes.values()
        held = [await self._store.read(key_of(each.node.role, each.name)) for each in nodes]
        known = [codec.load(IdentityRecord, each.value) for each in held if each is not None]
        found = [
            (record.uri, record.not_after - wall)
            for record in (*known, *await self._people())
            if not record.revoked
            and record.not_after - wall < OVERDUE_FRACTION * self._lifetimes[parse_name(record.uri)[1]]
        ]
        return tuple(sorted(found, key=lambda each: (each[1], each[0])))

    # revoking, and resolving duplicate identities

    async def revoke(
        self, name: str, role: str, reason: str, actor: str, *, keep_enrolled: bool = False, force: bool = False
    ) -> tuple[RevokedItem, ...]:
        """Returns what ended with it. role: empty for the node of that name. keep_enrolled: identities that enrolled
        with its tokens stay. force: proceed even if no operator is left.

        Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID | LAST_OPERATOR | CONFLICT).
        """
        uri, shown = await self._subject(name, role)
        try:
            return await self.revocations.revoke(
                RevocationOrder(uri, reason, actor, keep_enrolled), presented=shown, force=force
            )
        except (ShoalError, StaleRevision):
            self._resumed = False  # `run` resumes what was begun
            raise

    async def preview_revocation(self, name: str, role: str, *, keep_enrolled: bool = False) -> tuple[RevokedItem, ...]:
        """What `revoke` would end. Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID)."""
        uri, _ = await self._subject(name, role)
        return await self.revocations.preview(uri, keep_enrolled=keep_enrolled)

    async def _subject(self, name: str, role: str) -> tuple[str, CertificateRecord | None]:
        """The URI name of the identity to revoke, and the certificate that its session uses; None: no session."""
        state = self._region.fleet.fleet.nodes.get(name)
        found = await self._identity(_role(role), name, state)
        held = (
            CertificateRecord(found.serial, Wall(self._clock.wall() + max(LIFETIME_S.values())), "")
            if found.serial
            else None
        )
        return uri_of(self._region.config.name, found.role, name), held

    async def _on_revocation(self, items: tuple[RevokedItem, ...], reason: str, actor: str) -> None:
        self._publish()
        if any(each.kind is RevocationKind.BEARER for each in items):
            await self._region.workloads.load_credentials()
        for each in items:
            if each.kind is not RevocationKind.IDENTITY:
                continue
            _, role, name = parse_name(each.name)
            if role not in NODES:
                continue
            state = self._region.fleet.fleet.nodes.get(name)
            if state is not None and state.node.role is role and not state.revoked:
                await self._region.fleet.revoke(name, reason, actor)
            if self._broker is not None:
                await self._broker.expel(name)

    async def resolve_duplicate(self, node: str, keep: str, actor: str) -> None:
        """keep: `running` (the agent with the session stays) or `none` (both must enrol again).

        Raises ShoalError(NODE_UNKNOWN | FIELD_INVALID | CONFLICT).
        """
        if keep not in KEEP_CHOICES:
            raise refuse(
                Code.FIELD_INVALID, f"keep {keep!r:.40}", " or ".join(KEEP_CHOICES), "say which of the two stays"
            )
        if keep == "running":
            await self._region.fleet.resolve_duplicate(node, actor)
        else:
            await self.revoke(node, "", "two agents showed this identity", actor)

    async def _identity(self, role: Role | None, name: str, state: NodeState | None) -> "_Subject":
        if state is not None and role in (None, state.node.role):
            return _Subject(state.node.role, state.serial)
        for each in NODES if role is None else (role,):
            if await self._store.read(key_of(each, name)) is not None or await self._has_tokens(each, name):
                return _Subject(each, "")
        what = "node" if role is None else str(role)
        raise refuse(Code.NODE_UNKNOWN, f"no {what} {name!r:.80}", "one that enrolled", "see `shoal get nodes`")

    async def _has_tokens(self, role: Role, name: str) -> bool:
        """Whether a tenant has bearer tokens: its clients may use those though the tenant never held a certificate."""
        held = [codec.load(Token, each.value) for each in await self._store.scan(TOKENS)] if role is Role.TENANT else []
        return any(token.role == BEARER and token.name == name for token in held)

    def _publish(self) -> None:
        """Publishes the roots and revoked serials for every node. Expired certificates are left out, because their
        dates refuse them.
        """
        wall = self._clock.wall()
        lasting = [each for each in self.revocations.all if each.not_after > wall]
        serials = tuple(sorted(each.serial for each in lasting))
        gateways = sorted(each.serial for each in lasting if parse_name(each.uri)[1] is Role.GATEWAY)
        self._region.workloads.adopt_trust(Trust(self._authority.roots, serials), tuple(gateways[:SHARED_SERIALS_MOST]))

    # the authority

    async def rotation(self) -> Rotation:
        return await self._rotation.state()

    async def rotate(self, stage: str, actor: str) -> None:
        """As `CaRotation.rotate`. Raises ShoalError(NOT_LEADER | STORE_FULL | STORE_UNAVAILABLE) too."""
        await self._rotation.rotate(stage, actor)

    async def _advance(self) -> None:
        await self._reload()
        await self._rotation.advance()

    @asynccontextmanager
    async def _as_leader(self) -> AsyncIterator[None]:
        """The CA's files are outside of the store, so no fence of a commit protects them: one goes before."""
        await self._region.fence.confirm()
        await self._reload()
        yield

    async def _reload(self) -> None:
        """Takes over what a replaced leader wrote, which was paused after its last commit. Raises
        ShoalError(STATE_CORRUPT).
        """
        before = self._authority.since
        await self._authority.reload()
        if self._authority.since != before:
            self._on_stage()

    def _on_stage(self) -> None:
        self._on_rotation()
        self._publish()

    async def _participants(self) -> Participants:
        authority = self._authority
        nodes = [state for state in self._region.fleet.fleet.nodes.values() if _blocks_rotation(state)]
        people, federation = await self._people(), self._federation_laggards()
        found = []
        if authority.stage == "trust":
            found = [self._laggard(state, LACKS_TRUST) for state in nodes if not trusts_all(authority, state.roots)]
            found += federation
        elif authority.stage == "issue":
            for state in nodes:
                if await self._issuer_of(state) != authority.fingerprint:
                    found.append(self._laggard(state, LACKS_CERTIFICATE))
            found += people_laggards(people, authority)
            found += await self._broker_laggards()
        count = len(nodes) + len(people) + (self._broker is not None) + len(federation)
        return Participants(count, tuple(found))

    def _federation_laggards(self) -> list[Laggard]:
        """The federation would take no call with a certificate of a CA that it does not know, not even the one that
        tells of the CA."""
        if self._authority.stage != "trust" or self._is_listed():
            return []
        return [Laggard(uri_of(self._region.config.name, Role.FEDERATION, "federation"), LACKS_TRUST, False, Wall(0.0))]

    async def _broker_laggards(self) -> list[Laggard]:
        """A broker gets its files from an operator: without new ones, nodes would no longer trust it."""
        if self._broker is None:
            return []
        shown = await self._broker.certificate()
        found = None if shown is None else self._authority.recognise(shown)
        if found is not None and found.issuer == self._authority.fingerprint:
            return []
        lacks = f"{LACKS_CERTIFICATE}: shoal-coordinator broker-config again, then reload it"
        ends = Wall(0.0) if found is None else found.identity.not_after
        return [Laggard(uri_of(self._region.config.name, Role.BROKER, "broker"), lacks, found is not None, ends)]

    def _laggard(self, state: NodeState, lacks: str) -> Laggard:
        uri = uri_of(self._region.config.name, state.node.role, state.name)
        return Laggard(uri, lacks, state.connected, Wall(0.0))

    async def _issuer_of(self, state: NodeState) -> str:
        """Fingerprint of the CA that signed the certificate that the node reports; empty if unknown."""
        stored = await self._store.read(key_of(state.node.role, state.name))
        held = () if stored is None else codec.load(IdentityRecord, stored.value).held
        return next((each.issuer for each in held if each.serial == state.serial), "")

    async def _people(self) -> list[IdentityRecord]:
        return await valid_people(self._store, LIFETIME_S.keys() - NODES, self._clock.wall())


@dataclass(frozen=True, slots=True)
class _Subject:
    """A role, and the serial of the certificate that the node's session uses; empty: no session."""

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


def _blocks_rotation(state: NodeState) -> bool:
    """Whether a rotation waits for the node. It does not wait for a lost one, which recovers by renewing its
    certificate.
    """
    return not state.revoked and state.liveness is not Liveness.LOST
