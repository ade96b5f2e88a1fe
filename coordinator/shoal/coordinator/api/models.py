"""Model bytes by digest over HTTPS, for agents on the MQTT link: a broker carries messages, not models.

`PUT /v1/recordings/ASSIGNMENT/sha256:MODEL/sha256:PACK` is Artifacts.Record: 204.

`GET /v1/models/sha256:HEX` needs a client certificate of the region; `Range: bytes=N-` resumes. The rules are those of
Artifacts.Fetch, checked at each request. A refusal's body is JSON: code, found, asked, remedy.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Final

import structlog
from aiohttp import web

from shoal.coordinator import metrics
from shoal.coordinator.api.artifacts import may_fetch, receive_recording
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import FETCH, RECORD
from shoal.coordinator.controllers.documents.models import unknown_model
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.ports import Meter
from shoal.host import file_descriptors
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.units import Bytes
from shoal.wire.handshake import PemFiles
from shoal.wire.identity import identity_of_der
from shoal.wire.status import http_status

HANDSHAKE_S: Final = 10.0
STALL_S: Final = 30.0
"""Seconds after which a reader that takes nothing is disconnected."""
_RANGE: Final = re.compile(r"bytes=(\d{1,18})-")

Behaviour = Callable[[web.Request, Identity], Awaitable[web.StreamResponse]]

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
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    def refresh(self) -> None:
        """Reloads certificate and CAs from their files, for new connections."""
        self._context.load_cert_chain(self._files.certificate, self._files.key)
        self._context.load_verify_locations(self._files.ca)

    async def start(self, host: str, port: int) -> int:
        """The port it listens on. Raises OSError."""
        self.refresh()
        app = web.Application(client_max_size=0)
        app.router.add_get("/v1/models/{digest}", partial(self._serve, FETCH, self._answer))
        app.router.add_put("/v1/recordings/{assignment}/{model}/{digest}", partial(self._serve, RECORD, self._record))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        assert self._runner.server is not None, "made by setup"
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            host,
            port,
            ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_S,
            backlog=file_descriptors.ACCEPTS_PER_TURN,
        )
        file_descriptors.set_backlog(self._server)
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, method: str, behaviour: Behaviour, request: web.Request) -> web.StreamResponse:
        try:
            return await behaviour(request, self._caller(method, request))
        except ShoalError as error:
            self._meter.count(metrics.CALLS_REFUSED, method=method.rsplit("/", 1)[-1], code=error.code)
            return web.json_response(asdict(error.refusal), status=http_status(error.code))

    def _caller(self, method: str, request: web.Request) -> Identity:
        channel = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        certificate = channel.getpeercert(binary_form=True) if channel is not None else None
        if certificate is None:
            raise refuse(Code.UNAUTHENTICATED, "no client certificate", "one of this region", "enrol this node")
        identity = identity_of_der(certificate)
        self._admit(method, identity)
        return identity

    async def _answer(self, request: web.Request, identity: Identity) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if not may_fetch(self._region, identity, digest):
            raise ShoalError(unknown_model(digest))
        offset = _offset(request.headers.get("Range", ""))
        size, chunks = await self._region.models.fetch(digest, offset)
        headers = {"Content-Length": str(size - offset), "Accept-Ranges": "bytes", "ETag": f'"{digest}"'}
        if offset:
            headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
        answer = web.StreamResponse(status=206 if offset else 200, headers=headers)
        answer.content_type = "application/octet-stream"
        try:
            await answer.prepare(request)
            async for data in self._region.workloads.fetches.track(identity.name, digest, chunks):
                async with asyncio.timeout(STALL_S):
                    await answer.write(data)
        except (TimeoutError, ConnectionError) as error:
            log.info("model_fetch_aborted", identity=identity.uri, digest=digest, error=type(error).__name__)
            if request.transport is not None:
                request.transport.abort()
        return answer

    async def _record(self, request: web.Request, identity: Identity) -> web.StreamResponse:
        named, size = request.match_info, Bytes(request.content_length or 0)
        await receive_recording(
            self._region, self._audit, identity, named["assignment"], named["model"], size, named["digest"],
            _body(request),
        )  # fmt: skip
        return web.Response(status=204)


async def _body(request: web.Request) -> AsyncIterator[bytes]:
    try:
        while True:
            async with asyncio.timeout(STALL_S):
                chunk = await request.content.readany()
            if not chunk:
                return
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
