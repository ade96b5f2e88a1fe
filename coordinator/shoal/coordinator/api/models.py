"""Model bytes by digest over HTTPS, for agents on the MQTT link: a broker carries messages, not models.

`PUT /v1/recordings/ASSIGNMENT/sha256:MODEL/sha256:PACK` is Artifacts.Record: 204.

`GET /v1/models/sha256:HEX` needs a client certificate of the region; `Range: bytes=N-` resumes. The rules are those of
Artifacts.Fetch, checked at each request. A refusal's body is JSON: code, found, asked, remedy.
"""

import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Final
from urllib.parse import unquote

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.api.artifacts import may_fetch, receive_recording
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import FETCH, RECORD
from shoal.coordinator.controllers.documents.models import unknown_model
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import Meter
from shoal.host.http_server import HttpExchange, HttpLimits, HttpServer
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Bytes
from shoal.wire.certificates import identity_of_der
from shoal.wire.handshake import PemFiles
from shoal.wire.limits import LINK_CONNECTIONS
from shoal.wire.status import http_status

LIMITS: Final = HttpLimits(
    connections=LINK_CONNECTIONS,
    connections_per_address=LINK_CONNECTIONS,
    handshake_s=10.0,
    head_s=10.0,
    stall_s=30.0,
    linger_s=10.0,
)
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-")

log: Final = structlog.get_logger("shoal.coordinator.models")


class ModelServer:
    """admit: checks a caller (dates, region, role, revocation) at each request, as for this gRPC method; raises
    ShoalError."""

    def __init__(
        self,
        region: RegionalCoordinator,
        files: PemFiles,
        admit: Callable[[str, Identity], None],
        audit: AuditTrail,
        meter: Meter,
    ) -> None:
        self._region = region
        self._files = files
        self._admit = admit
        self._audit = audit
        self._meter = meter
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._server = HttpServer(self._serve, LIMITS, lambda: self._context)

    def refresh(self) -> None:
        """Reloads certificate and CAs from their files, for new connections."""
        self._context.load_cert_chain(self._files.certificate, self._files.key)
        self._context.load_verify_locations(self._files.ca)

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. Raises OSError."""
        self.refresh()
        return await self._server.start(host, port)

    async def stop(self) -> None:
        await self._server.stop()

    async def _serve(self, exchange: HttpExchange) -> None:
        path = [unquote(part) for part in exchange.target.partition("?")[0].split("/")[1:]]
        match exchange.method, path:
            case "GET", ["v1", "models", digest]:
                await self._call(exchange, FETCH, lambda caller: self._answer(exchange, caller, digest))
            case "PUT", ["v1", "recordings", assignment, model, digest]:
                named = assignment, model, digest
                await self._call(exchange, RECORD, lambda caller: self._record(exchange, caller, *named))
            case _:
                await exchange.respond(404, {})

    async def _call(
        self, exchange: HttpExchange, method: str, behaviour: Callable[[Identity], Awaitable[None]]
    ) -> None:
        try:
            await behaviour(self._caller(method, exchange))
        except ShoalError as error:
            self._meter.count(metrics.CALLS_REFUSED, method=method.rsplit("/", 1)[-1], code=error.code)
            body = json.dumps(asdict(error.refusal)).encode()
            await exchange.respond(http_status(error.code), {"content-type": "application/json"}, body)

    def _caller(self, method: str, exchange: HttpExchange) -> Identity:
        if exchange.certificate is None:
            raise refuse(Code.UNAUTHENTICATED, "no client certificate", "one of this region", "enrol this node")
        identity = identity_of_der(exchange.certificate)
        self._admit(method, identity)
        return identity

    async def _answer(self, exchange: HttpExchange, identity: Identity, digest: str) -> None:
        if not may_fetch(self._region, identity, digest):
            raise ShoalError(unknown_model(digest))
        offset = _offset(exchange.headers.get("range", ""))
        size, chunks = await self._region.models.fetch(digest, offset)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(size - offset),
            "accept-ranges": "bytes",
            "etag": f'"{digest}"',
        }
        if offset:
            headers["content-range"] = f"bytes {offset}-{size - 1}/{size}"
        try:
            exchange.begin(206 if offset else 200, headers)
            async for data in self._region.workloads.fetches.track(identity.name, digest, chunks):
                await exchange.write(data)
        except (TimeoutError, ConnectionError) as error:
            log.info("model_fetch_aborted", identity=identity.uri, digest=digest, error=type(error).__name__)
            raise

    async def _record(
        self, exchange: HttpExchange, identity: Identity, assignment: str, model: str, digest: str
    ) -> None:
        size = Bytes(int(exchange.headers.get("content-length", "0")))
        await receive_recording(self._region, self._audit, identity, assignment, model, size, digest, _body(exchange))
        await exchange.respond(204, {})


async def _body(exchange: HttpExchange) -> AsyncIterator[bytes]:
    try:
        async for chunk in exchange.body():
            yield chunk
    except (TimeoutError, ConnectionError) as cause:
        raise refuse(Code.CANCELLED, "the rest of it did not come", "all its bytes", "send it again") from cause


def _offset(header: str) -> int:
    if not header:
        return 0
    match = _RANGE.fullmatch(header)
    if match is None:
        raise refuse(Code.INVALID_ARGUMENT, f"Range {header!r:.60}", "bytes=N-", "ask for all that is left")
    return int(match[1])
