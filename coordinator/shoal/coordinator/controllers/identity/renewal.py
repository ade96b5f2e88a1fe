"""Renews a certificate: the only request that an expired certificate may still make.

The caller presents its certificate and signs, with that certificate's key, a nonce of this server together with the CSR
for a new key. A nonce carries its own expiry and an HMAC, so a flood of challenges costs no memory. Only nonces that
bought a certificate are remembered, until they expire.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.identity import certificates
from shoal.coordinator.controllers.identity.certificates import GRACE_S, IdentityRecord, key_of
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.rate_limit import RateLimiter, TokenBucket
from shoal.coordinator.ports import (
    CertificateAuthority,
    RecognisedCertificate,
    StaleRevision,
)
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Elapsed, Seconds, Wall, show_seconds

NONCE_S: Final = 60.0
FAILURE_BURST: Final = 20
"""Renewals that one address may fail at once; after that FAILURES_PER_S."""
FAILURES_PER_S: Final = 2.0
RENEWAL_BURST: Final = 6
"""Renewals of one identity at once; after that RENEWALS_PER_S, so that a key's holder cannot collect certificates."""
RENEWALS_PER_S: Final = 1 / 600
MOST_KEPT: Final = 10_000

Forbids = Callable[[Identity], Refusal | None]
"""Why this identity's certificate may not be renewed, for good or for now; None if it may."""


@dataclass(frozen=True, slots=True)
class RenewedCertificate:
    # The identity by the presented certificate.
    """What a renewal yields."""

    identity: Identity
    # The new certificate, PEM.
    certificate_pem: bytes
    # Every trusted CA certificate (PEM), the issuing one first.
    ca_pem: bytes


