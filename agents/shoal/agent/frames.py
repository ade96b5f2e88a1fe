"""The frame format of all Unix sockets inside an agent, between supervisor, front and workers.

A frame has a fixed head (magic, type, sizes, call id), a JSON header of at most 64 KiB, and a payload of bytes. A
client opens a connection with the server's nonce. Calls then run concurrently on it, and each is answered by a reply or
a refusal. Either side may end a call early: the client cancels it, the server closes the connection. The server may
also push messages.

A worker answers the kinds that `WorkerService.handlers` lists. A front uses the same classes for its own kinds.
"""

import asyncio
import hmac
import io
import itertools
import json
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Self

import structlog

from shoal.agent.timeouts import within
from shoal.host import file_descriptors
from shoal.host.unix_sockets import socket_address
from shoal.types.codes import Code, Refusal, ShoalError, refuse

_log = structlog.get_logger(__name__)

MAX_HEADER: Final = 64 * 2**10
MAX_PAYLOAD: Final = 96 * 2**20
"""Above the 64 MiB limit of one request's expanded tensors, so that the worker refuses larger ones, not the
transport."""
MAX_PENDING_CALLS: Final = 4096
MAX_PENDING_BYTES: Final = 512 * 2**20
HELLO_TIMEOUT_S: Final = 5.0

_MAGIC: Final = 0x5346
_HEAD: Final = struct.Struct("!HBxIIQ")
_CHUNK: Final = 2**20
_PIECE: Final = 2**18
"""Bytes of a large payload handed to the socket at a time. asyncio copies what the kernel does not take at once, up to
twice; the kernel takes some 200 KiB (`net.core.wmem_default`)."""
_UCRED: Final = struct.Struct("iII")

Header = Mapping[str, Any]
Push = Callable[["FrameMessage"], None]


class _FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    CALL = 3
    REPLY = 4
    REFUSAL = 5
    CANCEL = 6
    PUSH = 7


@dataclass(frozen=True, slots=True)
class FrameMessage:
    """One call, reply or push."""

    # What it is: the name of a handler, or the kind of a reply or push.
    kind: str
    # Small facts as JSON values.
    header: Header = field(default_factory=dict)
    # Raw bytes.
    payload: bytes = b""


Handler = Callable[[FrameMessage], Awaitable[FrameMessage]]
"""Answers one call. A ShoalError that it raises becomes the refusal. It is cancelled when the caller is gone."""


class ConnectionLost(ShoalError):
    """The peer is gone. Whether a call in flight was carried out is unknown."""

    def __init__(self, why: str) -> None:
        super().__init__(
            Refusal(Code.REPLICA_UNREACHABLE, why, "an answer", "retry elsewhere: the process behind the socket ended")
        )


class FrameError(Exception):
    """The peer broke the frame format; the connection is closed."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame as read from a socket."""

    # Type of the frame.
    frame_type: _FrameType
    # Call id; 0 for hello, welcome and push.
    call: int
    # JSON object; holds `kind` in a call, reply or push.
    header: dict[str, Any]
    # Empty if `oversized_bytes` is not 0.
    payload: bytes
    # Payload bytes that were declared, read and dropped because they exceeded the limit. 0: none.
    oversized_bytes: int = 0


