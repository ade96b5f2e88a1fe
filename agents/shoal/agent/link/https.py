"""Model bytes from the coordinator over HTTPS, and recordings to it, for nodes whose link is MQTT. Blocking, in
threads."""

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from typing import Final

from shoal.agent.link.credentials import CredentialFiles, coordinator_name
from shoal.agent.ports import AgentClock
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire.handshake import check_own, raise_fault
from shoal.wire.limits import CHUNK_BYTES

STALL_S: Final = 10.0
"""A server that sends nothing for this many seconds is considered gone; the fetch resumes."""
MAX_REFUSAL_BYTES: Final = 64 * 2**10


class HttpsModels:
    """`address` returns host:port of the coordinator's model server. Empty if unknown."""

    def __init__(self, files: CredentialFiles, address: Callable[[], str], clock: AgentClock) -> None:
        self._files = files
        self._clock = clock
        self._address = address

    async def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Raises ShoalError(FETCH_FAILED | MODEL_UNKNOWN | CERT_* | ...)."""
        address, connection = await self._open_connection()
        try:
            response = await asyncio.to_thread(_get_model, connection, digest, offset)
            while chunk := await asyncio.to_thread(response.read, CHUNK_BYTES):
                yield chunk
        except (OSError, http.client.HTTPException) as cause:
            raise _transfer_error(address, cause) from cause
        finally:
            connection.close()

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        """Raises ShoalError."""
        address, connection = await self._open_connection()
        try:
            await asyncio.to_thread(_put, connection, f"/v1/recordings/{assignment}/{model}/{digest}", content)
        except (OSError, http.client.HTTPException) as cause:
            raise _transfer_error(address, cause) from cause
        finally:
            connection.close()

    async def _open_connection(self) -> tuple[str, http.client.HTTPConnection]:
        address = self._address()
        if not address:
            raise refuse(Code.FETCH_FAILED, "no session has said where models are", "a session", "it is tried again")
        try:
            return address, await asyncio.to_thread(self._connect, address)
        except (OSError, ValueError) as cause:
            raise _transfer_error(address, cause) from cause

    def _connect(self, address: str) -> http.client.HTTPConnection:
        """Raises ShoalError(CERT_*), OSError."""
        check_own(self._files, self._clock.wall())
        server = HostPort.parse(address)
        context = ssl.create_default_context(cafile=str(self._files.ca))
        context.load_cert_chain(self._files.certificate, self._files.key)
        plain = socket.create_connection((server.host, server.port), timeout=STALL_S)
        try:
            secured = context.wrap_socket(plain, server_hostname=coordinator_name(self._files.identity().region))
        except ssl.SSLError as cause:
            plain.close()
            raise_fault(cause, address)
            raise
        except OSError:
            plain.close()
            raise
        connection = http.client.HTTPConnection(server.host, server.port, timeout=STALL_S)
        connection.sock = secured
        return connection


def _get_model(connection: http.client.HTTPConnection, digest: str, offset: int) -> http.client.HTTPResponse:
    """The response whose body is the model from `offset` on. Raises ShoalError, OSError, HTTPException."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    connection.request("GET", f"/v1/models/{digest}", headers=headers)
    response = connection.getresponse()
    if response.status != (206 if offset else 200):
        refusal = _refusal(response.status, response.read(MAX_REFUSAL_BYTES))
        if refusal.code not in (Code.MODEL_UNKNOWN, Code.MODEL_DIGEST, Code.ROLE_DENIED):
            refusal = Refusal(Code.FETCH_FAILED, str(refusal), "the model's bytes", "it is resumed by itself")
        raise ShoalError(refusal)
    return response


def _put(connection: http.client.HTTPConnection, path: str, content: bytes) -> None:
    """Raises ShoalError, OSError, HTTPException."""
    connection.request("PUT", path, body=content)
    response = connection.getresponse()
    body = response.read(MAX_REFUSAL_BYTES)
    if response.status != http.client.NO_CONTENT:
        raise ShoalError(_refusal(response.status, body))


def _refusal(status: int, body: bytes) -> Refusal:
    try:
        told = json.loads(body)
        return Refusal(Code(told["code"]), str(told["found"]), str(told["asked"]), str(told["remedy"]))
    except (ValueError, KeyError, TypeError):
        return Refusal(Code.FETCH_FAILED, f"HTTP status {status}", "what was asked for", "it is tried again")


def _transfer_error(address: str, cause: Exception) -> ShoalError:
    return refuse(Code.FETCH_FAILED, f"{address}: {cause}", "the model's bytes", "it is resumed by itself")
