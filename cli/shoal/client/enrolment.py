"""Credential files for callers from outside: operators, viewers, tenants' clients. An operator creates them."""

from pathlib import Path
from typing import Final

from shoal.client.region import RegionClient
from shoal.client.renewal import is_due
from shoal.host.private_files import write_private
from shoal.wire.certificates import identity_of_pem
from shoal.wire.enrol import redeem

TOKEN_S: Final = 300.0
"""Seconds for which a join token that is redeemed at once is valid."""
BEARER_S: Final = 30 * 86400.0


def enrol(api: RegionClient, enrol_address: str, role: str, name: str, folder: Path) -> bool:
    """Put this client's `cert.pem`, `key.pem` and `ca.pem` into `folder`; return whether they had to be made.

    They are made if they are missing, another identity's, of another CA, or about to expire. api: as an operator.
    enrol_address: host:port where tokens are redeemed. Raises ShoalError.
    """
    certificate = folder / "cert.pem"
    if certificate.exists():
        identity = identity_of_pem(certificate.read_bytes())
        is_its = (identity.role, identity.name) == (role, name)
        is_ours = (folder / "ca.pem").read_bytes() == api.context.ca.read_bytes()
        if is_its and is_ours and not is_due(certificate):
            return False
    redeem(enrol_address, api.create_token(role, name, TOKEN_S).token, name).write(folder)
    return True


def client_files(api: RegionClient, enrol_address: str, folder: Path, tenant: str = "default") -> None:
    """Files of a client of that tenant: its certificate, and a bearer token in `bearer`. Raises ShoalError."""
    bearer = folder / "bearer"
    if enrol(api, enrol_address, "tenant", tenant, folder) or not bearer.exists():
        write_private(bearer, api.create_token("bearer", tenant, BEARER_S).token.encode())
