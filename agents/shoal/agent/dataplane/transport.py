"""The one interface between what carries the Open Inference Protocol and what answers it.

A transport (gRPC, REST) listens, finds out who calls and by when, and gives each call to the `Service`; what the
service raises becomes the protocol's status. Neither knows the other's insides, and `tests/contract/dataplane` holds
every transport to this module.
"""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Refusal, ShoalError
from shoal.types.units import Seconds
from shoal.wire.enrol import belong
from shoal.wire.identity import Identity
from shoal.wire.limits import INFER_BYTES

MAX_MESSAGE = INFER_BYTES + 2**20
"""Largest message taken from the network: the cap on tensors and room for what describes them."""

TENANT_KEY = "shoal-tenant"
ORIGIN_KEY = "shoal-origin"
HOP_KEY = "shoal-hop"
REQUEST_KEY = "shoal-request-id"
AGREEMENT_KEY = "shoal-agreement"
STEP_KEY = "shoal-step"
TRACE_KEY = "traceparent"


@dataclass(frozen=True, slots=True)
class Call:
    """What a transport knows of one call.

    identity: of a client certificate that an authority of the very region in its name issued. bearer: the token as
    sent, "" without one. tenant, origin, hop, request_id, agreement, step, trace (a W3C `traceparent`): as the caller
    claims them; who may claim what is for the service to judge. left_s: until the caller's deadline, None without one.
    """

    identity: Identity | None = None
    bearer: str = ""
    tenant: str = ""
    origin: str = ""
    hop: int = 0
    request_id: str = ""
    left_s: Seconds | None = None
    agreement: str = ""
    step: str = ""
    trace: str = ""

    @property
    def caller(self) -> str:
        """Whose share of a transport this call counts in, once the service has admitted it."""
        return self.identity.uri if self.identity is not None else self.bearer


class Refused(ShoalError):
    """A refusal that says when to come back."""

    def __init__(self, refusal: Refusal, retry_after_s: Seconds | None = None) -> None:
        super().__init__(refusal)
        self.retry_after_s = retry_after_s


def retry_after_s(error: ShoalError) -> Seconds | None:
    return error.retry_after_s if isinstance(error, Refused) else None


class Service(Protocol):
    """What answers. Every method but `live` checks the caller and raises ShoalError (or Refused) otherwise."""

    def live(self) -> bool: ...

    def admit(self, call: Call) -> None:
        """Returns if this caller may send an inference request: asked before its body is read."""
        ...

    def server_ready(self, call: Call) -> bool: ...

    def server_metadata(self, call: Call) -> oip.ServerMetadataResponse: ...

    def index(self, call: Call, *, ready_only: bool) -> oip.RepositoryIndexResponse: ...

    def model_ready(self, call: Call, name: str, version: str) -> bool: ...

    async def model_metadata(self, call: Call, name: str, version: str) -> oip.ModelMetadataResponse: ...

    async def infer(self, call: Call, request: bytes) -> bytes:
        """A serialized ModelInferRequest to a serialized ModelInferResponse. Cancelled when the caller is gone."""
        ...


class Transport(Protocol):
    async def start(self) -> int:
        """Listens; returns the port. Raises OSError."""
        ...

    async def stop(self, grace_s: Seconds) -> None:
        """Takes nothing new and returns when the calls inside have ended, or after `grace_s`."""
        ...

    async def leave(self, grace_s: Seconds) -> None:
        """As `stop`, of a process that ends right after: nobody's call is cancelled by it."""
        ...


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of this node: its certificate (with chain), its key, and the region's authority.

    They are read again when they change, for connections made from then on."""

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority). Raises OSError, also while they are half replaced."""
        certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        try:
            whole = belong(certificate, key)
        except ValueError as cause:
            raise OSError(errno.EAGAIN, f"{self.certificate.name} or {self.key.name} is unreadable") from cause
        if not whole:
            raise OSError(errno.EAGAIN, f"{self.key.name} is not the key of {self.certificate.name}")
        return certificate, key, self.authority.read_bytes()

    def stamp(self) -> tuple[int, ...]:
        """Changes when any of the files does. Raises OSError."""
        return tuple(p.stat().st_mtime_ns for p in (self.certificate, self.key, self.authority))
