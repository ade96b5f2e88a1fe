"""A new certificate for an identity that holds one: all that an expired certificate may still ask for.

The caller shows the certificate that it holds and signs, with that one's key, a nonce of ours together with a request
for a new key. Nonces carry their own time and seal, so that a flood of challenges costs no memory; only those that
bought a certificate are remembered, until they are over.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cryptography import x509

from shoal.coordinator.controllers import identities, records
from shoal.coordinator.controllers.buckets import Bucket, Buckets
from shoal.coordinator.controllers.enrolment import LIFETIME_S
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.controllers.identities import GRACE_S, IdentityRecord, key_of
from shoal.coordinator.ports import Authority, Clock, Ids, Meter, StaleRevision, Store
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds
from shoal.wire.enrol import RENEWAL
from shoal.wire.identity import UNREADABLE, Identity, identity_of_certificate
from shoal.wire.signing import verify

NONCE_S: Final = 60.0
FAILURES: Final = 20
"""Renewals that one address may fail at once; then FAILURES_PER_S."""
FAILURES_PER_S: Final = 2.0
RENEWALS: Final = 6
"""Renewals of one identity at once; then RENEWALS_PER_S: whoever holds a key shall not gather certificates."""
RENEWALS_PER_S: Final = 1 / 600
MOST_KEPT: Final = 10_000

Forbids = Callable[[Identity], Refusal | None]
"""Why this identity's certificate is good for nothing any more, or for now."""


@dataclass(frozen=True, slots=True)
class Renewed:
    identity: Identity
    certificate_pem: bytes
    ca_pem: bytes


