"""Revokes an identity, and everything that it created or that is bound to it.

Every identity records who created the token that enrolled it. A revocation follows these records: it deletes the tokens
that the identity created or that name it, revokes the identities that enrolled with its tokens, and so on. The order is
stored with the first transaction and deleted with the last, so a coordinator that dies in between resumes it at its
next start.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.identity.certificates import (
    GRACE_S,
    IDENTITIES,
    CertificateRecord,
    IdentityRecord,
    key_of,
)
from shoal.coordinator.controllers.identity.enrolment import (
    ADMISSIONS,
    BEARER,
    CREDENTIALS,
    REGION,
    TOKENS,
    Admission,
    Token,
)
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.ports import Clock, StaleRevision, Store, StoreRecord
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import parse_name, uri_of
from shoal.types.units import Seconds, Wall

REVOKED: Final = "revoked/"
ORDERS: Final = "revoking/"
OPERATIONS: Final = 100
"""Writes in one transaction at most; etcd takes 128 by default (`--max-txn-ops`)."""
ROUNDS: Final = 100
"""Attempts before a revocation gives up because of concurrent writers; each attempt leaves less to do."""
POLL_S: Final = Seconds(0.5)
REGION_ACTOR: Final = "coordinator"


@dataclass(frozen=True, slots=True)
class Revocation:
    """One certificate that is refused before it expires. Kept until it could no longer be renewed."""

    # Serial of the certificate, decimal.
    serial: str
    # URI name of its holder.
    uri: str
    # When the certificate expires.
    not_after: Wall
    # Why, in the operator's words.
    reason: str
    # Who revoked it.
    actor: str
    # When it was revoked.
    at: Wall


@dataclass(frozen=True, slots=True)
class RevocationOrder:
    """A revocation that has begun."""

    # URI name of the identity to revoke.
    uri: str
    # Why, in the operator's words.
    reason: str
    # Who revoked it.
    actor: str
    # True: identities that enrolled with its tokens stay, and from now on count as enrolled by the actor.
    keep_enrolled: bool = False


class RevocationKind(StrEnum):
    """Kinds of things that a revocation ends."""

    IDENTITY = "identity"
    TOKEN = "token"
    BEARER = "bearer"
    REGION = "region"


@dataclass(frozen=True, slots=True)
class RevokedItem:
    """One thing that a revocation ends."""

    # What kind of thing ends.
    kind: RevocationKind
    # URI name of an identity, id of a token, or name of a region.
    name: str
    # Certificates of an identity that are refused from now on; empty for other kinds.
    serials: tuple[str, ...]
    # URI name of the identity that created it or that it is bound to; for the identity that the order names, itself.
    cause: str
    # For a token: its role and the name it is bound to.
    about: str = ""


@dataclass(frozen=True, slots=True)
class Lineage:
    """All stored identities, tokens and joined regions, with their store revisions."""

    # Name of this region or federation.
    region: str
    # By URI name.
    identities: Mapping[str, IdentityRecord]
    # All stored tokens, used ones included.
    tokens: tuple[Token, ...]
    # Regions that joined with a token.
    admissions: tuple[Admission, ...]
    # Store revision by key.
    revisions: Mapping[str, int] = field(default_factory=dict)

    def maker_of(self, identity: IdentityRecord) -> str:
        """Who created the token that enrolled the identity; "" if unknown. Records of older versions name only the
        token.
        """
        by_token = (token.created_by for token in self.tokens if token.id == identity.token)
        return identity.made_by or next(by_token, "")

    def subject_of(self, token: Token) -> str:
        """URI name of the identity that a token is bound to; "" for any."""
        if not token.name or token.role == REGION:
            return ""
        return uri_of(self.region, Role.TENANT if token.role == BEARER else Role(token.role), token.name)

    def tree_of(self, uri: str, *, keep_enrolled: bool) -> Mapping[str, str]:
        """The identities that a revocation of `uri` reaches, each with the identity that enrolled it."""
        found = {uri: uri}
        if keep_enrolled:
            return found
        made = dict[str, list[str]]()
        for identity in self.identities.values():
            made.setdefault(self.maker_of(identity), []).append(identity.uri)
        waiting = [uri]
        while waiting:
            maker = waiting.pop()
            fresh = [each for each in made.get(maker, ()) if each not in found]
            found.update(dict.fromkeys(fresh, maker))
            waiting += fresh
        return found

    def enrollees_of(self, uri: str) -> tuple[IdentityRecord, ...]:
        return tuple(each for each in self.identities.values() if each.uri != uri and self.maker_of(each) == uri)

    def tokens_of(self, tree: Mapping[str, str]) -> tuple[tuple[Token, str], ...]:
        """Usable tokens that an identity of `tree` created or that name one, each with that identity."""
        live = (each for each in self.tokens if each.role == BEARER or each.used_at is None)
        found = (
            (each, next((uri for uri in (each.created_by, self.subject_of(each)) if uri in tree), "")) for each in live
        )
        return tuple((token, uri) for token, uri in found if uri)

    def regions_of(self, tree: Mapping[str, str]) -> tuple[Admission, ...]:
        return tuple(each for each in self.admissions if each.made_by in tree)

    def has_other_operator(self, tree: Mapping[str, str], wall: Wall) -> bool:
        """Whether an operator outside `tree` holds a valid certificate."""
        return any(
            parse_name(each.uri)[1] is Role.OPERATOR
            and each.uri not in tree
            and not each.revoked
            and each.not_after > wall
            for each in self.identities.values()
        )


@dataclass(frozen=True, slots=True)
class RevocationStep:
    """The writes of one transaction, and what they end."""

    # Keys to write.
    puts: Mapping[str, bytes] = field(default_factory=dict)
    # Keys to delete.
    deletes: tuple[str, ...] = ()
    # Revisions that the transaction expects, by key.
    expect: Mapping[str, int] = field(default_factory=dict)
    # Events of the same transaction.
    events: tuple[LogEvent, ...] = ()
    # Certificates that it revokes.
    revocations: tuple[Revocation, ...] = ()
    # What it ends, for the handler.
    items: tuple[RevokedItem, ...] = ()

    @property
    def operations(self) -> int:
        return len(self.puts) + len(self.deletes) + 2 * len(self.events)  # an event may push out the oldest

    def __add__(self, other: "RevocationStep") -> "RevocationStep":
        return RevocationStep(
            {**self.puts, **other.puts},
            self.deletes + other.deletes,
            {**self.expect, **other.expect},
            self.events + other.events,
            self.revocations + other.revocations,
            self.items + other.items,
        )


RevocationHandler = Callable[[tuple[RevokedItem, ...], str, str], Awaitable[None]]
"""Called with what a transaction has just ended, the reason and the actor."""


class Revocations:
    """The list of revoked certificates, and the only writer of it."""

    def __init__(
        self,
        region: str,
        store: Store,
        events: EventLog,
        clock: Clock,
        *,
        on_serials_revoked: Callable[[frozenset[str]], None],
        on_revocation: RevocationHandler,
    ) -> None:
        """on_serials_revoked: called with newly revoked serials, so that open connections with them are closed.
        on_revocation: ends what lies outside the store: nodes' sessions, bearer tokens at fronts, members of a
        federation. It is called again for the same items when a revocation is resumed.
        """
        self._region = region
        self._store = store
        self._events = events
        self._clock = clock
        self._on_serials_revoked = on_serials_revoked
        self._on_revocation = on_revocation
        self._by_serial: dict[str, Revocation] = {}
        self._is_started = False

    async def start(self) -> None:
        """Reads the list. Called repeatedly where another coordinator adds to it.

        Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE).
        """
        fresh = dict[str, Revocation]()
        for record in await self._store.scan(REVOKED):
            revocation = codec.load(Revocation, record.value)
            if revocation.serial not in self._by_serial:
                fresh[revocation.serial] = revocation
        self._by_serial.update(fresh)
        if fresh and self._is_started:
            self._on_serials_revoked(frozenset(fresh))
        self._is_started = True

    async def run(self) -> None:
        """Where several coordinators write to one store: loads the others' revocations, until cancelled."""
        resumed = False
        while True:
            try:
                if not resumed:
                    await self.resume()
                    resumed = True
                await self.start()
                await self.prune()
            except (ShoalError, StaleRevision):
                pass  # the store is unavailable, or another coordinator was first
            await self._clock.sleep(POLL_S)

    @property
    def all(self) -> tuple[Revocation, ...]:
        return tuple(sorted(self._by_serial.values(), key=lambda each: (each.at, each.serial)))

    def check(self, serial: str) -> Refusal | None:
        """Why a certificate is refused, whatever its dates; None if it is not revoked."""
        revocation = self._by_serial.get(serial)
        if revocation is None:
            return None
        return Refusal(
            Code.CERT_REVOKED,
            f"the certificate of {revocation.uri} was revoked: {revocation.reason}",
            "one that is good",
            "enrol again with a new token",
        )

    async def prune(self) -> None:
        """Deletes revocations of certificates that could no longer be renewed."""
        wall = self._clock.wall()
        over = [each for each in self._by_serial.values() if each.not_after + GRACE_S <= wall]
        if over:
            await self._events.commit({}, deletes=tuple(REVOKED + each.serial for each in over))
            for each in over:
                del self._by_serial[each.serial]

    async def resume(self) -> None:
        """Finishes revocations that a dead process had begun, and deletes tokens of identities that an older version
        revoked.

        Raises ShoalError(STORE_*), StaleRevision.
        """
        for record in await self._store.scan(ORDERS):
            await self._carry_out(codec.load(RevocationOrder, record.value), None, is_resumed=True)
        lineage = await self._lineage()
        gone = {each.uri: each.uri for each in lineage.identities.values() if each.revoked}
        made = [(token, uri) for token, uri in lineage.tokens_of(gone) if token.created_by in gone]
        for step in _batches(_token_step(token, uri, lineage, REGION_ACTOR) for token, uri in made):
            await self._write(step, "its maker was revoked", REGION_ACTOR)

    async def preview(self, uri: str, *, keep_enrolled: bool) -> tuple[RevokedItem, ...]:
        """What a revocation would end now."""
        lineage = await self._lineage()
        return tuple(
            each
            for step in self._steps(RevocationOrder(uri, "", "", keep_enrolled), None, lineage)
            for each in step.items
        )

    async def revoke(
        self, order: RevocationOrder, *, presented: CertificateRecord | None = None, force: bool = False
    ) -> tuple[RevokedItem, ...]:
        """Returns what was ended. presented: a certificate that its holder uses and the store may not know. force:
        proceed even if no operator is left.

        Raises ShoalError(LAST_OPERATOR | CONFLICT | STORE_*).
        """
        lineage = await self._lineage()
        tree = lineage.tree_of(order.uri, keep_enrolled=order.keep_enrolled)
        ends_operators = any(parse_name(each)[1] is Role.OPERATOR for each in tree)
        if ends_operators and not force and not lineage.has_other_operator(tree, self._clock.wall()):
            reached = len(tree) - 1
            also = f" and the {reached} that it enrolled, directly or not" if reached else ""
            raise refuse(
                Code.LAST_OPERATOR,
                f"without {order.uri}{also} no operator is left",
                "one operator that stays",
                "enrol another from elsewhere first, add --keep-enrolled, or --force: the way back is "
                "`shoal-coordinator operator` on the coordinator's machine",
            )
        return await self._carry_out(order, presented)

    async def _carry_out(
        self, order: RevocationOrder, shown: CertificateRecord | None, *, is_resumed: bool = False
    ) -> tuple[RevokedItem, ...]:
        found = dict[tuple[RevocationKind, str], RevokedItem]()
        for _ in range(ROUNDS):
            lineage = await self._lineage()
            steps = self._steps(order, shown, lineage)
            if not steps:
                break
            try:
                for step in _batches(steps):
                    await self._write(step, order.reason, order.actor)
                    found.update(((each.kind, each.name), each) for each in step.items)
            except StaleRevision:
                continue  # a concurrent renewal, redemption or new token: compute the steps again
            shown = None
        else:
            raise refuse(Code.CONFLICT, f"{order.uri} changes all the time", "a moment of rest", "try again")
        if is_resumed:  # the dead process may not have called the handler for its last write
            tree = lineage.tree_of(order.uri, keep_enrolled=order.keep_enrolled)
            whole = tuple(RevokedItem(RevocationKind.IDENTITY, uri, (), source) for uri, source in tree.items())
            await self._on_revocation(whole, order.reason, order.actor)
        await self._events.commit({}, deletes=(ORDERS + order.uri,))
        return tuple(found.values())

    def _steps(self, order: RevocationOrder, shown: CertificateRecord | None, lineage: Lineage) -> list[RevocationStep]:
        """The remaining steps, the identity itself first; empty once everything has ended."""
        tree = lineage.tree_of(order.uri, keep_enrolled=order.keep_enrolled)
        steps = [
            step
            for uri, source in tree.items()
            if (step := self._identity_step(order, uri, source, shown if uri == order.uri else None, lineage))
        ]
        steps += [_token_step(token, uri, lineage, order.actor) for token, uri in lineage.tokens_of(tree)]
        steps += [_region_step(each) for each in lineage.regions_of(tree) if not order.keep_enrolled]
        if order.keep_enrolled:
            guarantor = (
                order.actor if order.actor != order.uri else uri_of(self._region, Role.COORDINATOR, REGION_ACTOR)
            )
            steps += [_adoption_step(each, guarantor, lineage) for each in lineage.enrollees_of(order.uri)]
            kept = lineage.regions_of(tree)
            steps += [
                RevocationStep({ADMISSIONS + each.region: codec.dump(replace(each, made_by=guarantor))})
                for each in kept
            ]
        return steps

    def _identity_step(
        self, order: RevocationOrder, uri: str, source: str, shown: CertificateRecord | None, lineage: Lineage
    ) -> RevocationStep | None:
        wall = self._clock.wall()
        record = lineage.identities.get(uri)
        held = [] if record is None or record.revoked else list(record.certificates(wall))
        if shown is not None and all(each.serial != shown.serial for each in held):
            held.append(shown)
        if not held and (record is None or record.revoked):
            return None
        reason = order.reason if uri == source else f"{order.reason} (enrolled by {source})"
        fresh = tuple(Revocation(each.serial, uri, each.not_after, reason, order.actor, wall) for each in held)
        puts = {REVOKED + each.serial: codec.dump(each) for each in fresh}
        puts[ORDERS + order.uri] = codec.dump(order)
        expect = dict[str, int]()
        if record is not None:
            key = _key(uri)
            puts[key] = codec.dump(replace(record, revoked=True))
            expect[key] = lineage.revisions[key]
        serials = tuple(each.serial for each in fresh)
        ended = RevokedItem(RevocationKind.IDENTITY, uri, serials, source)
        return RevocationStep(puts, (), expect, (LogEvent("REVOKED", uri, reason, order.actor),), fresh, (ended,))

    async def _write(self, step: RevocationStep, reason: str, actor: str) -> None:
        if step.operations:
            await self._events.commit(step.puts, deletes=step.deletes, expect=step.expect, events=step.events)
        self._by_serial.update((each.serial, each) for each in step.revocations)
        if step.revocations:
            self._on_serials_revoked(frozenset(each.serial for each in step.revocations))
        if step.items:
            await self._on_revocation(step.items, reason, actor)

    async def _lineage(self) -> Lineage:
        # Tokens first: a concurrent enrolment is found by its identity record, or its token's revision is stale.
        tokens = await self._store.scan(TOKENS)
        admissions = await self._store.scan(ADMISSIONS)
        identities = await self._store.scan(IDENTITIES)
        loaded = [codec.load(IdentityRecord, each.value) for each in identities]
        return Lineage(
            self._region,
            {each.uri: each for each in loaded},
            tuple(codec.load(Token, each.value) for each in tokens),
            tuple(codec.load(Admission, each.value) for each in admissions),
            {each.key: each.revision for each in _all(tokens, admissions, identities)},
        )


