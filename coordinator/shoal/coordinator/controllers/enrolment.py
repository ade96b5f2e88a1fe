"""Join tokens and what they are redeemed for; bearer tokens of tenants. Only hashes of secrets are kept.

A join token is bound to a role and a region, and to a name if its maker said one. It is redeemed exactly once: marking
it used is a compare-and-set, together with the record of the identity that it became.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.coordinator.controllers import identities, records
from shoal.coordinator.controllers.buckets import Buckets
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.controllers.identities import IdentityRecord, key_of
from shoal.coordinator.ports import Authority, Broker, Clock, Ids, Meter, Record, StaleRevision, Store, Transaction
from shoal.types.agreement import GUESTS
from shoal.types.assignment import Credential
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall, show_seconds
from shoal.wire.identity import NODES, check_name, uri_of
from shoal.wire.token import JoinToken, parse_join_token, token_sha256

T = TypeVar("T")

TOKENS: Final = "tokens/"
CREDENTIALS: Final = "credentials/"
BEARER: Final = "bearer"
"""The role word of a tenant's bearer token; not a certificate's role."""
REGION: Final = "region"
"""The role word of a token by which a region joins a federation."""

LIFETIME_S: Final = {
    Role.AGENT: Seconds(86400.0),
    Role.GATEWAY: Seconds(86400.0),
    Role.OPERATOR: Seconds(30 * 86400.0),
    Role.VIEWER: Seconds(30 * 86400.0),
    Role.TENANT: Seconds(30 * 86400.0),
}
"""Of certificates, by role. Nodes renew theirs by themselves, operators' contexts when they are used."""
MOST_VALID_S: Final = 30 * 86400.0
GUESSES: Final = 20
"""Failed redemptions that one address may make at once; then GUESSES_PER_S."""
GUESSES_PER_S: Final = 2.0
MOST_ADDRESSES: Final = 10_000
"""Whose failures are remembered; more, and the one that called least lately is forgotten."""


@dataclass(frozen=True, slots=True)
class Token:
    """A join or bearer token as stored. role: a Role, or `bearer`. name: empty when the joiner may choose."""

    id: str
    sha256: str
    role: str
    name: str
    created_by: str
    expires_at: Wall
    used_at: Wall | None = None
    used_by: str = ""


@dataclass(frozen=True, slots=True)
class Redeemed:
    role: Role
    name: str
    certificate_pem: bytes
    ca_pem: bytes


@dataclass(frozen=True, slots=True)
class CreatedToken:
    """text: shown once, kept nowhere."""

    id: str
    text: str
    expires_at: Wall


