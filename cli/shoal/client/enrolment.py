"""Files of those who call from outside: operators, viewers, the clients of a tenant. An operator gets them made."""

from pathlib import Path
from typing import Final

from shoal.client.region import Region
from shoal.client.renewal import is_due
from shoal.wire.enrol import redeem
from shoal.wire.identity import identity_of_pem
from shoal.wire.private import write_private

TOKEN_S: Final = 300.0
"""A join token that is redeemed at once is good for so long."""
BEARER_S: Final = 30 * 86400.0


def enrol(api: Region, door: str, role: str, name: str, folder: Path) -> bool:
    """Has `cert.pem`, `key.pem` and `ca.pem` of this client in `folder`; whether they had to be made: none, or
    somebody else's, or of another CA, or their end is near.

    api: as an operator. door: host:port where tokens are redeemed. Raises ShoalError."""
    certificate = folder / "cert.pem"
    if certificate.exists():
        identity = identity_of_pem(certificate.read_bytes())
        is_its = (identity.role, identity.name) == (role, name)
        is_ours = (folder / "ca.pem").read_bytes() == api.context.ca.read_bytes()
        if is_its and is_ours and not is_due(certificate):
            return False
    redeem(door, api.create_token(role, name, TOKEN_S).token, name).write(folder)
    return True


def client_files(api: Region, door: str, folder: Path, tenant: str = "default") -> None:
    """Of a client of that tenant: its certificate, and a bearer token in `bearer`. Raises ShoalError."""
    bearer = folder / "bearer"
    if enrol(api, door, "tenant", tenant, folder) or not bearer.exists():
        write_private(bearer, api.create_token("bearer", tenant, BEARER_S).token.encode())
