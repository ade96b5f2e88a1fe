"""Who is at the other end of a Unix socket, as the kernel knows it."""

import socket
import struct
from pathlib import Path
from typing import Final

from shoal.host import file_descriptors
from shoal.types.codes import ShoalError

HELLO_TIMEOUT_S: Final = 5.0
_UCRED: Final = struct.Struct("iII")


def start_time(pid: int) -> int:
    """Start time in clock ticks since boot: pid and start time together identify a process. Raises OSError if it is
    gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def new_socket() -> socket.socket:
    """Raises ShoalError(OVERLOADED)."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ShoalError(file_descriptors.NONE_LEFT) from error


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the peer."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
