"""One frame format for all talk over Unix sockets inside an agent: supervisor, front and workers.

A frame is a fixed head (magic, sort, sizes, call id), a JSON header of at most 64 KiB and a payload of bytes. A client
opens with the server's nonce; then calls run concurrently on one connection, each answered by a reply or a refusal,
and either side may end one early: the client by cancelling it, the server by closing. The server may push.

Kinds a worker answers: `load`, `status`, `infer`, `ping`, `probe`, `metadata`, `stop` (see `worker.main`). A front
uses the same classes for its own kinds.
"""

import asyncio
import hmac
import itertools
import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Self

import structlog

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire import descriptors
from shoal.wire.unix import reachable

_log = structlog.get_logger(__name__)

MAX_HEADER: Final = 64 * 2**10
MAX_PAYLOAD: Final = 96 * 2**20
"""Above the 64 MiB cap on one request's expanded tensors, so that the worker and not the transport refuses those."""
MAX_PENDING_CALLS: Final = 4096
MAX_PENDING_BYTES: Final = 512 * 2**20
HELLO_TIMEOUT_S: Final = 5.0

_MAGIC: Final = 0x5346
_HEAD: Final = struct.Struct("!HBxIIQ")
_CHUNK: Final = 2**20
_UCRED: Final = struct.Struct("iII")

Header = Mapping[str, Any]
Push = Callable[["Message"], None]


class _Sort(IntEnum):
    HELLO = 1
    WELCOME = 2
    CALL = 3
    REPLY = 4
    REFUSAL = 5
    CANCEL = 6
    PUSH = 7


@dataclass(frozen=True, slots=True)
class Message:
    """One call, reply or push: what it is, small facts (JSON values), and bytes."""

    kind: str
    header: Header = field(default_factory=dict)
    payload: bytes = b""


Handler = Callable[[Message], Awaitable[Message]]
"""Answers one call. A ShoalError it raises is answered as that refusal; it is cancelled when the caller is gone."""


class ConnectionLost(ShoalError):
    """The peer went away: whether a call in flight was carried out is unknown."""

    def __init__(self, why: str) -> None:
        super().__init__(
            Refusal(Code.REPLICA_UNREACHABLE, why, "an answer", "retry elsewhere: the process behind the socket ended")
        )


class FrameError(Exception):
    """The peer broke the frame format; the connection is closed."""


@dataclass(frozen=True, slots=True)
class _Frame:
    sort: _Sort
    call: int
    header: dict[str, Any]
    payload: bytes
    overlong: int = 0
    """Payload bytes that were declared, read and thrown away because they were over the limit."""


