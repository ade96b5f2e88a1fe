"""Maintains the broker's folder, made by `broker-config`, while coordinator and broker share a machine.

The coordinator writes the broker's certificate and trusted CAs, and makes Mosquitto reload them by SIGHUP, which loses
no connection. It also writes the rights that the broker starts with if it lost its own.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Set
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from shoal.coordinator.broker import rights
from shoal.coordinator.broker.config import LIFETIME_S
from shoal.host.private_files import write_private
from shoal.types.codes import ShoalError
from shoal.types.units import Wall
from shoal.wire.certificates import identity_of_pem
from shoal.wire.identity import dns_of
from shoal.wire.member_files import Enrolled

PID: Final = "pid"
"""File in the folder with the broker's process id: `start` becomes the broker under this number."""

log: Final = structlog.get_logger("shoal.coordinator.broker")


class BrokerFolder:
    """enrol: makes a new key and certificate of the broker for these hosts, with all currently trusted CAs."""

    def __init__(self, folder: Path, enrol: Callable[[tuple[str, ...]], Enrolled]) -> None:
        self._folder = folder
        self._enrol = enrol

    def save_rights(self, region: str, nodes: Set[str]) -> None:
        """Saves these nodes as admitted. Without it, a restarted broker with a thousand nodes would serve nobody for
        long, because each is admitted by a command."""
        try:
            write_private(self._folder / "rights.json", json.dumps(rights.document(region, sorted(nodes))).encode())
            self._chown("rights.json")
        except OSError as error:
            log.error("broker_rights_write_failed", folder=str(self._folder), error=str(error))

    def refresh(self, ca_pem: bytes, wall: Wall) -> None:
        """Renews the certificate when it nears its end, or when the trusted CAs have changed.

        A failure is logged, and the next call tries again.
        """
        try:
            current = (self._folder / "cert.pem").read_bytes()
            is_good = identity_of_pem(current).not_after - wall > LIFETIME_S / 3
            if is_good and (self._folder / "ca.pem").read_bytes() == ca_pem:
                return
            self._enrol(_hosts(current)).write(self._folder)
            self._chown("cert.pem", "key.pem", "ca.pem")
            self._reload()
        except (OSError, ValueError, ShoalError) as error:
            log.error("broker_certificate_renewal_failed", folder=str(self._folder), error=str(error))

    def _chown(self, *names: str) -> None:
        """Gives the files to the user that the broker runs as. Raises OSError."""
        if os.getuid() == 0:
            owner = self._folder.stat()
            for name in names:
                shutil.chown(self._folder / name, owner.st_uid, owner.st_gid)

    def _reload(self) -> None:
        """Raises OSError, ValueError. Does nothing if the broker does not run, since it reads everything when it
        starts."""
        path = self._folder / PID
        pid = int(path.read_text()) if path.exists() else 0
        if pid and _program(pid) == "mosquitto":
            os.kill(pid, signal.SIGHUP)
        log.info("broker_certificate_renewed", folder=str(self._folder), pid=pid)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def _hosts(certificate_pem: bytes) -> tuple[str, ...]:
    """All names of the certificate except the broker's own, which every one has."""
    certificate, identity = x509.load_pem_x509_certificate(certificate_pem), identity_of_pem(certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = names.get_values_for_type(x509.IPAddress)
    own = dns_of(identity.region, identity.role, identity.name)
    return (*(name for name in names.get_values_for_type(x509.DNSName) if name != own), *map(str, addresses))