class Renewal:
    def __init__(
        self,
        region: str,
        store: Store,
        authority: Authority,
        events: EventLog,
        clock: Clock,
        ids: Ids,
        meter: Meter,
        forbids: Forbids,
        *,
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
    ) -> None:
        self._region = region
        self._store = store
        self._authority = authority
        self._events = events
        self._clock = clock
        self._ids = ids
        self._meter = meter
        self._forbids = forbids
        self._lifetimes = lifetimes
        self._seal = ids.secret().encode()
        self._failures = Buckets(FAILURES, FAILURES_PER_S, MOST_KEPT)
        self._renewals = Buckets(RENEWALS, RENEWALS_PER_S, MOST_KEPT)
        self._used: dict[str, Elapsed] = {}

    def challenge(self) -> str:
        """A nonce for one renewal, good for NONCE_S with this process."""
        said = f"{int((self._clock.now() + NONCE_S) * 1000)}.{self._ids.secret()}"
        return f"{said}.{self._sealed(said)}"

    async def renew(
        self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes, *, peer: str
    ) -> Renewed:
        """peer: the caller's IP address. Raises ShoalError(RENEW_DENIED | CSR_DENIED)."""
        now = self._clock.now()
        bucket = self._failures.of(peer, now)
        if not bucket.allows(now):
            self._meter.count("renewals_refused", code=Code.RENEW_DENIED)
            raise _denied("too many failed renewals from this address", f"{FAILURES_PER_S:g} a second", "wait a little")
        try:
            return await self._renew(certificate_pem, csr_pem, nonce, signature, peer)
        except ShoalError as error:
            if error.code in (Code.RENEW_DENIED, Code.CSR_DENIED):
                await self._failed(bucket, peer, error.refusal)
            raise

    async def _failed(self, bucket: Bucket, peer: str, refusal: Refusal) -> None:
        now = self._clock.now()
        bucket.spend(now)
        self._meter.count("renewals_refused", code=refusal.code)
        if bucket.shall_audit(now):
            await self._events.audit("anonymous", "Renew", peer, str(refusal.code))

    async def _renew(self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes, peer: str) -> Renewed:
        self._check_nonce(nonce)
        certificate, identity, issuer = self._recognised(certificate_pem)
        try:
            verify(certificate, signature, self._region, identity.name, RENEWAL, nonce.encode() + csr_pem)
        except ShoalError as cause:
            raise _denied("not signed by the key of that certificate", "its holder", "enrol again") from cause
        self._authority.check(csr_pem, identity.name)
        self._spend(identity, nonce)
        issued = await self._issue(identity, issuer, csr_pem, peer)
        late = identity.not_after < self._clock.wall()
        self._meter.count("renewals", role=identity.role, late=str(late).lower())
        return Renewed(identity, issued, self._authority.ca_pem)

    def _check_nonce(self, nonce: str) -> None:
        said, _, seal = nonce.rpartition(".")
        stale = _denied("a nonce that is over, used, or not of this server", "a fresh one", "ask for a challenge")
        if not hmac.compare_digest(seal.encode(), self._sealed(said).encode()):
            raise stale
        if self._clock.now() * 1000 >= int(said.partition(".")[0]) or nonce in self._used:
            raise stale

    def _recognised(self, certificate_pem: bytes) -> tuple[x509.Certificate, Identity, str]:
        """Whose certificate it is, if its holder may renew it at all, and the fingerprint of the CA that signed it."""
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            issuer = self._authority.recognise(certificate, retired=True)
            identity = identity_of_certificate(certificate)
        except (*UNREADABLE, ShoalError) as cause:
            raise _denied("not a certificate of this region", "the one that is held", "enrol again") from cause
        if identity.region != self._region or identity.role not in self._lifetimes:
            raise _denied(f"a certificate of {identity.uri}", "a node's or a person's of this region", "enrol again")
        if (refusal := self._forbids(identity)) is not None:
            raise _denied(f"{refusal.code}: {refusal.found}", "a certificate that is good", refusal.remedy)
        late = self._clock.wall() - identity.not_after
        if late > GRACE_S:
            raise _denied(
                f"it ended {show_seconds(late)} ago",
                f"at most {show_seconds(GRACE_S)}",
                "enrol again: shoal token create",
            )
        return certificate, identity, issuer

    def _spend(self, identity: Identity, nonce: str) -> None:
        now = self._clock.now()
        mine = self._renewals.of(identity.uri, now)
        if not mine.allows(now):
            raise _denied(
                f"{identity.uri} renewed {RENEWALS} times just now",
                f"one in {show_seconds(1 / RENEWALS_PER_S)}",
                "wait; the certificate that it has is good",
            )
        mine.spend(now)
        self._used = {each: ends for each, ends in self._used.items() if ends > now}
        self._used[nonce] = Elapsed(now + NONCE_S)

    async def _issue(self, identity: Identity, issuer: str, csr_pem: bytes, peer: str) -> bytes:
        """The certificate; it is in the store, with its event, before it is given away.

        A retired CA's key may be in other hands, which is why one retires a CA: of its certificates those alone count
        that are on record.
        """
        wall = self._clock.wall()
        key = key_of(identity.role, identity.name)
        record = await self._store.read(key)
        known = None if record is None else records.load(IdentityRecord, record.value)
        if issuer not in self._authority.fingerprints and not _holds(known, identity, wall):
            raise _denied("a certificate of a retired CA that is not on record", "one that is", "enrol again")
        if known is not None and _superseded(known, identity, wall):
            raise _denied("a newer certificate followed this one", "the newest", "use the newest, or enrol again")
        issued = self._authority.issue(
            csr_pem,
            identity.role,
            identity.name,
            hosts=(peer,) if peer else (),
            lifetime_s=self._lifetimes[identity.role],
            wall=wall,
        )
        event = Event("RENEWED", identity.uri, f"serial {issued.serial}, after {identity.serial}", identity.uri)
        before = identities.shown(known, identity, wall)
        after = identities.issued(before, identity.uri, issued, before.token, wall)
        try:
            await self._events.commit(
                {key: records.dump(after)}, expect={key: record.revision if record else 0}, events=[event]
            )
        except StaleRevision as cause:
            raise refuse(Code.CONFLICT, "two renewals at once", "one", "try again") from cause
        return issued.pem

    def _sealed(self, said: str) -> str:
        return hmac.new(self._seal, said.encode(), hashlib.sha256).hexdigest()


def _holds(known: IdentityRecord | None, identity: Identity, wall: Wall) -> bool:
    return known is not None and any(each.serial == identity.serial for each in known.certificates(wall))


def _superseded(known: IdentityRecord, identity: Identity, wall: Wall) -> bool:
    """A certificate that this record does not name but is newer than all it names was issued by a store that was lost
    since: its holder must not be locked out for that."""
    if _holds(known, identity, wall):
        return False
    return known.revoked or identity.not_after <= known.not_after


def _denied(found: str, asked: str, remedy: str) -> ShoalError:
    return refuse(Code.RENEW_DENIED, found, asked, remedy)
