"""What a node keeps of its enrolment in a region: `identity/` in the state directory."""

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.types.codes import Code, refuse
from shoal.wire.member_files import recover_write

MEMBER: Final = "member.json"
"""File with the `NodeEnrolment`."""
EXPELLED: Final = "expelled"
"""A file of this name records that the region revoked this identity: the machine may join again."""


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


def load(state_dir: Path) -> NodeEnrolment:
    """Raises ShoalError(UNAUTHENTICATED | STATE_CORRUPT)."""
    path = state_dir / "identity" / MEMBER
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