class FrameClient:
    """A connection to one server, for any number of concurrent calls. Not for use from several event loops."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_push: Push | None) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = _FrameWriter(writer)
        self._on_push = on_push
        self._calls: dict[int, asyncio.Future[FrameMessage]] = {}
        self._ids = itertools.count(1)
        self._end_reason: str | None = None
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
        """Open a connection.

        Raises ConnectionLost (nobody listens, or not the process `peer_pid`), ShoalError(UNAUTHENTICATED), or
        ShoalError(OVERLOADED) if this process has no file descriptor left.
        """
        sock = _unix_socket()
        try:
            reader, writer, answer = await within(timeout, _connect(sock, Path(path), nonce, peer_pid))
        except TimeoutError as error:
            sock.close()
            raise ConnectionLost(f"no answer to hello within {timeout:g}s on {Path(path).name}") from error
        except (OSError, EOFError, FrameError) as error:
            sock.close()
            if isinstance(error, OSError) and file_descriptors.is_exhaustion(error):
                raise ShoalError(file_descriptors.NONE_LEFT) from error
            raise ConnectionLost(f"{type(error).__name__} on {Path(path).name}: {error}") from error
        except BaseException:
            sock.close()
            raise
        if answer.frame_type is not _FrameType.WELCOME:
            writer.close()
            raise ShoalError(_refusal(answer.header))
        client = cls(reader, writer, on_push)
        client._reading = asyncio.create_task(client._read_all(), name=f"frames {Path(path).name}")
        return client

    @property
    def is_closed(self) -> bool:
        return self._end_reason is not None

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
    ) -> FrameMessage:
        """The reply. Raises what the server refused with, DEADLINE_EXCEEDED after `timeout`, or ConnectionLost.

        A call that times out, or whose caller is cancelled, is cancelled at the server too.
        """
        if self._end_reason is not None:
            raise ConnectionLost(self._end_reason)
        call = next(self._ids)
        future: asyncio.Future[FrameMessage] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            async with asyncio.timeout(timeout):
                self._frames.write(_FrameType.CALL, call, {**(header or {}), "kind": kind}, payload)
                del payload  # the caller may need it again; this function must not keep it alive longer than the send
                await self._drain()
                return await future
        except TimeoutError as error:
            raise refuse(
                Code.DEADLINE_EXCEEDED, f"no answer to `{kind}`", f"within {timeout}s", "allow more time or retry"
            ) from error
        finally:
            if self._calls.pop(call, None) is not None and self._end_reason is None:
                self._frames.cancel(call)
            future.cancel()

    async def wait_closed(self) -> None:
        """Returns when the connection is over, whichever side ended it."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def close(self) -> None:
        """Idempotent. Calls in flight end with ConnectionLost."""
        self._end("closed by this side")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def abandon(self, refusal: Refusal) -> None:
        """Give up on a peer that is alive and does not answer: end calls in flight with `refusal`, and the
        connection."""
        self._end_reason = str(refusal)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ShoalError(refusal))
        self._frames.abort()

    async def _drain(self) -> None:
        try:
            await self._frames.drain()
        except OSError as error:
            self._end(f"{type(error).__name__}: {error}")
            raise ConnectionLost(self._end_reason or "") from error

    async def _read_all(self) -> None:
        why = "the peer closed the connection"
        try:
            while True:
                frame = await _read(self._reader, MAX_PAYLOAD)
                if frame.oversized_bytes:
                    raise FrameError(f"payload of {frame.oversized_bytes} bytes")
                message = FrameMessage(str(frame.header.pop("kind", "")), frame.header, frame.payload)
                if frame.frame_type is _FrameType.PUSH:
                    if self._on_push is not None:
                        self._on_push(message)
                    continue
                future = self._calls.pop(frame.call, None)
                if future is None or future.done():
                    continue
                if frame.frame_type is _FrameType.REPLY:
                    future.set_result(message)
                elif frame.frame_type is _FrameType.REFUSAL:
                    future.set_exception(ShoalError(_refusal(frame.header)))
                else:
                    raise FrameError(f"a server sent {frame.frame_type.name}")
        except asyncio.IncompleteReadError:
            pass
        except (OSError, FrameError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        if self._end_reason is None:
            self._end_reason = why
            self._frames.close()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(ConnectionLost(self._end_reason))


class FrameServer:
    """Listens on one socket path (mode 0600). Each call runs the handler of its kind in its own task."""

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
        self._writers: set[_FrameWriter] = set()
        self._empty_since: float | None = None

    @property
    def connections(self) -> int:
        return len(self._writers)

    @property
    def empty_since(self) -> float | None:
        """loop.time() since which no peer is connected. None while one is."""
        return self._empty_since

    async def start(self) -> None:
        """Raises OSError. Replaces a socket file that a dead process left."""
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(self._path.lstat().st_mode):
                self._path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), 0o600)
            with socket_address(self._path) as address:
                sock.bind(address)
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(
                self._accept, sock=sock, limit=_CHUNK, backlog=file_descriptors.ACCEPTS_PER_TURN
            )
            file_descriptors.set_backlog(self._server)
        except BaseException:
            sock.close()
            raise
        self._empty_since = asyncio.get_running_loop().time()

    def push(self, kind: str, payload: bytes = b"", *, header: Header | None = None) -> None:
        """Send to all connected peers. A peer that reads too slowly is dropped."""
        for frames in tuple(self._writers):
            if frames.waiting_bytes > MAX_PAYLOAD:
                frames.abort()
            else:
                frames.write(_FrameType.PUSH, 0, {**(header or {}), "kind": kind}, payload)

    async def close(self) -> None:
        """Stop listening, end every connection and its calls, remove the socket file."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = tuple(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        # a confined worker may create its socket but not remove it: its supervisor does
        with suppress(PermissionError):
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name=f"frames {self._path.name}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        pending = 0
        frames = _FrameWriter(writer)
        try:
            if not await self._greet(reader, frames, writer.get_extra_info("socket")):
                return
            self._writers.add(frames)
            self._empty_since = None
            while True:
                frame = await _read(reader, min(self._max_payload, MAX_PENDING_BYTES - pending))
                if frame.frame_type is _FrameType.CANCEL:
                    if frame.call in calls:
                        calls[frame.call].cancel()
                    continue
                if frame.frame_type is not _FrameType.CALL or frame.call in calls:
                    raise FrameError(f"a client sent {frame.frame_type.name} {frame.call}")
                why = self._check_call(frame, len(calls))
                if why is not None:
                    frames.write(_FrameType.REFUSAL, frame.call, asdict(why))
                    await frames.drain()
                    continue
                size = len(frame.payload)
                pending += size
                task = asyncio.create_task(self._answer(frame, frames))
                calls[frame.call] = task

                def on_done(_: asyncio.Task[None], call: int = frame.call, size: int = size) -> None:
                    nonlocal pending
                    calls.pop(call, None)
                    pending -= size

                task.add_done_callback(on_done)
                del frame
        except (OSError, EOFError, FrameError):
            pass
        finally:
            for task in tuple(calls.values()):
                task.cancel()
            self._writers.discard(frames)
            if not self._writers:
                self._empty_since = asyncio.get_running_loop().time()
            frames.close()

    async def _greet(self, reader: asyncio.StreamReader, frames: "_FrameWriter", sock: socket.socket) -> bool:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read(reader, 0)
        except TimeoutError:
            return False
        _, uid = _peer_credentials(sock)
        said = str(hello.header.get("nonce", ""))
        known = hello.frame_type is _FrameType.HELLO and hmac.compare_digest(said.encode(), self._nonce.encode())
        if not known or uid != os.geteuid():
            why = Refusal(
                Code.UNAUTHENTICATED, "a wrong nonce or user", "this process's own", "only its agent may call"
            )
            frames.write(_FrameType.REFUSAL, 0, asdict(why))
            with suppress(OSError):
                await frames.drain()
            return False
        frames.write(_FrameType.WELCOME, 0, {})
        return True

    def _check_call(self, frame: _Frame, calls: int) -> Refusal | None:
        if frame.oversized_bytes > self._max_payload:
            return Refusal(
                Code.TOO_LARGE, f"{frame.oversized_bytes} bytes", f"at most {self._max_payload}", "send smaller tensors"
            )
        if frame.oversized_bytes or calls >= MAX_PENDING_CALLS:
            return Refusal(Code.OVERLOADED, f"{calls} calls wait", f"at most {MAX_PENDING_CALLS}", "retry later")
        if frame.header.get("kind") not in self._handlers:
            return Refusal(
                Code.UNIMPLEMENTED, f"{frame.header.get('kind')!r:.40}", f"one of {', '.join(self._handlers)}"
            )
        return None

    async def _answer(self, frame: _Frame, frames: "_FrameWriter") -> None:
        kind = str(frame.header.pop("kind"))
        try:
            reply = await self._handlers[kind](FrameMessage(kind, frame.header, frame.payload))
            frames.write(_FrameType.REPLY, frame.call, {**reply.header, "kind": reply.kind}, reply.payload)
            del reply  # it is kept alive until it is sent
        except ShoalError as error:
            frames.write(_FrameType.REFUSAL, frame.call, asdict(error.refusal))
        except Exception as error:
            why = Refusal(Code.INTERNAL, f"{type(error).__name__}: {error}"[:2000], "", "report this with the log")
            frames.write(_FrameType.REFUSAL, frame.call, asdict(why))
            _log.exception("call_failed", method=kind)
        finally:
            with suppress(OSError):
                await frames.drain()


async def _connect(
    sock: socket.socket, path: Path, nonce: str, peer_pid: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, _Frame]:
    """A connection, and the server's answer to the nonce. Raises what `FrameClient.connect` catches."""
    with socket_address(path) as address:
        await asyncio.get_running_loop().sock_connect(sock, address)
    pid, uid = _peer_credentials(sock)
    if uid != os.geteuid() or (peer_pid is not None and pid != peer_pid):
        raise ConnectionLost(f"another process (pid {pid}, uid {uid}) holds {path.name}")
    reader, writer = await asyncio.open_connection(sock=sock, limit=_CHUNK)
    _FrameWriter(writer).write(_FrameType.HELLO, 0, {"nonce": nonce})
    return reader, writer, await _read(reader, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedFrame:
    """A frame of which at least a part is not in the socket's buffer yet."""

    # Call id.
    call: int
    # Fixed head and JSON header, encoded.
    head: bytes
    # The payload, not copied.
    payload: bytes | memoryview
    # Set when the frame is in the socket's buffer, or will never be sent.
    done: asyncio.Event = field(default_factory=asyncio.Event)


class _FrameWriter:
    """Writes frames to one peer, one after the other. Copies a large payload piece by piece."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._queue: deque[_QueuedFrame] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        queued = sum(len(each.head) + len(each.payload) for each in self._queue)
        return queued + self._writer.transport.get_write_buffer_size()

    def write(self, frame_type: _FrameType, call: int, header: Header, payload: bytes | memoryview = b"") -> None:
        """Awaits nothing, so that frames of concurrent calls never mix. Raises ShoalError(TOO_LARGE)."""
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
            raise refuse(
                Code.TOO_LARGE,
                f"a frame of {len(text)} + {len(payload)} bytes",
                f"at most {MAX_HEADER} + {MAX_PAYLOAD}",
                "send less at once",
            )
        if self._is_closed:
            return
        head = _HEAD.pack(_MAGIC, frame_type, len(text), len(payload), call) + text
        if self._sending is None and len(payload) <= _PIECE:
            self._writer.write(head)
            if len(payload):
                self._writer.write(payload)
            return
        self._queue.append(_QueuedFrame(call, head, payload))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_queue(), name="frames out")

    def cancel(self, call: int) -> None:
        """Drop a call that has not begun to leave. For any other, tell the peer."""
        for queued in itertools.islice(self._queue, 1, None):
            if queued.call == call:
                self._queue.remove(queued)
                queued.done.set()
                return
        self.write(_FrameType.CANCEL, call, {})

    async def drain(self) -> None:
        """Returns when everything written so far has left, up to the transport's buffer limit. Raises OSError."""
        if self._queue:
            await self._queue[-1].done.wait()
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection. Frames in the queue are dropped."""
        self._end()
        self._writer.close()

    def abort(self) -> None:
        self._end()
        self._writer.transport.abort()

    def _end(self) -> None:
        self._is_closed = True
        if self._sending is not None:
            self._sending.cancel()
        self._drop_queue()  # a task that has not started cannot do it itself

    def _drop_queue(self) -> None:
        for queued in self._queue:
            queued.done.set()
        self._queue.clear()

    async def _send_queue(self) -> None:
        """Send the frames in order. A frame stays first in the queue until it is in the socket's buffer."""
        try:
            while self._queue:
                await self._send(self._queue[0])
                self._queue.popleft().done.set()
        except OSError:
            pass  # `drain` raises the same error
        finally:
            self._drop_queue()
            self._sending = None

    async def _send(self, frame: _QueuedFrame) -> None:
        self._writer.write(frame.head)
        whole = memoryview(frame.payload)
        for at in range(0, len(whole), _PIECE):
            self._writer.write(whole[at : at + _PIECE])
            await self._writer.drain()


async def _read(reader: asyncio.StreamReader, max_payload: int) -> _Frame:
    """Raises IncompleteReadError at the end of the stream, FrameError on anything malformed."""
    magic, sort, header_size, payload_size, call = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if magic != _MAGIC or header_size > MAX_HEADER:
        raise FrameError("not a frame")
    text = await reader.readexactly(header_size)
    try:
        known = _FrameType(sort)
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if not isinstance(header, dict):
        raise FrameError("the header is no object")
    if payload_size <= max_payload:
        return _Frame(known, call, header, await _read_payload(reader, payload_size))
    left = payload_size
    while left:
        left -= len(await reader.readexactly(min(left, _CHUNK)))
    return _Frame(known, call, header, b"", oversized_bytes=payload_size)


async def _read_payload(reader: asyncio.StreamReader, size: int) -> bytes:
    """Raises IncompleteReadError. Not `readexactly` for a large payload: it holds the bytes twice at its end."""
    if size <= _CHUNK:
        return await reader.readexactly(size)
    whole = io.BytesIO()
    while left := size - whole.tell():
        piece = await reader.read(min(left, _CHUNK))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        whole.write(piece)
    return whole.getvalue()  # its own buffer, not a copy


def _refusal(header: Mapping[str, Any]) -> Refusal:
    text = {name: str(header.get(name, "")) for name in ("code", "found", "asked", "remedy")}
    try:
        code = Code(text["code"])
    except ValueError:
        code = Code.INTERNAL
    return Refusal(code, text["found"], text["asked"], text["remedy"])


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot: pid and start time together identify a process. Raises OSError if it is
    gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _unix_socket() -> socket.socket:
    """Raises ShoalError(OVERLOADED)."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ShoalError(file_descriptors.NONE_LEFT) from error


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the peer, as the kernel knows them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
