"""The files of a member of a region: key, certificate and CAs, replaced together."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shoal.host.private_files import write_private
from shoal.types.device import Role

_NAMES: Final = ("key.pem", "ca.pem", "cert.pem")
_PENDING: Final = "pending.json"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Result of a redemption or a renewal."""

    # Region that issued the certificate.
    region: str
    # Role in the certificate.
    role: Role
    # Name in the certificate.
    name: str
    # Issued certificate (PEM). Certificates after the first are for servers to show.
    certificate_pem: bytes
    # The region's CA certificate.
    ca_pem: bytes
    # host:port of the agent link.
    link_address: str
    # host:port of the operator API.
    api_address: str
    # Unencrypted PKCS#8. It is made here and never sent.
    key_pem: bytes = field(repr=False)
    # host:port of the enrolment server, for renewals.
    enrol_address: str = ""
    # host:port of the region's MQTT broker; empty without one.
    mqtt_address: str = ""

    def write(self, folder: Path) -> None:
        """Writes `cert.pem`, `key.pem` and `ca.pem` to `folder` (0700), each with mode 0600.

        After an interruption either all files are written or none: the contents are on disk first, and `recover_write`
        finishes from them. A concurrent reader may see a key beside another key's certificate, and reads again then.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        contents = dict(zip(_NAMES, (self.key_pem, self.ca_pem, self.certificate_pem), strict=True))
        write_private(folder / _PENDING, json.dumps({name: pem.decode() for name, pem in contents.items()}).encode())
        recover_write(folder)


def recover_write(folder: Path) -> None:
    """Finishes an interrupted `Enrolled.write`; does nothing where there is none. Raises OSError."""
    pending = folder / _PENDING
    try:
        contents: dict[str, str] = json.loads(pending.read_text())
    except FileNotFoundError:
        return
    for name in _NAMES:
        write_private(folder / name, contents[name].encode())
    pending.unlink(missing_ok=True)
