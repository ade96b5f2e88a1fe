"""Who belongs to whom, once coordinators serve: clients with their files, regions in their federation. For processes on
this machine and for containers alike."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shoal.client import Region, is_due
from shoal.devstack import layout
from shoal.types.codes import Code, refuse
from shoal.v1.operator_pb2 import Document, FederationView
from shoal.wire.enrol import redeem
from shoal.wire.private import write_private

Say = Callable[[str], None]
TOKEN_S: Final = 300.0
"""A join token that is redeemed at once is good for so long."""
BEARER_S: Final = 30 * 86400.0
ACQUAINTED_WITHIN_S: Final = 60.0


def enrol(api: Region, door: str, role: str, name: str, folder: Path) -> bool:
    """Has `cert.pem`, `key.pem` and `ca.pem` of this client in `folder`; whether they had to be made: none, or
    others of another CA, or their end is near.

    api: as an operator. door: host:port where tokens are redeemed. Raises ShoalError."""
    certificate = folder / "cert.pem"
    is_ours = certificate.exists() and (folder / "ca.pem").read_bytes() == api.context.ca.read_bytes()
    if is_ours and not is_due(certificate):
        return False
    redeem(door, api.create_token(role, name, TOKEN_S).token, name).write(folder)
    return True


def client_files(api: Region, door: str, folder: Path) -> None:
    """Of the default tenant: its certificate, and a bearer token in `bearer`. Raises ShoalError."""
    bearer = folder / "bearer"
    if enrol(api, door, "tenant", layout.TENANT, folder) or not bearer.exists():
        write_private(bearer, api.create_token("bearer", layout.TENANT, BEARER_S).token.encode())


def federate(federation: Region, doors: str, apis: Mapping[str, Region], say: Say) -> None:
    """Every region a member that works for all the others; one that is, from an earlier start, stays as it is. Returns
    when each knows all of them. federation, apis (by region): as operators. Raises ShoalError."""
    for name, api in apis.items():
        if api.federation() is None:
            say(f"{name} joins the federation")
            api.join_federation(doors, federation.create_token("region", name, TOKEN_S).token)
            api.apply([Document(name=f"{name}.yaml", text=layout.TRADING.format(region=name))])

    def acquainted() -> bool:
        views = [api.federation() for api in apis.values()]
        return all(view is not None and _knows(view, len(apis)) for view in views)

    wait(acquainted, ACQUAINTED_WITHIN_S, "every region to know the others")


def _knows(view: FederationView, count: int) -> bool:
    """Whether a region lists so many, and what they have free."""
    return len(view.members) == count and all(member.advertises for member in view.members)


def wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Raises ShoalError(DEADLINE_EXCEEDED)."""
    end = time.monotonic() + limit_s  # noqa: TID251 - a command's own deadline
    while not condition():
        if time.monotonic() > end:  # noqa: TID251
            remedy = "read the logs: `shoal dev status -o json` names them, `docker compose logs` shows them"
            raise refuse(Code.DEADLINE_EXCEEDED, f"not within {limit_s:g}s", what, remedy)
        time.sleep(0.1)  # noqa: TID251
