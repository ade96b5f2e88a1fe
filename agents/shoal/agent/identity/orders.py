"""What the program of the identity is told to do, and what it answers (`program.py`)."""

from dataclasses import dataclass

from shoal.types.codes import Refusal
from shoal.types.signature import PublisherKey, VerifiedSignature
from shoal.types.units import Wall


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """Redeem a join token, and write the identity's files."""

    # The agent's folder.
    state_dir: str
    # host:port of enrolment servers, separated by commas.
    addresses: str
    # Secret, therefore not an argument of the program.
    token: str
    # Empty: the token's name, or else the host's.
    name: str
    # The time of this node.
    wall: Wall


@dataclass(frozen=True, slots=True)
class RenewOrder:
    """Replace the certificate in `folder` by a new one for a new key."""

    # host:port of enrolment servers, separated by commas.
    addresses: str
    # The identity's folder.
    folder: str
    # When the certificate ends that is replaced.
    held_ends: Wall
    # The time of this node.
    wall: Wall


@dataclass(frozen=True, slots=True)
class SignOrder:
    """Sign contents with the node's key."""

    # The key (PEM).
    key: str
    # Region in whose name it signs.
    region: str
    # Node in whose name it signs.
    node: str
    # What the contents are: a signature for one use is none for another.
    topic: str
    # Each gets a signature of its own.
    contents: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class VerifyOrder:
    """Verify a publisher's signature of a model."""

    # OpenSSF model signature (JSON).
    bundle: bytes
    # Keys, one of which must have made it.
    keys: tuple[PublisherKey, ...]
    # Digest of the model that it must be of.
    digest: str


@dataclass(frozen=True, slots=True)
class ForwardKeyOrder:
    """Make the key with which this node's front signs forwarded requests, if the file is missing."""

    # File of the private key; the public one is written beside it.
    path: str


Order = JoinOrder | RenewOrder | SignOrder | VerifyOrder | ForwardKeyOrder


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program did, or why it refused."""

    # Signature of each of the contents (`SignOrder`).
    signatures: tuple[bytes, ...] = ()
    # What the publisher signed (`VerifyOrder`).
    verified: VerifiedSignature | None = None
    # Why nothing was done; None: it was.
    refusal: Refusal | None = None
