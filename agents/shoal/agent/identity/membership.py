"""What this node is to its region, kept up: its certificate renewed in time, and whom it trusts as it is told.

Files are replaced as a whole under `identity/`; whoever uses them (link, front, metrics) reads them again.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from shoal.agent.core import renewal
from shoal.agent.ports import Clock, Held, Log
from shoal.types.assignment import Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Seconds, Wall, show_seconds
from shoal.wire.enrol import renew
from shoal.wire.identity import BACKDATED_S, UNREADABLE, Identity, identity_of_certificate, identity_of_pem
from shoal.wire.private import write_private
from shoal.wire.token import ca_fingerprint

EXPELLED: Final = "expelled"
"""A file of this name says that the region refuses this identity: the machine may join again."""
LOOK_S: Final = Seconds(30.0)
"""Between looks at the clock, which may be set meanwhile."""


class FileMembership:
    """ports.Membership over `folder`. enrol: host:port of the enrolment server, empty where it is not known.

    renewed: called with each new certificate. learned: told what time it is by the coordinator's clock.
    """

    def __init__(
        self,
        folder: Path,
        enrol: str,
        clock: Clock,
        log: Log,
        *,
        renewed: Callable[[], None],
        learned: Callable[[Wall], None],
    ) -> None:
        self._folder = folder
        self._enrol = enrol
        self._clock = clock
        self._log = log
        self._renewed = renewed
        self._learned = learned
        self._wake = asyncio.Event()
        self._doubted = False
        self._read()

    def held(self) -> Held:
        return self._held

    async def adopt(self, trust: Trust) -> None:
        if trust.roots and trust.roots != self._roots:
            fingerprints = [ca_fingerprint(_load(pem)) for pem in trust.roots]
            content = "".join(trust.roots).encode()
            try:
                await asyncio.to_thread(write_private, self._folder / "ca.pem", content)
            except OSError as cause:
                raise refuse(Code.DISK_FULL, f"ca.pem: {cause.strerror}", "room for it", "free some space") from cause
            self._read()
            self._log("trust_adopted", roots=", ".join(each[:16] for each in fingerprints))
        self._wake.set()

    def doubt(self, refusal: Refusal) -> None:
        if refusal.code is Code.CERT_REVOKED:
            try:
                write_private(self._folder / EXPELLED, str(refusal).encode())
            except OSError as error:  # it is told so again at each call; what it serves ends all the same
                self._log("not_noted_expelled", error=True, reason=str(error))
        elif refusal.code in (Code.CERT_EXPIRED, Code.CERT_UNTRUSTED, Code.CERT_NOT_YET_VALID):
            self._doubted = True
            self._wake.set()

    async def run(self) -> None:
        """Renews whenever it is due, for ever."""
        if not self._enrol:
            self._log("renewal_off", error=True, remedy="start with --enrol HOST:PORT, or join again")
            return
        attempt = 0
        while True:
            await self._until_due()
            self._doubted = False
            try:
                await asyncio.to_thread(self._renew)
            except ShoalError as error:
                ended = self._clock.wall() > self._identity.not_after
                wait = renewal.retry_after(self._identity.name, attempt, error.code, ended=ended)
                self._log("renewal_failed", error=True, refusal=str(error.refusal), retry_s=round(wait, 1))
                attempt += 1
                self._doubted = True
                await self._clock.sleep(wait)
                continue
            attempt = 0
            self._read()
            issued = self._issued()
            self._learned(issued)
            self._log("renewed", serial=self._held.serial, ends_in_s=round(self._identity.not_after - issued))
            self._renewed()

    async def _until_due(self) -> None:
        """Until two thirds of the certificate's life are over, somebody refused it, or another CA issues."""
        while not self._doubted:
            if not self._is_of_issuing():
                await self._clock.sleep(renewal.follow_after(self._identity.name))
                return
            due = renewal.due_at(self._issued(), self._identity.not_after, self._identity.name)
            left = due - self._clock.wall()
            if left <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(min(left, LOOK_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _renew(self) -> None:
        enrolled = renew(self._enrol, self._folder)
        offered = identity_of_pem(enrolled.certificate_pem)
        now = self._clock.wall()
        if renewal.is_past(offered.not_after, self._identity.not_after, now):
            found = f"a certificate that ended {show_seconds(Seconds(now - offered.not_after))} ago"
            raise refuse(Code.CLOCK_SKEW, found, "one that is valid", "set the coordinator's clock; ours is kept")
        try:
            enrolled.write(self._folder)
        except OSError as cause:
            raise refuse(Code.DISK_FULL, f"identity/: {cause.strerror}", "room for it", "free some space") from cause

    def _issued(self) -> Wall:
        """When the certificate was made, by the clock of who made it."""
        return Wall(self._identity.not_before + BACKDATED_S)

    def _is_of_issuing(self) -> bool:
        """Whether the CA that issues now signed it."""
        try:
            self._certificate.verify_directly_issued_by(_load(self._roots[0]))
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def _read(self) -> None:
        self._certificate = x509.load_pem_x509_certificate((self._folder / "cert.pem").read_bytes())
        self._identity: Identity = identity_of_certificate(self._certificate)
        roots = x509.load_pem_x509_certificates((self._folder / "ca.pem").read_bytes())
        self._roots = tuple(root.public_bytes(serialization.Encoding.PEM).decode() for root in roots)
        self._held = Held(self._identity.serial, tuple(map(ca_fingerprint, roots)))


def _load(pem: str) -> x509.Certificate:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except UNREADABLE as cause:
        raise refuse(Code.MESSAGE_INVALID, "a CA that is no certificate", "PEM", "update the coordinator") from cause
