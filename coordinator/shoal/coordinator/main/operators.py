"""The first operator's certificate, which the machine that holds the CA's key issues for its owner.

Each of its certificates is on record like any other before a file holds it, so that it can be revoked. After a
revocation it stays revoked until the machine's owner requests another one with `shoal-coordinator operator`.
"""

import asyncio
from pathlib import Path
from typing import Final

import structlog

from shoal.coordinator import codec
from shoal.coordinator.controllers.identity import certificates
from shoal.coordinator.controllers.identity.certificates import IdentityRecord, key_of
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import OPERATOR, first_operator, is_due, operator_certificate
from shoal.coordinator.ports import Clock, IssuedCertificate, StaleRevision, Store, Transaction
from shoal.host.private_files import write_private
from shoal.types.codes import ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.wire.certificates import identity_of_pem

REQUEST_FILE: Final = "wanted"
"""File in the operator's folder by which its owner requests a new first operator."""
POLL_S: Final = 1.0
"""Between looks of a coordinator for a request."""
SERVED_WITHIN_S: Final = 10.0
"""For which the owner waits for a coordinator that runs: ten of its looks."""

log: Final = structlog.get_logger("shoal.coordinator.identity")


def ask_for_operator(folder: Path) -> None:
    """Leaves the request for the coordinator that uses `folder`, or for its next start."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / REQUEST_FILE, b"")


async def is_served(folder: Path, clock: Clock) -> bool:
    """Waits for the files that `folder` asks for. Returns False if no coordinator has written them in time."""
    end = clock.now() + SERVED_WITHIN_S
    while (folder / REQUEST_FILE).exists():
        if clock.now() >= end:
            return False
        await clock.sleep(Seconds(0.1))
    return True


class FirstOperator:
    """Keeps the first operator's certificate valid and on record."""

    def __init__(self, authority: FileAuthority, folder: Path, store: Store, clock: Clock) -> None:
        self._authority = authority
        self._folder = folder
        self._store = store
        self._clock = clock
        self._key = key_of(Role.OPERATOR, OPERATOR)
        self._recorded_pem = b""

    async def run(self) -> None:
        """Until cancelled: renews the certificate when it is due or another CA issues, and serves requests for a new
        one."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.ensure()
            except (ShoalError, StaleRevision, OSError) as error:
                log.error("operator_certificate_failed", error=str(error))

    async def ensure(self) -> None:
        """Renews or replaces the certificate if needed. Raises ShoalError(STORE_*), StaleRevision, OSError."""
        held = operator_certificate(self._folder)
        if held and held != self._recorded_pem:
            await self._record(held)
            self._recorded_pem = held
        is_wanted = (self._folder / REQUEST_FILE).exists()
        if not is_wanted and not is_due(self._authority, self._folder, self._clock.wall()):
            return
        if not is_wanted and await self._is_revoked():
            return
        fresh = first_operator(self._authority, self._clock.wall())
        await self._record(fresh.certificate_pem, is_fresh=True)
        fresh.write(self._folder)
        (self._folder / REQUEST_FILE).unlink(missing_ok=True)

    async def _is_revoked(self) -> bool:
        found = await self._store.read(self._key)
        return found is not None and codec.load(IdentityRecord, found.value).revoked

    async def _record(self, certificate_pem: bytes, *, is_fresh: bool = False) -> None:
        """Records a certificate. One that an older version issued is known only by its file. A revoked identity becomes
        valid again only with a fresh certificate."""
        identity, wall = identity_of_pem(certificate_pem), self._clock.wall()
        while True:
            found = await self._store.read(self._key)
            known = None if found is None else codec.load(IdentityRecord, found.value)
            if known is not None and not is_fresh:
                if known.revoked or any(each.serial == identity.serial for each in known.certificates(wall)):
                    return
            elif not is_fresh and identity.not_after <= wall:
                return
            issued = IssuedCertificate(
                certificate_pem, identity.serial, identity.not_after, self._authority.fingerprint
            )
            after = certificates.with_issued_certificate(known, identity.uri, issued, "", wall, made_by="")
            revision = found.revision if found is not None else 0
            try:
                await self._store.commit(Transaction({self._key: codec.dump(after)}, expect={self._key: revision}))
                return
            except StaleRevision:
                continue
