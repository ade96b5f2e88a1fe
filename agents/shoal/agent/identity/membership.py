"""The node's membership in its region: renews its certificate in time, and adopts the trust that the region sends.

Files under `identity/` are replaced as a whole; their users (link, front, metrics) read them again.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shoal.agent.core import renewal
from shoal.agent.identity.enrolment import EXPELLED
from shoal.agent.identity.orders import RenewOrder
from shoal.agent.identity.programs import run_order
from shoal.agent.ports import AgentClock, Log, NodeTrust
from shoal.host.event_wait import wait_or_timeout
from shoal.host.private_files import write_private
from shoal.types.assignment import Trust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Seconds, Wall
from shoal.wire.identity import BACKDATED_S
from shoal.wire.tls_files import fingerprint_of, is_issued_by, read_identity, split_certificates

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
            fingerprints = [fingerprint_of(pem) for pem in trust.roots]
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
            try:
                order = RenewOrder(self._enrol, str(self._folder), self._identity.not_after, self._clock.wall())
                await asyncio.to_thread(run_order, order)
            except ShoalError as error:
                ended = self._clock.wall() > self._identity.not_after
                wait = renewal.retry_after(self._identity.name, attempt, error.code, expired=ended)
                self._log.error("certificate_renewal_failed", code=error.code, error=str(error), retry_s=round(wait, 1))
                attempt += 1
                self._must_renew = True
                await self._clock.sleep(wait)
                continue
            attempt = 0
            self._must_renew = False  # what was refused meanwhile was the certificate before
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
            if not self._is_from_current_ca:
                await self._clock.sleep(renewal.ca_switch_delay(self._identity.name))
                return
            due = renewal.due_at(self._issue_time(), self._identity.not_after, self._identity.name)
            left = due - self._clock.wall()
            if left <= 0:
                return
            self._wake.clear()
            await wait_or_timeout(self._wake, min(left, RECHECK_S))

    def _issue_time(self) -> Wall:
        """When the certificate was issued, by the issuer's clock."""
        return Wall(self._identity.not_before + BACKDATED_S)

    def _read_files(self) -> None:
        certificate, key = self._folder / "cert.pem", self._folder / "key.pem"
        self._identity: Identity = read_identity(certificate, key)
        self._roots = split_certificates((self._folder / "ca.pem").read_text())
        # The first CA is the one that issues now.
        self._is_from_current_ca = any(is_issued_by(certificate, key, each) for each in self._roots[:1])
        self._trust = NodeTrust(self._identity.serial, tuple(map(fingerprint_of, self._roots)))
