"""Getting a certificate: joining and renewal. For `shoal-agent join` and the program of the identity: it imports the
cryptography library, and gRPC."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shoal.agent.core import renewal
from shoal.agent.identity.enrolment import EXPELLED, MEMBER, NodeEnrolment, host_name
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall, show_seconds
from shoal.wire import enrol
from shoal.wire.certificates import identity_of_pem
from shoal.wire.member_files import Enrolled, recover_write


def join(
    state_dir: Path, coordinator: str, token: str, *, name: str, labels: Mapping[str, str], wall: Wall
) -> NodeEnrolment:
    """Redeem a token and store key, certificate and CA in `state_dir`. Models cached there stay.

    An empty `name` means the token's, or the host's name if the token leaves it open.

    Raises ShoalError(CONFLICT) if this directory holds a certificate that is valid and not revoked, and what redeeming
    raises.
    """
    folder = state_dir / "identity"
    recover_write(folder)
    good = (folder / "cert.pem").exists() and identity_of_pem((folder / "cert.pem").read_bytes()).not_after > wall
    if good and not (folder / EXPELLED).exists():
        raise refuse(
            Code.CONFLICT, f"{state_dir} has joined already", "an empty state directory", "choose another --state-dir"
        )
    enrolled = _redeem(coordinator, token, name)
    if enrolled.role not in (Role.AGENT, Role.GATEWAY):
        raise refuse(
            Code.ROLE_DENIED, f"a token for role {enrolled.role}", "agent or gateway", "make one: shoal token create"
        )
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    member = NodeEnrolment(
        enrolled.name,
        enrolled.region,
        enrolled.role,
        enrolled.link_address,
        dict(labels),
        enrolled.enrol_address,
        enrolled.mqtt_address,
    )
    folder.mkdir(exist_ok=True, mode=0o700)
    write_private(folder / MEMBER, json.dumps(asdict(member), indent=1).encode())
    enrolled.write(folder)  # the certificate is written last: with it the node has joined
    (folder / EXPELLED).unlink(missing_ok=True)
    return member


def _redeem(coordinator: str, token: str, name: str) -> Enrolled:
    try:
        return enrol.redeem(coordinator, token, name)
    except ShoalError as error:
        # A token without a name was not used up by this attempt.
        if name or error.code is not Code.NAME_INVALID:
            raise
        return enrol.redeem(coordinator, token, host_name())


def renew(folder: Path, addresses: str, *, held_ends: Wall, wall: Wall) -> None:
    """Replace key and certificate in `folder`.

    Raises ShoalError(CLOCK_SKEW | DISK_FULL), and what `wire.enrol.renew` raises.
    """
    enrolled = enrol.renew(addresses, folder)
    offered = identity_of_pem(enrolled.certificate_pem)
    if renewal.is_offer_expired(offered.not_after, held_ends, wall):
        found = f"a certificate that ended {show_seconds(Seconds(wall - offered.not_after))} ago"
        raise refuse(Code.CLOCK_SKEW, found, "one that is valid", "set the coordinator's clock; ours is kept")
    try:
        enrolled.write(folder)
    except OSError as cause:
        raise refuse(Code.DISK_FULL, f"identity/: {cause.strerror}", "room for it", "free some space") from cause