class FrameClient:
    """A connection to one server. Any number of calls at once; not for use from several event loops."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_push: Push | None) -> None:
        self._reader = reader
        self._writer = writer
        self._on_push = on_push
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._ids = itertools.count(1)
        self._lost: str | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        nonce: str,
        *,
        on_push: Push | None = None,
        timeout: float = HELLO_TIMEOUT_S,
        peer_pid: int | None = None,
    ) -> Self:
        """Raises ConnectionLost (nobody listens, or not the process `peer_pid`), ShoalError(UNAUTHENTICATED), or
        ShoalError(OVERLOADED) where this process may open nothing more."""
        sock = _unix_socket()
        try:
            async with asyncio.timeout(timeout):
                with reachable(Path(path)) as address:
                    await asyncio.get_running_loop().sock_connect(sock, address)
                pid, uid = _peer(sock)
                if uid != os.geteuid() or (peer_pid is not None and pid != peer_pid):
                    raise ConnectionLost(f"another process (pid {pid}, uid {uid}) holds {Path(path).name}")
                reader, writer = await asyncio.open_connection(sock=sock, limit=_CHUNK)
                _write(writer, _Sort.HELLO, 0, {"nonce": nonce})
                answer = await _read(reader, 0)
        except TimeoutError as error:
            sock.close()
            raise ConnectionLost(f"no answer to hello within {timeout:g}s on {Path(path).name}") from error
        except (OSError, EOFError, FrameError) as error:
            sock.close()
            if isinstance(error, OSError) and descriptors.are_short(error):
                raise ShoalError(descriptors.NONE_LEFT) from error
            raise ConnectionLost(f"{type(error).__name__} on {Path(path).name}: {error}") from error
        except BaseException:
            sock.close()
            raise
        if answer.sort is not _Sort.WELCOME:
            writer.close()
            raise ShoalError(_refusal(answer.header))
        client = cls(reader, writer, on_push)
        client._reading = asyncio.create_task(client._read_all(), name=f"frames {Path(path).name}")
        return client

    @property
    def closed(self) -> bool:
        return self._lost is not None

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    async def call(
        self,
        kind: str,
        payload: bytes | memoryview = b"",
        *,
        header: Header | None = None,
        timeout: float | None = None,
    ) -> Message:
        """The reply. Raises what the server refused with, DEADLINE_EXCEEDED after `timeout`, or ConnectionLost.

        A call that times out or whose caller is cancelled is cancelled at the server too.
        """
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        call = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            async with asyncio.timeout(timeout):
                _write(self._writer, _Sort.CALL, call, {**(header or {}), "kind": kind}, payload)
                await self._drain()
                return await future
        except TimeoutError as error:
            raise refuse(
                Code.DEADLINE_EXCEEDED, f"no answer to `{kind}`", f"within {timeout}s", "allow more time or retry"
            ) from error
        finally:
            if self._calls.pop(call, None) is not None and self._lost is None:
                _write(self._writer, _Sort.CANCEL, call, {})
            future.cancel()

    async def wait_closed(self) -> None:
        """Returns when the connection is over, whoever ended it."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def close(self) -> None:
        """Idempotent; calls in flight end with ConnectionLost."""
        self._end("closed by this side")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def abandon(self, refusal: Refusal) -> None:
        """The peer is there and answers nothing: calls in flight end with `refusal`, and the connection with them."""
        self._lost = str(refusal)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ShoalError(refusal))
        self._writer.transport.abort()

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            self._end(f"{type(error).__name__}: {error}")
            raise ConnectionLost(self._lost or "") from error

    async def _read_all(self) -> None:
        why = "the peer closed the connection"
        try:
            while True:
                frame = await _read(self._reader, MAX_PAYLOAD)
                if frame.overlong:
                    raise FrameError(f"payload of {frame.overlong} bytes")
                message = Message(str(frame.header.pop("kind", "")), frame.header, frame.payload)
                if frame.sort is _Sort.PUSH:
                    if self._on_push is not None:
                        self._on_push(message)
                    continue
                future = self._calls.pop(frame.call, None)
                if future is None or future.done():
                    continue
                if frame.sort is _Sort.REPLY:
                    future.set_result(message)
                elif frame.sort is _Sort.REFUSAL:
                    future.set_exception(ShoalError(_refusal(frame.header)))
                else:
                    raise FrameError(f"a server sent {frame.sort.name}")
        except asyncio.IncompleteReadError:
            pass
        except (OSError, FrameError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            self._writer.close()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ConnectionLost(self._lost))


