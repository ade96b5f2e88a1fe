"""Join tokens and their redemption; bearer tokens of tenants. Only hashes of secrets are stored.

A join token is bound to a role and a region, and to a name if its creator gave one. It is redeemed exactly once: a
compare-and-set marks it as used, in one transaction with the record of the identity that it enrolled.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.fleet.records import GRANTS
from shoal.coordinator.controllers.identity import certificates
from shoal.coordinator.controllers.identity.certificates import IdentityRecord, key_of
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.fleet.labels import NO_LABEL_GRANT, LabelGrant, check_labels
from shoal.coordinator.core.rate_limit import RateLimiter
from shoal.coordinator.ports import (
    BrokerAccess,
    CertificateIssuer,
    StaleRevision,
    StoreRecord,
    Transaction,
)
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Credential
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import NODES, check_name, parse_name, uri_of
from shoal.types.token import JoinToken, parse_join_token, token_sha256
from shoal.types.units import UNKNOWN_TIME, Seconds, Wall, show_seconds

T = TypeVar("T")

TOKENS: Final = "tokens/"
CREDENTIALS: Final = "credentials/"
ADMISSIONS: Final = "admissions/"
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
"""Lifetime of certificates by role. Nodes renew theirs by themselves, operators' contexts when they are used."""
MOST_VALID_S: Final = 30 * 86400.0
GUESSES: Final = 20
"""Failed redemptions that one address may make at once; after that GUESSES_PER_S."""
GUESSES_PER_S: Final = 2.0
MOST_ADDRESSES: Final = 10_000
"""Addresses with a rate limit in memory; beyond that the least recent one is dropped."""


@dataclass(frozen=True, slots=True)
class Token:
    """A join or bearer token as stored."""

    # Public id: the first 12 hex digits of `sha256`.
    id: str
    # SHA-256 of a join token's secret or of a bearer token's whole text, hex.
    sha256: str
    # A Role, or a role word such as `bearer` or `region`.
    role: str
    # Name that it is bound to; empty: the joiner chooses.
    name: str
    # URI name of its creator, or another actor's name.
    created_by: str
    # When it can no longer be used.
    expires_at: Wall
    # When it was redeemed; None: not yet.
    used_at: Wall | None = None
    # URI name or region that redeemed it; empty: not yet.
    used_by: str = ""
    # Labels that the region grants the node that joins with it.
    grant: LabelGrant = NO_LABEL_GRANT
    # When it was created. 0: not known, because an older version wrote the record, at first or when it was
    # redeemed.
    created_at: Wall = UNKNOWN_TIME


@dataclass(frozen=True, slots=True)
class Admission:
    """A region that joined, and who created the token that admitted it."""

    # The region's name.
    region: str
    # URI name of the token's creator.
    made_by: str


@dataclass(frozen=True, slots=True)
class Redemption:
    # Role of the new identity.
    """What a redeemed join token yields."""

    role: Role
    # Name of the new identity.
    name: str
    # The new certificate, PEM.
    certificate_pem: bytes
    # Every trusted CA certificate (PEM), the issuing one first.
    ca_pem: bytes


@dataclass(frozen=True, slots=True)
class CreatedToken:
    """A new token; the only place where its text exists."""

    # Public id, for `shoal get tokens`.
    id: str
    # The token itself: shown once, never stored.
    text: str
    # When it can no longer be used.
    expires_at: Wall


