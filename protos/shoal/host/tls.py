"""TLS on an asyncio transport, by the ssl module over memory.

asyncio's own holds a buffer of 256 KiB for each connection from its first byte on, which strangers could take by the
thousand. Here a connection holds what is on its way, and OpenSSL's state.
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from shoal.host.connection_turns import connection_turns

_RECORD_BYTES: Final = 2**14
"""Most bytes of a record once it is decrypted (RFC 8446, section 5.1)."""
_RECEIVE_BYTES: Final = 2**18


class ReceiveBuffers:
    """Where all connections of an event loop receive, because what is there is processed at once: asyncio would take
    as much for each read."""

    __slots__ = ("plain", "secret")

    def __init__(self) -> None:
        self.secret = memoryview(bytearray(_RECEIVE_BYTES))
        """What arrived."""
        self.plain = memoryview(bytearray(_RECEIVE_BYTES))
        """The same, decrypted."""


_buffers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ReceiveBuffers]] = WeakKeyDictionary()


def receive_buffers() -> ReceiveBuffers:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    found = _buffers.get(loop)
    if found is None:
        found = _buffers[loop] = ReceiveBuffers()
    return found


class TlsTransport(asyncio.Transport):
    """The transport of a protocol above TLS."""

    def __init__(self, connection: "TlsConnection") -> None:
        super().__init__()
        self._connection = connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As asyncio's: `ssl_object`, `peername`, `socket`, ..."""
        if name == "ssl_object":
            return self._connection.secure
        return self._connection.plain.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._connection.is_closing

    def can_write_eof(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.write(data)

    def close(self) -> None:
        self._connection.close()

    def abort(self) -> None:
        self._connection.plain.abort()

    def pause_reading(self) -> None:
        self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._connection.resume_reading()


class TlsConnection(asyncio.BufferedProtocol):
    """One connection: its handshake, then what a protocol above it sends and receives. The `data_received` of that
    protocol gets a view which is valid during the call only.

    make_protocol: called once the handshake is done; the protocol's `connection_made` follows. on_failure: called when
    the connection ends before that, with the reason. handshake_s: most seconds that a handshake takes, from the
    connection on.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[ssl.SSLObject], asyncio.Protocol | None],
        on_failure: Callable[[OSError], None],
        *,
        handshake_s: float,
        server_name: str | None = None,
    ) -> None:
        """server_name: the DNS name that the server must prove; None at the server's side."""
        self.plain: asyncio.Transport = cast(asyncio.Transport, None)
        self._make_protocol = make_protocol
        self._on_failure = on_failure
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.secure = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        core = _core_of(self.secure)
        self._decrypt = cast(Callable[[int, memoryview], int], core.read)
        self._encrypt = cast(Callable[[bytes | bytearray | memoryview], int], core.write)
        self._may_wait = server_name is None
        """What this process called for itself does not wait: it judges by answers in time whether a peer lives."""
        self._protocol: asyncio.Protocol | None = None
        self._on_data: Callable[[memoryview], None] = _refuse_data
        self._is_failed = False
        self._error: ssl.SSLError | None = None
        self.is_closing = False
        self._buffers = receive_buffers()
        self._turns = connection_turns()
        self._is_waiting = False
        """For its turn, with what arrived."""
        self._is_ended = False
        """Whether the peer sends nothing more, while this waits."""
        self._is_paused = False
        """Whether the protocol above wants nothing more for now."""
        self._handshake_s = handshake_s
        self._timer: asyncio.TimerHandle | None = None
        """Ends a handshake that takes too long."""

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.plain = cast(asyncio.Transport, transport)
        # Not before: an event loop may make the protocol of a connection that then does not come about.
        self._timer = asyncio.get_running_loop().call_later(self._handshake_s, self._on_timeout)
        if not self._may_wait:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        room = self._turns.room
        return self._buffers.secret if room >= _RECEIVE_BYTES else self._buffers.secret[:room]

    def buffer_updated(self, nbytes: int) -> None:
        self.receive(self._buffers.secret[:nbytes])

    def receive(self, data: bytes | memoryview) -> None:
        """Process what the peer has sent, or have it wait for its turn."""
        self._incoming.write(data)
        if self._is_waiting:
            self.plain.pause_reading()  # not for the first that arrives: mostly that is all
            return
        if not self._may_wait:
            self._process()
            return
        if not self._turns.begin_event():
            self._is_waiting = True
            self._turns.wait(self._on_turn)
            return
        try:
            self._process()
        finally:
            self._turns.end_event()

    def eof_received(self) -> bool:
        """The transport closes itself, if what arrived before does not still wait for its turn."""
        self._is_ended = self._is_waiting
        return self._is_ended

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closing = True
        if self._protocol is not None:
            protocol, self._protocol = self._protocol, None
            protocol.connection_lost(exc or self._error)
        else:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("closed during the TLS handshake"))

    # The transport's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing or not data:
            return
        try:
            self._encrypt(data)
        except ssl.SSLError as error:
            self._break(error)
            return
        self.plain.write(self._outgoing.read())

    def pause_reading(self) -> None:
        self._is_paused = True
        self.plain.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_waiting:
            self.plain.resume_reading()

    def close(self) -> None:
        """Send what was written, and the end of TLS; the peer's is not waited for."""
        if self.is_closing:
            return
        self.is_closing = True
        try:
            self.secure.unwrap()
        except (ssl.SSLError, ValueError):
            pass  # it waits for the peer's end, or the handshake is not done
        self._flush()
        self.plain.close()

    # Inside

    def _on_turn(self) -> None:
        self._is_waiting = False
        if self.is_closing or self._is_failed or self.plain.is_closing():
            return
        if not self._is_paused:
            self.plain.resume_reading()
        try:
            self._process()
        except BaseException:
            self.plain.abort()
            raise
        if self._is_ended:
            self.plain.close()

    def _process(self) -> None:
        """Go on with what arrived."""
        if self._protocol is not None or self._shake_hands():
            self._read()

    def _shake_hands(self) -> bool:
        """Go on with the handshake; return whether it is done and the protocol above is there."""
        try:
            self.secure.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._fail(error)
            self.plain.close()
            return False
        self._flush()
        self._stop_timer()
        protocol = self._make_protocol(self.secure)
        if protocol is None:
            self._fail(ConnectionResetError("no protocol was agreed on"))
            self.plain.abort()
            return False
        self._protocol = protocol
        self._on_data = cast(Callable[[memoryview], None], protocol.data_received)
        protocol.connection_made(TlsTransport(self))
        return True

    def _read(self) -> None:
        """Decrypt what arrived, and pass it on."""
        plain, incoming, read = self._buffers.plain, self._incoming, self._decrypt
        size = 0
        is_ended = False
        try:
            while count := read(_RECEIVE_BYTES, plain[size:] if size else plain):
                size += count
                if _RECEIVE_BYTES - size < _RECORD_BYTES:
                    self._on_data(plain[:size])
                    size = 0
                    if self.is_closing:
                        return
                if not incoming.pending:
                    break  # another read would raise: one takes all of a record, which has room
            else:
                is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            is_ended = True
        except ssl.SSLError as error:
            self._break(error)
            return
        if self._outgoing.pending:
            self._flush()  # a key update, or a ticket
        if size and self._protocol is not None:
            self._on_data(plain[:size])
        if is_ended:
            self.close()

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self.plain.write(data)

    def _break(self, error: ssl.SSLError) -> None:
        """The peer broke TLS, or refused this side's certificate: close, after an alert."""
        self._error = error
        self.is_closing = True
        self._flush()
        self.plain.close()

    def _on_timeout(self) -> None:
        self._fail(TimeoutError("the TLS handshake took too long"))
        self.plain.abort()

    def _fail(self, error: OSError) -> None:
        """Tell once why there is no connection."""
        self._stop_timer()
        if not self._is_failed:
            self._is_failed = True
            self._on_failure(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _core_of(secure: ssl.SSLObject) -> Any:
    """Reads and writes as `secure` does, which is Python around it; that itself where it has none."""
    return getattr(secure, "_sslobj", secure)


def _refuse_data(_: memoryview) -> None:
    raise AssertionError("data before the handshake")


def client_context(authority: Path, certificate: Path, key: Path, roots: bytes = b"") -> ssl.SSLContext:
    """TLS for HTTP/2 towards a server that must show a certificate of `roots` (PEM), or else of the file `authority`.

    Raises OSError (including ssl.SSLError), also while the files are only half replaced.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if roots:
        context.load_verify_locations(cadata=roots.decode())
    else:
        context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    return context