class FrameServer:
    """Listens on one socket path (made 0600); each call runs its kind's handler in a task of its own."""

    def __init__(
        self, path: str | Path, nonce: str, handlers: Mapping[str, Handler], *, max_payload: int = MAX_PAYLOAD
    ) -> None:
        if not nonce:
            raise refuse(Code.FIELD_INVALID, "an empty nonce", "a secret", "make one with secrets.token_hex")
        self._path = Path(path)
        self._nonce = nonce
        self._handlers = dict(handlers)
        self._max_payload = max_payload
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._empty_since: float | None = None

    @property
    def connections(self) -> int:
        return len(self._writers)

    @property
    def empty_since(self) -> float | None:
        """loop.time() since when nobody is connected; None while somebody is."""
        return self._empty_since

    async def start(self) -> None:
        """Raises OSError. A socket file left by a dead process is replaced."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                self._path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), 0o600)
            with reachable(self._path) as address:
                sock.bind(address)
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(
                self._accept, sock=sock, limit=_CHUNK, backlog=descriptors.ACCEPTED_AT_ONCE
            )
            descriptors.widen(self._server)
        except BaseException:
            sock.close()
            raise
        self._empty_since = asyncio.get_running_loop().time()

    def push(self, kind: str, payload: bytes = b"", *, header: Header | None = None) -> None:
        """To everybody connected now. A peer that reads too slowly to take it is dropped."""
        for writer in tuple(self._writers):
            if writer.transport.get_write_buffer_size() > MAX_PAYLOAD:
                writer.transport.abort()
            else:
                _write(writer, _Sort.PUSH, 0, {**(header or {}), "kind": kind}, payload)

    async def close(self) -> None:
        """Stops listening, ends every connection and the calls on it, removes the socket file."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = tuple(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        with suppress(PermissionError):  # a confined worker may make its socket only: its supervisor removes it
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name=f"frames {self._path.name}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        pending = 0
        try:
            if not await self._greet(reader, writer):
                return
            self._writers.add(writer)
            self._empty_since = None
            while True:
                frame = await _read(reader, min(self._max_payload, MAX_PENDING_BYTES - pending))
                if frame.sort is _Sort.CANCEL:
                    if frame.call in calls:
                        calls[frame.call].cancel()
                    continue
                if frame.sort is not _Sort.CALL or frame.call in calls:
                    raise FrameError(f"a client sent {frame.sort.name} {frame.call}")
                why = self._unfit(frame, len(calls))
                if why is not None:
                    _write(writer, _Sort.REFUSAL, frame.call, asdict(why))
                    await writer.drain()
                    continue
                size = len(frame.payload)
                pending += size
                task = asyncio.create_task(self._answer(frame, writer))
                calls[frame.call] = task

                def finished(_: asyncio.Task[None], call: int = frame.call, size: int = size) -> None:
                    nonlocal pending
                    calls.pop(call, None)
                    pending -= size

                task.add_done_callback(finished)
                del frame
        except (OSError, EOFError, FrameError):
            pass
        finally:
            for task in tuple(calls.values()):
                task.cancel()
            self._writers.discard(writer)
            if not self._writers:
                self._empty_since = asyncio.get_running_loop().time()
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        sock = writer.get_extra_info("socket")
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read(reader, 0)
        except TimeoutError:
            return False
        _, uid = _peer(sock)
        said = str(hello.header.get("nonce", ""))
        known = hello.sort is _Sort.HELLO and hmac.compare_digest(said.encode(), self._nonce.encode())
        if not known or uid != os.geteuid():
            why = Refusal(
                Code.UNAUTHENTICATED, "a wrong nonce or user", "this process's own", "only its agent may call"
            )
            _write(writer, _Sort.REFUSAL, 0, asdict(why))
            with suppress(OSError):
                await writer.drain()
            return False
        _write(writer, _Sort.WELCOME, 0, {})
        return True

    def _unfit(self, frame: _Frame, calls: int) -> Refusal | None:
        if frame.overlong > self._max_payload:
            return Refusal(
                Code.TOO_LARGE, f"{frame.overlong} bytes", f"at most {self._max_payload}", "send smaller tensors"
            )
        if frame.overlong or calls >= MAX_PENDING_CALLS:
            return Refusal(Code.OVERLOADED, f"{calls} calls wait", f"at most {MAX_PENDING_CALLS}", "retry later")
        if frame.header.get("kind") not in self._handlers:
            return Refusal(
                Code.UNIMPLEMENTED, f"{frame.header.get('kind')!r:.40}", f"one of {', '.join(self._handlers)}"
            )
        return None

    async def _answer(self, frame: _Frame, writer: asyncio.StreamWriter) -> None:
        kind = str(frame.header.pop("kind"))
        try:
            reply = await self._handlers[kind](Message(kind, frame.header, frame.payload))
            _write(writer, _Sort.REPLY, frame.call, {**reply.header, "kind": reply.kind}, reply.payload)
        except ShoalError as error:
            _write(writer, _Sort.REFUSAL, frame.call, asdict(error.refusal))
        except Exception as error:
            why = Refusal(Code.INTERNAL, f"{type(error).__name__}: {error}"[:2000], "", "report this with the log")
            _write(writer, _Sort.REFUSAL, frame.call, asdict(why))
            _log.exception("handler_failed", kind=kind)
        finally:
            with suppress(OSError):
                await writer.drain()


def _write(
    writer: asyncio.StreamWriter, sort: _Sort, call: int, header: Header, payload: bytes | memoryview = b""
) -> None:
    """Buffers one whole frame; nothing is awaited, so frames of concurrent calls never mix."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise refuse(
            Code.TOO_LARGE,
            f"a frame of {len(text)} + {len(payload)} bytes",
            f"at most {MAX_HEADER} + {MAX_PAYLOAD}",
            "send less at once",
        )
    writer.write(_HEAD.pack(_MAGIC, sort, len(text), len(payload), call) + text)
    if len(payload):
        writer.write(payload)


async def _read(reader: asyncio.StreamReader, max_payload: int) -> _Frame:
    """Raises IncompleteReadError at the end of the stream, FrameError on anything malformed."""
    magic, sort, header_size, payload_size, call = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if magic != _MAGIC or header_size > MAX_HEADER:
        raise FrameError("not a frame")
    text = await reader.readexactly(header_size)
    try:
        known = _Sort(sort)
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if not isinstance(header, dict):
        raise FrameError("the header is no object")
    if payload_size <= max_payload:
        return _Frame(known, call, header, await reader.readexactly(payload_size))
    left = payload_size
    while left:
        left -= len(await reader.readexactly(min(left, _CHUNK)))
    return _Frame(known, call, header, b"", overlong=payload_size)


def _refusal(header: Mapping[str, Any]) -> Refusal:
    text = {name: str(header.get(name, "")) for name in ("code", "found", "asked", "remedy")}
    try:
        code = Code(text["code"])
    except ValueError:
        code = Code.INTERNAL
    return Refusal(code, text["found"], text["asked"], text["remedy"])


def start_time(pid: int) -> int:
    """In clock ticks since boot: with the pid, names one process for ever. Raises OSError when there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _unix_socket() -> socket.socket:
    """Raises ShoalError(OVERLOADED)."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ShoalError(descriptors.NONE_LEFT) from error


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
