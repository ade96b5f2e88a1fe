"""The node's membership in its region: renews its certificate in time, and adopts the trust that the region sends.

Files under `identity/` are replaced as a whole; their users (link, front, metrics) read them again.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from shoal.agent.core import renewal
from shoal.agent.ports import AgentClock, Log, NodeTrust
from shoal.host.event_wait import wait_or_timeout
from shoal.host.private_files import write_private
from shoal.types.assignment import Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds, Wall, show_seconds
from shoal.wire.enrol import renew
from shoal.wire.identity import (
    BACKDATED_S,
    CERTIFICATE_ERRORS,
    ca_fingerprint,
    identity_of_certificate,
    identity_of_pem,
)
from shoal.wire.trust import has_known_issuer

EXPELLED: Final = "expelled"
"""A file of this name records that the region revoked this identity: the machine may join again."""
RECHECK_S: Final = Seconds(30.0)
"""Seconds between checks of the clock, which may be set meanwhile."""


class FileMembership:
    """`ports.NodeMembership` on `folder`. `enrol` is host:port of the enrolment server, empty if unknown.

    `on_renewed` is called after each renewal. `on_coordinator_time` gets the coordinator's time from each new
    certificate.
    """

    def __init__(
        self,
        folder: Path,
        enrol: str,
        clock: AgentClock,
        log: Log,
        *,
        on_renewed: Callable[[], None],
        on_coordinator_time: Callable[[Wall], None],
    ) -> None:
        self._folder = folder
        self._enrol = enrol
        self._clock = clock
        self._log = log
        self._on_renewed = on_renewed
        self._on_coordinator_time = on_coordinator_time
        self._wake = asyncio.Event()
        self._must_renew = False
        self._read_files()

    def current_trust(self) -> NodeTrust:
        return self._trust

    async def adopt(self, trust: Trust) -> None:
        if trust.roots and trust.roots != self._roots:
            fingerprints = [ca_fingerprint(_parse_certificate(pem)) for pem in trust.roots]
            content = "".join(trust.roots).encode()
            try:
                await asyncio.to_thread(write_private, self._folder / "ca.pem", content)
            except OSError as cause:
                raise refuse(Code.DISK_FULL, f"ca.pem: {cause.strerror}", "room for it", "free some space") from cause
            self._read_files()
            self._log.info("trusted_roots_changed", roots=", ".join(each[:16] for each in fingerprints))
        self._wake.set()

    def on_link_refused(self, refusal: Refusal) -> None:
        if refusal.code is Code.CERT_REVOKED:
            try:
                write_private(self._folder / EXPELLED, str(refusal).encode())
            # the coordinator repeats it at each hello, and the node stops serving all the same
            except OSError as error:
                self._log.error("expulsion_write_failed", error=str(error))
        elif refusal.code in (Code.CERT_EXPIRED, Code.CERT_UNTRUSTED, Code.CERT_NOT_YET_VALID):
            self._must_renew = True
            self._wake.set()

    async def run(self) -> None:
        """Renew the certificate whenever it is due, until cancelled."""
        if not self._enrol:
            self._log.warning("certificate_renewal_disabled", remedy="start with --enrol HOST:PORT, or join again")
            return
        attempt = 0
        while True:
            await self._wait_until_due()
            self._must_renew = False
            try:
                await asyncio.to_thread(self._renew)
            except ShoalError as error:
                ended = self._clock.wall() > self._identity.not_after
                wait = renewal.retry_after(self._identity.name, attempt, error.code, expired=ended)
                self._log.error("certificate_renewal_failed", code=error.code, error=str(error), retry_s=round(wait, 1))
                attempt += 1
                self._must_renew = True
                await self._clock.sleep(wait)
                continue
            attempt = 0
            self._read_files()
            issued = self._issue_time()
            self._on_coordinator_time(issued)
            self._log.info(
                "certificate_renewed", serial=self._trust.serial, valid_s=round(self._identity.not_after - issued)
            )
            self._on_renewed()

    async def _wait_until_due(self) -> None:
        """Wait until two thirds of the certificate's life are over, a peer refused it, or another CA issues."""
        while not self._must_renew:
            if not self._is_from_current_ca():
                await self._clock.sleep(renewal.ca_switch_delay(self._identity.name))
                return
            due = renewal.due_at(self._issue_time(), self._identity.not_after, self._identity.name)
            left = due - self._clock.wall()
            if left <= 0:
                return
            self._wake.clear()
            await wait_or_timeout(self._wake, min(left, RECHECK_S))

    def _renew(self) -> None:
        enrolled = renew(self._enrol, self._folder)
        offered = identity_of_pem(enrolled.certificate_pem)
        now = self._clock.wall()
        if renewal.is_offer_expired(offered.not_after, self._identity.not_after, now):
            found = f"a certificate that ended {show_seconds(Seconds(now - offered.not_after))} ago"
            raise refuse(Code.CLOCK_SKEW, found, "one that is valid", "set the coordinator's clock; ours is kept")
        try:
            enrolled.write(self._folder)
        except OSError as cause:
            raise refuse(Code.DISK_FULL, f"identity/: {cause.strerror}", "room for it", "free some space") from cause

    def _issue_time(self) -> Wall:
        """When the certificate was issued, by the issuer's clock."""
        return Wall(self._identity.not_before + BACKDATED_S)

    def _is_from_current_ca(self) -> bool:
        """Whether the CA that issues now signed the certificate."""
        return has_known_issuer(self._certificate, (_parse_certificate(self._roots[0]),))

    def _read_files(self) -> None:
        self._certificate = x509.load_pem_x509_certificate((self._folder / "cert.pem").read_bytes())
        self._identity: Identity = identity_of_certificate(self._certificate)
        roots = x509.load_pem_x509_certificates((self._folder / "ca.pem").read_bytes())
        self._roots = tuple(root.public_bytes(serialization.Encoding.PEM).decode() for root in roots)
        self._trust = NodeTrust(self._identity.serial, tuple(map(ca_fingerprint, roots)))


def _parse_certificate(pem: str) -> x509.Certificate:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except CERTIFICATE_ERRORS as cause:
        raise refuse(Code.MESSAGE_INVALID, "a CA that is no certificate", "PEM", "update the coordinator") from cause