class Enrolment:
    """Creates, lists, deletes and redeems tokens."""

    def __init__(
        self,
        context: ControllerContext,
        authority: CertificateIssuer,
        *,
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
        broker: BrokerAccess | None = None,
        words: tuple[str, ...] = (BEARER,),
    ) -> None:
        """broker: admits each node to the MQTT broker; None without a broker. words: role words of tokens that yield no
        certificate.
        """
        self._region = context.name
        self._store = context.store
        self._authority = authority
        self._events = context.events
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._lifetimes = lifetimes
        self._broker = broker
        self._words = words
        self._guesses = RateLimiter(GUESSES, GUESSES_PER_S, MOST_ADDRESSES)

    async def create(
        self, role: str, name: str, valid_s: float, actor: str, grant: LabelGrant = NO_LABEL_GRANT
    ) -> CreatedToken:
        """Raises ShoalError(FIELD_INVALID | FIELD_MISSING | NAME_INVALID), and what `check_labels` finds."""
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
            if role in (BEARER, Role.TENANT) and name == GUEST_TENANT:
                raise refuse(
                    Code.NAME_INVALID, f"tenant {GUEST_TENANT}", "another name", "this one is for guests' work"
                )
        elif role in (BEARER, Role.TENANT):  # or else its holder would choose whose workloads it may call
            raise refuse(
                Code.FIELD_MISSING, f"a {role} token without a tenant", "the tenant's name", "add --name TENANT"
            )
        if grant != NO_LABEL_GRANT and role not in NODES:
            raise refuse(
                Code.FIELD_INVALID, f"labels of a {role} token", "labels of an agent or a gateway", "leave them out"
            )
        if (refusal := check_labels(grant.labels, grant.allowed)) is not None:
            raise ShoalError(refusal)
        secret = self._ids.secret()
        text = (
            f"shoal-bearer.{secret}"
            if role == BEARER
            else JoinToken(self._region, self._authority.fingerprint, secret).text
        )
        sha256 = token_sha256(text if role == BEARER else secret)
        wall = self._clock.wall()
        expires_at = Wall(wall + valid_s)
        token = Token(sha256[:12], sha256, role, name, actor, expires_at, grant=grant, created_at=wall)
        puts = {TOKENS + sha256: codec.dump(token)}
        if role == BEARER:
            puts[CREDENTIALS + sha256] = codec.dump(Credential(name, sha256, token.expires_at))
        event = LogEvent("TOKEN_CREATED", token.id, f"{role} {name or '(any name)'}", actor)
        while True:
            expect = {TOKENS + sha256: 0, **await self._maker_revision(actor)}
            try:
                await self._events.commit(puts, expect=expect, events=[event])
                break
            except StaleRevision:
                if await self._store.read(TOKENS + sha256) is not None:
                    raise
        self._meter.count(metrics.TOKENS_CREATED, role=role)
        return CreatedToken(token.id, text, token.expires_at)

    async def _maker_revision(self, maker: str) -> dict[str, int]:
        """The expected revision of the creator's identity, so that no token is created after a revocation of its
        creator.

        Raises ShoalError(CERT_REVOKED).
        """
        if (key := _key_of_person(maker)) is None:
            return {}
        record = await self._store.read(key)
        if record is not None and codec.load(IdentityRecord, record.value).revoked:
            raise refuse(Code.CERT_REVOKED, f"{maker} was revoked", "an operator", "enrol again with a new token")
        return {key: record.revision if record is not None else 0}

    async def redeem(self, text: str, csr_pem: bytes, name: str, *, peer: str) -> Redemption:
        """Issues a certificate for the identity that the token names. peer: the caller's IP address.

        Raises ShoalError(TOKEN_INVALID | TOKEN_USED | TOKEN_EXPIRED | CSR_DENIED | NAME_INVALID | CONFLICT |
        OVERLOADED).
        """
        return await self._with_rate_limit(peer, lambda: self._redeem(text, csr_pem, name, peer))

    async def spend(
        self, text: str, word: str, name: str, then: Callable[[Transaction], Awaitable[T]], *, peer: str
    ) -> T:
        """Redeems a token that yields no certificate: `then` commits the given transaction together with its own
        writes.

        Raises ShoalError(TOKEN_INVALID | TOKEN_USED | TOKEN_EXPIRED | OVERLOADED), and what `then` raises.
        """
        return await self._with_rate_limit(peer, lambda: self._spend(text, word, name, then))

    async def _with_rate_limit(self, peer: str, redemption: Callable[[], Awaitable[T]]) -> T:
        """Limits failed redemptions of one address: how many are audited, and how many get an exact answer. A valid
        token is never refused, because callers behind one address must not lock each other out.
        """
        try:
            return await redemption()
        except ShoalError as error:
            if error.code not in (Code.TOKEN_INVALID, Code.TOKEN_USED, Code.TOKEN_EXPIRED, Code.CSR_DENIED):
                raise
            bucket = self._guesses.bucket_of(peer, self._clock.now())
            if not bucket.allows(self._clock.now()):
                self._meter.count(metrics.ENROLMENTS_REFUSED, code=Code.OVERLOADED)
                raise refuse(
                    Code.OVERLOADED,
                    "too many failed redemptions",
                    f"{GUESSES_PER_S:g} a second; a good token is taken at any time",
                    "check the token; make a new one: shoal token create",
                ) from error
            bucket.spend(self._clock.now())
            self._meter.count(metrics.ENROLMENTS_REFUSED, code=error.code)
            if bucket.should_audit(self._clock.now()):
                await self._events.audit("anonymous", "Redeem", peer, str(error.code))
            raise

    async def tokens(self) -> tuple[Token, ...]:
        found = [codec.load(Token, record.value) for record in await self._store.scan(TOKENS)]
        return tuple(sorted(found, key=lambda token: (token.expires_at, token.id)))

    async def revoke(self, token_id: str, actor: str) -> int:
        """Deletes a token. It can no longer be redeemed; a bearer token stops working at once. Raises
        ShoalError(NOT_FOUND).
        """
        for token in await self.tokens():
            if token.id == token_id:
                keys = (TOKENS + token.sha256, CREDENTIALS + token.sha256)
                event = LogEvent("TOKEN_DELETED", token.id, token.role, actor)
                return await self._events.commit({}, deletes=keys, events=[event])
        raise refuse(Code.NOT_FOUND, f"token {token_id!r:.40}", "one of `shoal get tokens`", "look the id up there")

    async def revoke_unused(self, word: str, name: str, actor: str) -> None:
        """Deletes unused tokens for this role word and this name."""
        for token in await self.tokens():
            if (token.role, token.name, token.used_at) == (word, name, None):
                await self.revoke(token.id, actor)

    async def expiry_of(self, role: Role, name: str) -> Wall | None:
        record = await self._store.read(key_of(role, name))
        return None if record is None else codec.load(IdentityRecord, record.value).not_after

    async def nodes(self) -> tuple[str, ...]:
        """Names of agents and gateways that are enrolled and not revoked."""
        found = [record for role in sorted(NODES) for record in await self._store.scan(key_of(role, ""))]
        good = (each for each in found if not codec.load(IdentityRecord, each.value).revoked)
        return tuple(sorted(each.key.rpartition("/")[2] for each in good))

    async def _valid_token(self, text: str) -> tuple[StoreRecord, Token]:
        """The stored token, if it may be used now."""
        claim = parse_join_token(text)
        if claim.region != self._region or claim.ca_sha256 not in self._authority.fingerprints:
            raise _invalid_token("a token of another region or CA")
        key = TOKENS + token_sha256(claim.secret)
        record = await self._store.read(key)
        if record is None:
            raise _invalid_token("a token that this region did not make")
        token = codec.load(Token, record.value)
        wall = self._clock.wall()
        if token.used_at is not None:
            raise _token_already_used()
        if wall >= token.expires_at:
            raise refuse(
                Code.TOKEN_EXPIRED,
                f"it ended {show_seconds(wall - token.expires_at)} ago",
                "a token in its time",
                "make a new one: shoal token create",
            )
        maker_key = _key_of_person(token.created_by)
        maker = None if maker_key is None else await self._store.read(maker_key)
        if maker is not None and codec.load(IdentityRecord, maker.value).revoked:
            raise _invalid_token("a token whose maker was revoked")
        return record, token

    async def _spend(self, text: str, word: str, name: str, then: Callable[[Transaction], Awaitable[T]]) -> T:
        record, token = await self._valid_token(text)
        if token.role != word or token.name not in ("", name):
            raise _invalid_token(f"a token for {token.role} {token.name or '(any name)'}")
        used = replace(token, used_at=self._clock.wall(), used_by=name)
        try:
            admission = codec.dump(Admission(name, token.created_by))
            puts = {record.key: codec.dump(used), ADMISSIONS + name: admission}
            return await then(Transaction(puts, expect={record.key: record.revision}))
        except StaleRevision:
            return await self._spend(text, word, name, then)  # a concurrent call won: this one now fails with a reason

    async def _redeem(self, text: str, csr_pem: bytes, name: str, peer: str) -> Redemption:
        record, token = await self._valid_token(text)
        if token.role in self._words:
            raise _invalid_token(f"a {token.role} token")
        key, wall = record.key, self._clock.wall()
        name = name or token.name
        if token.name and name != token.name:
            raise _invalid_token(f"a token for another name than {name!r:.80}")
        check_name(name, "name")
        role = Role(token.role)
        self._authority.check(csr_pem, name)
        identity_key = key_of(role, name)
        taken = await self._store.read(identity_key)
        known = None if taken is None else codec.load(IdentityRecord, taken.value)
        if taken is not None and not token.name:
            raise refuse(
                Code.CONFLICT,
                f"{role} {name} is enrolled",
                "a new name, for a token that is not bound to one",
                f"choose another name, or make a token for it: shoal token create --role {role} --name {name}",
            )
        issued = self._authority.issue(
            csr_pem,
            role,
            name,
            hosts=certificates.certificate_hosts(role, peer),
            lifetime_s=self._lifetimes[role],
            wall=wall,
        )
        uri = uri_of(self._region, role, name)
        event = LogEvent("ENROLLED", uri, f"serial {issued.serial}, with token {token.id}", uri)
        puts = {
            key: codec.dump(replace(token, used_at=wall, used_by=uri)),
            identity_key: codec.dump(
                certificates.with_issued_certificate(known, uri, issued, token.id, wall, made_by=token.created_by)
            ),
        }
        if role in NODES:
            puts[GRANTS + name] = codec.dump(token.grant)
        expect = {key: record.revision, identity_key: taken.revision if taken else 0}
        try:
            await self._events.commit(puts, expect=expect, events=[event])
        except StaleRevision:
            return await self._redeem(text, csr_pem, name, peer)  # a concurrent call won: this one now gets its reason
        if self._broker is not None and role in NODES:
            await self._broker.admit(name)
        return Redemption(role, name, issued.pem, self._authority.ca_pem)


def _key_of_person(uri: str) -> str | None:
    """Store key of the identity of a token's creator; None where the creator is not a certificate's name."""
    try:
        _, role, name = parse_name(uri)
    except ShoalError:
        return None
    return key_of(role, name)


def _invalid_token(found: str) -> ShoalError:
    return refuse(Code.TOKEN_INVALID, found, "a join token of this region", "make a new one: shoal token create")


def _token_already_used() -> ShoalError:
    return refuse(Code.TOKEN_USED, "it was redeemed before", "a fresh token", "make a new one: shoal token create")