class CertificateRenewal:
    """Issues new certificates to holders of old ones. Nonces are valid in this process only."""

    def __init__(
        self,
        context: ControllerContext,
        authority: CertificateAuthority,
        forbids: Forbids,
        *,
        lifetimes: Mapping[Role, Seconds] = LIFETIME_S,
    ) -> None:
        self._region = context.name
        self._store = context.store
        self._authority = authority
        self._events = context.events
        self._clock = context.clock
        self._ids = context.ids
        self._meter = context.meter
        self._forbids = forbids
        self._lifetimes = lifetimes
        self._seal_key = self._ids.secret().encode()
        self._failures = RateLimiter(FAILURE_BURST, FAILURES_PER_S, MOST_KEPT)
        self._renewals = RateLimiter(RENEWAL_BURST, RENEWALS_PER_S, MOST_KEPT)
        self._used_nonces: dict[str, Elapsed] = {}

    def challenge(self) -> str:
        """A nonce for one renewal, valid for NONCE_S with this process."""
        said = f"{int((self._clock.now() + NONCE_S) * 1000)}.{self._ids.secret()}"
        return f"{said}.{self._seal_of(said)}"

    async def renew(
        self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes, *, peer: str
    ) -> RenewedCertificate:
        """peer: the caller's IP address. Raises ShoalError(RENEW_DENIED | CSR_DENIED)."""
        try:
            return await self._renew(certificate_pem, csr_pem, nonce, signature, peer)
        except ShoalError as error:
            if error.code not in (Code.RENEW_DENIED, Code.CSR_DENIED):
                raise
            now = self._clock.now()
            bucket = self._failures.bucket_of(peer, now)
            if not bucket.allows(now):  # a valid renewal from the same address does not get here
                self._meter.count(metrics.RENEWALS_REFUSED, code=Code.RENEW_DENIED)
                asked = f"{FAILURES_PER_S:g} a second"
                raise _denial("too many failed renewals from this address", asked, "wait a little") from error
            await self._record_failure(bucket, peer, error.refusal)
            raise

    async def _record_failure(self, bucket: TokenBucket, peer: str, refusal: Refusal) -> None:
        now = self._clock.now()
        bucket.spend(now)
        self._meter.count(metrics.RENEWALS_REFUSED, code=refusal.code)
        if bucket.should_audit(now):
            await self._events.audit("anonymous", "Renew", peer, str(refusal.code))

    async def _renew(
        self, certificate_pem: bytes, csr_pem: bytes, nonce: str, signature: bytes, peer: str
    ) -> RenewedCertificate:
        self._check_nonce(nonce)
        known = self._recognise(certificate_pem)
        identity = known.identity
        try:
            self._authority.verify_renewal(certificate_pem, csr_pem, nonce, signature)
        except ShoalError as cause:
            raise _denial("not signed by the key of that certificate", "its holder", "enrol again") from cause
        self._authority.check(csr_pem, identity.name)
        self._spend(identity, nonce)
        issued = await self._issue(identity, known.issuer, csr_pem, peer)
        late = identity.not_after < self._clock.wall()
        self._meter.count(metrics.RENEWALS, role=identity.role, late=str(late).lower())
        return RenewedCertificate(identity, issued, self._authority.ca_pem)

    def _check_nonce(self, nonce: str) -> None:
        said, _, seal = nonce.rpartition(".")
        stale = _denial("a nonce that is over, used, or not of this server", "a fresh one", "ask for a challenge")
        if not hmac.compare_digest(seal.encode(), self._seal_of(said).encode()):
            raise stale
        if self._clock.now() * 1000 >= int(said.partition(".")[0]) or nonce in self._used_nonces:
            raise stale

    def _recognise(self, certificate_pem: bytes) -> RecognisedCertificate:
        """The certificate's identity and CA, if the holder may renew it at all."""
        try:
            known = self._authority.recognise(certificate_pem, retired=True)
        except ShoalError as cause:
            raise _denial("not a certificate of this region", "the one that is held", "enrol again") from cause
        identity = known.identity
        if identity.region != self._region or identity.role not in self._lifetimes:
            raise _denial(f"a certificate of {identity.uri}", "a node's or a person's of this region", "enrol again")
        if (refusal := self._forbids(identity)) is not None:
            raise _denial(f"{refusal.code}: {refusal.found}", "a certificate that is good", refusal.remedy)
        late = self._clock.wall() - identity.not_after
        if late > GRACE_S:
            raise _denial(
                f"it ended {show_seconds(late)} ago",
                f"at most {show_seconds(GRACE_S)}",
                "enrol again: shoal token create",
            )
        return known

    def _spend(self, identity: Identity, nonce: str) -> None:
        now = self._clock.now()
        mine = self._renewals.bucket_of(identity.uri, now)
        if not mine.allows(now):
            raise _denial(
                f"{identity.uri} renewed {RENEWAL_BURST} times just now",
                f"one in {show_seconds(1 / RENEWALS_PER_S)}",
                "wait; the certificate that it has is good",
            )
        mine.spend(now)
        self._used_nonces = {each: ends for each, ends in self._used_nonces.items() if ends > now}
        self._used_nonces[nonce] = Elapsed(now + NONCE_S)

    async def _issue(self, identity: Identity, issuer: str, csr_pem: bytes, peer: str) -> bytes:
        """Issues the certificate. It is stored, with its event, before it is handed out.

        The key of a retired CA may be compromised, which is a reason to retire a CA. So of its certificates only those
        on record are renewed.
        """
        wall = self._clock.wall()
        key = key_of(identity.role, identity.name)
        record = await self._store.read(key)
        known = None if record is None else codec.load(IdentityRecord, record.value)
        if issuer not in self._authority.fingerprints and not _holds(known, identity, wall):
            raise _denial("a certificate of a retired CA that is not on record", "one that is", "enrol again")
        if known is not None and _is_superseded(known, identity, wall):
            raise _denial("a newer certificate followed this one", "the newest", "use the newest, or enrol again")
        issued = self._authority.issue(
            csr_pem,
            identity.role,
            identity.name,
            hosts=certificates.certificate_hosts(identity.role, peer),
            lifetime_s=self._lifetimes[identity.role],
            wall=wall,
        )
        event = LogEvent("RENEWED", identity.uri, f"serial {issued.serial}, after {identity.serial}", identity.uri)
        before = certificates.with_presented_certificate(known, identity, wall)
        after = certificates.with_issued_certificate(
            before, identity.uri, issued, before.token, wall, made_by=before.made_by
        )
        try:
            await self._events.commit(
                {key: codec.dump(after)}, expect={key: record.revision if record else 0}, events=[event]
            )
        except StaleRevision as cause:
            raise refuse(Code.CONFLICT, "two renewals at once", "one", "try again") from cause
        return issued.pem

    def _seal_of(self, said: str) -> str:
        return hmac.new(self._seal_key, said.encode(), hashlib.sha256).hexdigest()


def _holds(known: IdentityRecord | None, identity: Identity, wall: Wall) -> bool:
    return known is not None and any(each.serial == identity.serial for each in known.certificates(wall))


def _is_superseded(known: IdentityRecord, identity: Identity, wall: Wall) -> bool:
    """Whether the record names a newer certificate instead of this one. A certificate that is newer than all on record
    was issued before the store was restored from a copy: its holder must not be locked out.
    """
    if _holds(known, identity, wall):
        return False
    return known.revoked or identity.not_after <= known.not_after


def _denial(found: str, asked: str, remedy: str) -> ShoalError:
    return refuse(Code.RENEW_DENIED, found, asked, remedy)