def _batches(steps: Iterable[RevocationStep]) -> list[RevocationStep]:
    """Merges steps, in order, into as few transactions as the store's limit allows."""
    found = list[RevocationStep]()
    for step in steps:
        if found and found[-1].operations + step.operations <= OPERATIONS:
            found[-1] = found[-1] + step
        else:
            found.append(step)
    return found


def _token_step(token: Token, uri: str, lineage: Lineage, actor: str) -> RevocationStep:
    key = TOKENS + token.sha256
    kind = RevocationKind.BEARER if token.role == BEARER else RevocationKind.TOKEN
    about = f"{token.role} {token.name}".strip()
    return RevocationStep(
        deletes=(key, CREDENTIALS + token.sha256),
        expect={key: lineage.revisions[key]},
        events=(LogEvent("TOKEN_DELETED", token.id, f"{about}: {uri} was revoked", actor),),
        items=(RevokedItem(kind, token.id, (), uri, about),),
    )


def _region_step(admission: Admission) -> RevocationStep:
    """Writes nothing: the handler removes the member together with its admission."""
    return RevocationStep(items=(RevokedItem(RevocationKind.REGION, admission.region, (), admission.made_by),))


def _adoption_step(identity: IdentityRecord, guarantor: str, lineage: Lineage) -> RevocationStep:
    key = _key(identity.uri)
    return RevocationStep({key: codec.dump(replace(identity, made_by=guarantor))}, expect={key: lineage.revisions[key]})


def _key(uri: str) -> str:
    _, role, name = parse_name(uri)
    return key_of(role, name)


def _all(*found: Sequence[StoreRecord]) -> Iterable[StoreRecord]:
    return (each for records_ in found for each in records_)