class Enrolment:
    def __init__(
        self,
        region: str,
        store: Store,
        authority: Authority,
        events: EventLog,
        clock: Clock,
        ids: Ids,
        meter: Meter,
        *,
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
        broker: Broker | None = None,
        words: tuple[str, ...] = (BEARER,),
    ) -> None:
        """broker: is told of each node; None where there is none. words: of tokens that are for no certificate."""
        self._region = region
        self._store = store
        self._authority = authority
        self._events = events
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._lifetimes = lifetimes
        self._broker = broker
        self._words = words
        self._guesses = Buckets(GUESSES, GUESSES_PER_S, MOST_ADDRESSES)

    async def create(self, role: str, name: str, valid_s: float, actor: str) -> CreatedToken:
        """Raises ShoalError(FIELD_INVALID | FIELD_MISSING | NAME_INVALID)."""
        allowed = (*self._lifetimes, *self._words)
        if role not in allowed:
            raise refuse(
                Code.FIELD_INVALID, f"role {role!r:.40}", f"one of {', '.join(allowed)}", "name one of these roles"
            )
        if not 0 < valid_s <= MOST_VALID_S:
            raise refuse(
                Code.FIELD_INVALID, f"valid for {valid_s:g}s", f"up to {show_seconds(MOST_VALID_S)}", "ask for less"
            )
        if name:
            check_name(name, "name")
            if role in (BEARER, Role.TENANT) and name == GUESTS:
                raise refuse(Code.NAME_INVALID, f"tenant {GUESTS}", "another name", "this one is for guests' work")
        elif role in (BEARER, Role.TENANT):  # its holder must not choose whose workloads it may call
            raise refuse(
                Code.FIELD_MISSING, f"a {role} token without a tenant", "the tenant's name", "add --name TENANT"
            )
        secret = self._ids.secret()
        text = (
            f"shoal-bearer.{secret}"
            if role == BEARER
            else JoinToken(self._region, self._authority.fingerprint, secret).text
        )
        sha256 = token_sha256(text if role == BEARER else secret)
        token = Token(sha256[:12], sha256, role, name, actor, Wall(self._clock.wall() + valid_s))
        puts = {TOKENS + sha256: records.dump(token)}
        if role == BEARER:
            puts[CREDENTIALS + sha256] = records.dump(Credential(name, sha256, token.expires_at))
        event = Event("TOKEN_CREATED", token.id, f"{role} {name or '(any name)'}", actor)
        await self._events.commit(puts, expect={TOKENS + sha256: 0}, events=[event])
        return CreatedToken(token.id, text, token.expires_at)

    async def redeem(self, text: str, csr_pem: bytes, name: str, *, peer: str) -> Redeemed:
        """A certificate for whom the token says. peer: the caller's IP address.

        Raises ShoalError(TOKEN_INVALID | TOKEN_USED | TOKEN_EXPIRED | CSR_DENIED | NAME_INVALID | CONFLICT |
        OVERLOADED).
        """
        return await self._guarded(peer, lambda: self._redeem(text, csr_pem, name, peer))

    async def spend(
        self, text: str, word: str, name: str, then: Callable[[Transaction], Awaitable[T]], *, peer: str
    ) -> T:
        """A token that is for no certificate: `then` commits what it is given together with what it does.

        Raises ShoalError(TOKEN_INVALID | TOKEN_USED | TOKEN_EXPIRED | OVERLOADED), and what `then` raises.
        """
        return await self._guarded(peer, lambda: self._spend(text, word, name, then))

    async def _guarded(self, peer: str, redemption: Callable[[], Awaitable[T]]) -> T:
        bucket = self._guesses.of(peer, self._clock.now())
        if not bucket.allows(self._clock.now()):
            self._meter.count("enrolment_refused", code=Code.OVERLOADED)
            raise refuse(
                Code.OVERLOADED, "too many failed redemptions", f"{GUESSES_PER_S:g} a second", "wait a few seconds"
            )
        try:
            return await redemption()
        except ShoalError as error:
            if error.code in (Code.TOKEN_INVALID, Code.TOKEN_USED, Code.TOKEN_EXPIRED, Code.CSR_DENIED):
                bucket.spend(self._clock.now())
                self._meter.count("enrolment_refused", code=error.code)
                if bucket.shall_audit(self._clock.now()):
                    await self._events.audit("anonymous", "Redeem", peer, str(error.code))
            raise

    async def tokens(self) -> tuple[Token, ...]:
        found = [records.load(Token, record.value) for record in await self._store.scan(TOKENS)]
        return tuple(sorted(found, key=lambda token: (token.expires_at, token.id)))

    async def revoke(self, token_id: str, actor: str) -> int:
        """A token that is gone is redeemed no more; a bearer token stops at once. Raises ShoalError(NOT_FOUND)."""
        for token in await self.tokens():
            if token.id == token_id:
                keys = (TOKENS + token.sha256, CREDENTIALS + token.sha256)
                event = Event("TOKEN_DELETED", token.id, token.role, actor)
                return await self._events.commit({}, deletes=keys, events=[event])
        raise refuse(Code.NOT_FOUND, f"token {token_id!r:.40}", "one of `shoal get tokens`", "look the id up there")

    async def expiry_of(self, role: Role, name: str) -> Wall | None:
        record = await self._store.read(key_of(role, name))
        return None if record is None else records.load(IdentityRecord, record.value).not_after

    async def nodes(self) -> tuple[str, ...]:
        """Agents and gateways that have enrolled and were not revoked since."""
        found = [record for role in sorted(NODES) for record in await self._store.scan(key_of(role, ""))]
        good = (each for each in found if not records.load(IdentityRecord, each.value).revoked)
        return tuple(sorted(each.key.rpartition("/")[2] for each in good))

    async def _valid(self, text: str) -> tuple[Record, Token]:
        """The token as stored, good for one use now."""
        claim = parse_join_token(text)
        if claim.region != self._region or claim.ca_sha256 not in self._authority.fingerprints:
            raise _invalid("a token of another region or CA")
        key = TOKENS + token_sha256(claim.secret)
        record = await self._store.read(key)
        if record is None:
            raise _invalid("a token that this region did not make")
        token = records.load(Token, record.value)
        wall = self._clock.wall()
        if token.used_at is not None:
            raise _used()
        if wall >= token.expires_at:
            raise refuse(
                Code.TOKEN_EXPIRED,
                f"it ended {show_seconds(wall - token.expires_at)} ago",
                "a token in its time",
                "make a new one: shoal token create",
            )
        return record, token

    async def _spend(self, text: str, word: str, name: str, then: Callable[[Transaction], Awaitable[T]]) -> T:
        record, token = await self._valid(text)
        if token.role != word or token.name not in ("", name):
            raise _invalid(f"a token for {token.role} {token.name or '(any name)'}")
        used = replace(token, used_at=self._clock.wall(), used_by=name)
        try:
            return await then(Transaction({record.key: records.dump(used)}, expect={record.key: record.revision}))
        except StaleRevision:
            return await self._spend(text, word, name, then)  # the other one won: now it has a reason of its own

    async def _redeem(self, text: str, csr_pem: bytes, name: str, peer: str) -> Redeemed:
        record, token = await self._valid(text)
        if token.role in self._words:
            raise _invalid(f"a {token.role} token")
        key, wall = record.key, self._clock.wall()
        name = name or token.name
        if token.name and name != token.name:
            raise _invalid(f"a token for another name than {name!r:.80}")
        check_name(name, "name")
        role = Role(token.role)
        self._authority.check(csr_pem, name)
        identity_key = key_of(role, name)
        taken = await self._store.read(identity_key)
        known = None if taken is None else records.load(IdentityRecord, taken.value)
        if taken is not None and not token.name:
            raise refuse(
                Code.CONFLICT,
                f"{role} {name} is enrolled",
                "a new name, for a token that is not bound to one",
                f"choose another name, or make a token for it: shoal token create --role {role} --name {name}",
            )
        issued = self._authority.issue(
            csr_pem, role, name, hosts=(peer,) if peer else (), lifetime_s=self._lifetimes[role], wall=wall
        )
        uri = uri_of(self._region, role, name)
        event = Event("ENROLLED", uri, f"serial {issued.serial}, with token {token.id}", uri)
        puts = {
            key: records.dump(replace(token, used_at=wall, used_by=uri)),
            identity_key: records.dump(identities.issued(known, uri, issued, token.id, wall)),
        }
        expect = {key: record.revision, identity_key: taken.revision if taken else 0}
        try:
            await self._events.commit(puts, expect=expect, events=[event])
        except StaleRevision:
            return await self._redeem(text, csr_pem, name, peer)  # the other one won: now it has a reason of its own
        if self._broker is not None and role in NODES:
            await self._broker.admit(name)
        return Redeemed(role, name, issued.pem, self._authority.ca_pem)


def _invalid(found: str) -> ShoalError:
    return refuse(Code.TOKEN_INVALID, found, "a join token of this region", "make a new one: shoal token create")


def _used() -> ShoalError:
    return refuse(Code.TOKEN_USED, "it was redeemed before", "a fresh token", "make a new one: shoal token create")
