"""Enrolment of a node in a region, and what the node keeps of it: `identity/` in the state directory."""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.agent.identity.membership import EXPELLED
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.enrol import Enrolled, recover_write, redeem
from shoal.wire.identity import identity_of_pem

_MEMBER = "member.json"


@dataclass(frozen=True, slots=True)
class NodeEnrolment:
    """Result of the enrolment, as stored in `member.json`."""

    # Name of the node in its region.
    name: str
    # Name of the region.
    region: str
    # A value of Role: agent or gateway.
    role: str
    # host:port of the coordinator's link.
    coordinator: str
    # Labels given at joining.
    labels: Mapping[str, str]
    # host:port of the enrolment server, which renews certificates.
    enrol: str = ""
    # host:port of the region's MQTT broker. Empty: the region has none.
    mqtt: str = ""


def is_member(state_dir: Path) -> bool:
    """Whether this directory holds a certificate, expired or not, that no region has revoked."""
    folder = state_dir / "identity"
    recover_write(folder)
    return (folder / "cert.pem").exists() and not (folder / EXPELLED).exists()


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
    write_private(folder / _MEMBER, json.dumps(asdict(member), indent=1).encode())
    enrolled.write(folder)  # the certificate is written last: with it the node has joined
    (folder / EXPELLED).unlink(missing_ok=True)
    return member


def _redeem(coordinator: str, token: str, name: str) -> Enrolled:
    try:
        return redeem(coordinator, token, name)
    except ShoalError as error:
        # A token without a name was not used up by this attempt.
        if name or error.code is not Code.NAME_INVALID:
            raise
        return redeem(coordinator, token, host_name())


def load(state_dir: Path) -> NodeEnrolment:
    """Raises ShoalError(UNAUTHENTICATED | STATE_CORRUPT)."""
    path = state_dir / "identity" / _MEMBER
    recover_write(path.parent)
    try:
        return NodeEnrolment(**json.loads(path.read_text()))
    except FileNotFoundError as cause:
        raise refuse(
            Code.UNAUTHENTICATED, f"{state_dir} has not joined", "an enrolled node", "run shoal-agent join"
        ) from cause
    except (ValueError, TypeError) as cause:
        raise refuse(Code.STATE_CORRUPT, f"{path.name} is unreadable", "what join wrote", "join again") from cause


@contextmanager
def lock_state_dir(state_dir: Path) -> Iterator[None]:
    """Allow one supervisor per state directory. Raises ShoalError(CONFLICT)."""
    folder = state_dir / "run"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as cause:
        os.close(descriptor)
        raise refuse(
            Code.CONFLICT, f"an agent runs in {state_dir}", "one agent a state directory", "stop it, or choose another"
        ) from cause
    try:
        yield
    finally:
        os.close(descriptor)


def host_name() -> str:
    """This host's name as a node name: lower case, one DNS label."""
    label = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return label[:63].rstrip("-") or "node"
