"""The broker's folder, made by `broker-config`, while coordinator and broker share a machine.

The coordinator writes the broker's certificate and whom it trusts, and has Mosquitto read them again, which it does on
SIGHUP without losing a connection; and the rights that the broker starts with where it has lost its own.
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
from shoal.types.codes import ShoalError
from shoal.types.units import Wall
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import dns_of, identity_of_pem
from shoal.wire.private import write_private

PID: Final = "pid"
"""In the folder: `start` becomes the broker under this number."""

log: Final = structlog.get_logger("shoal.coordinator.broker")


class BrokerFolder:
    """enrol: a new key and certificate of the broker for these hosts, and all that is trusted now."""

    def __init__(self, folder: Path, enrol: Callable[[tuple[str, ...]], Enrolled]) -> None:
        self._folder = folder
        self._enrol = enrol

    def keep(self, region: str, nodes: Set[str]) -> None:
        """These nodes are admitted. To be told of each anew, a broker of a thousand would serve nobody for long."""
        try:
            write_private(self._folder / "rights.json", json.dumps(rights.document(region, sorted(nodes))).encode())
            self._hand_over("rights.json")
        except OSError as error:
            log.error("the broker's rights are not kept", folder=str(self._folder), found=str(error))

    def refresh(self, ca_pem: bytes, wall: Wall) -> None:
        """Makes the certificate anew when its time nears its end, or when other CAs are trusted than the broker knows.

        Where that fails it is told, and tried again by the next call.
        """
        try:
            current = (self._folder / "cert.pem").read_bytes()
            is_good = identity_of_pem(current).not_after - wall > LIFETIME_S / 3
            if is_good and (self._folder / "ca.pem").read_bytes() == ca_pem:
                return
            self._enrol(_hosts(current)).write(self._folder)
            self._hand_over("cert.pem", "key.pem", "ca.pem")
            self._reload()
        except (OSError, ValueError, ShoalError) as error:
            log.error("the broker does not follow", folder=str(self._folder), found=str(error))

    def _hand_over(self, *names: str) -> None:
        """To whom the broker runs as. Raises OSError."""
        if os.getuid() == 0:
            owner = self._folder.stat()
            for name in names:
                shutil.chown(self._folder / name, owner.st_uid, owner.st_gid)

    def _reload(self) -> None:
        """Raises OSError, ValueError. A broker that does not run reads everything when it starts."""
        path = self._folder / PID
        pid = int(path.read_text()) if path.exists() else 0
        if pid and _program(pid) == "mosquitto":
            os.kill(pid, signal.SIGHUP)
        log.info("the broker has a new certificate", folder=str(self._folder), pid=pid)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


def _hosts(certificate_pem: bytes) -> tuple[str, ...]:
    """All that it is good for, but for its own name, which is in every one."""
    certificate, identity = x509.load_pem_x509_certificate(certificate_pem), identity_of_pem(certificate_pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = names.get_values_for_type(x509.IPAddress)
    own = dns_of(identity.region, identity.role, identity.name)
    return (*(name for name in names.get_values_for_type(x509.DNSName) if name != own), *map(str, addresses))
