"""Confines a process before it reads untrusted bytes: no network, no other files, no other processes, no privileges.

Agents (workers) and coordinators (inspection) keep their keys under the user that these processes run as. So file
permissions do not separate them; Landlock does, with namespaces for the network. Neither stops a process from
connecting to a Unix socket whose path it knows (a container engine's, the message bus). So system calls are filtered:
the process can accept connections but not make them. Linux only. Landlock works on any architecture that numbers system
calls from 424 on alike (all but Alpha), the filter on x86-64 and ARM64.
"""

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import IntFlag
from pathlib import Path
from typing import Final

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_CREATE_RULESET_VERSION: Final = 1
_RULE_PATH_BENEATH: Final = 1
_SCOPED: Final = 0b11
"""Blocks abstract Unix sockets and signals to processes outside (Landlock version 6 and later)."""
_SCOPED_SINCE: Final = 6
_HANDLED: Final = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF}
"""All file rights that a version of Landlock can refuse."""

_SYSTEM_CALLS: Final = {
    "x86_64": (0xC000003E, 41, (42, 101, 248, 249, 250, 251, 272, 298, 308, 310, 311, 321, 323, 425)),
    "aarch64": (0xC00000B7, 198, (203, 117, 217, 218, 219, 30, 97, 241, 268, 270, 271, 280, 282, 425)),
}
"""By machine: the kernel's number of the architecture, the number of socket, and the refused calls: connect, ptrace,
add_key, request_key, keyctl, ioprio_set, unshare, perf_event_open, setns, process_vm_readv, process_vm_writev, bpf,
userfaultfd, io_uring_setup."""
_OF_PROCESSES: Final[Mapping[str, Mapping[int, tuple[int, ...]]]] = {
    "x86_64": {302: (0,), 203: (0,), 142: (0,), 144: (0,), 314: (0,), 141: (0, 1)},
    "aarch64": {261: (0,), 122: (0,), 118: (0,), 119: (0,), 274: (0,), 140: (0, 1)},
}
"""By machine: calls that may be made for the calling process and thread alone, by the arguments that are 0 then:
prlimit64, sched_setaffinity, sched_setparam, sched_setscheduler, sched_setattr, setpriority. The kernel allows them for
every process of the same user: with a limit of its processor time or its files another one is ended."""
_OTHER_ABI: Final = 0x40000000
"""Numbers from here on are calls of the x32 ABI."""
_UNIX: Final = 1
_KINDS_OF_SOCKET: Final = (1, 5)
"""Stream and seqpacket sockets, which can send nothing before they are connected; datagram sockets can."""
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION: Final = 0x20080522


class Access(IntFlag):
    """Rights beneath a path, with Landlock's numbers. OPEN: open a file whose name is known; LIST: list a folder."""

    WRITE = 1 << 1
    OPEN = 1 << 2
    LIST = 1 << 3
    REMOVE_FOLDER = 1 << 4
    REMOVE = 1 << 5
    MAKE_FOLDER = 1 << 7
    MAKE_FILE = 1 << 8
    MAKE_SOCKET = 1 << 9
    TRUNCATE = 1 << 14
    READ = OPEN | LIST
    KEEP = READ | WRITE | REMOVE | MAKE_FILE | TRUNCATE
    KEEP_FOLDERS = KEEP | MAKE_FOLDER | REMOVE_FOLDER


_OF_FILES: Final = Access.OPEN | Access.WRITE | Access.TRUNCATE


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("ports", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _CapabilityHead(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def enter(grants: Mapping[Path, Access]) -> tuple[str, ...]:
    """Confines this process and all its children, for good. Requires a process with one thread, because the kernel
    applies most of it per thread.

    grants: what remains accessible of the file system; missing paths are ignored. Returns in words what this kernel
    does not support.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refused = (
        _isolate_network(libc),
        _restrict_files(libc, grants),
        _drop_capabilities(libc),
        _filter_system_calls(libc),
    )
    return tuple(each for each in refused if each)


def unsupported_restrictions() -> tuple[str, ...]:
    """What `enter` would not achieve on this machine, in words; tried in a child. Requires a process with one
    thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(enter({})).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return tuple(str(each) for each in json.loads(told)) if told else ("anything: the trial ended without a word",)


def runtime() -> dict[Path, Access]:
    """What a Python process must read to keep importing and running: interpreter, packages, system libraries, /proc."""
    searched = (*sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    roots = {Path(sys.prefix), Path(sys.base_prefix), *(Path(path) for path in searched if path not in ("", "/"))}
    system = map(Path, ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/proc", "/sys"))
    grants = dict.fromkeys((*roots, *system), Access.READ)
    devices = map(Path, ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"))
    return grants | dict.fromkeys(devices, Access.READ | Access.WRITE)


def _isolate_network(libc: ctypes.CDLL) -> str:
    """Uses a user namespace also for root, which could leave a mere network namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return ""
    if libc.unshare(_CLONE_NEWNET) == 0:
        return ""  # root where user namespaces are forbidden; dropping capabilities prevents its return
    return f"network: {os.strerror(ctypes.get_errno())}"


def _restrict_files(libc: ctypes.CDLL, grants: Mapping[Path, Access]) -> str:
    version = libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    if version < 1:
        return f"files: {os.strerror(ctypes.get_errno())}"
    handled = _HANDLED[min(version, max(_HANDLED))]
    asked = _Ruleset(handled, 0, _SCOPED if version >= _SCOPED_SINCE else 0)
    size = ctypes.sizeof(asked) if version >= _SCOPED_SINCE else ctypes.sizeof(ctypes.c_uint64)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(asked), size, 0)
    if ruleset < 0:
        return f"files: {os.strerror(ctypes.get_errno())}"
    try:
        _grant(libc, ruleset, handled, grants.items())
        if libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
            return f"files: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return "" if version >= _SCOPED_SINCE else "signals to other processes: an old kernel"


def _grant(libc: ctypes.CDLL, ruleset: int, handled: int, grants: Iterable[tuple[Path, Access]]) -> None:
    """Raises OSError when an existing path cannot be granted."""
    for path, access in grants:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights = access & handled if path.is_dir() else access & handled & _OF_FILES
                rule = _Beneath(rights, parent)
                if libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot grant {path}")
            finally:
                os.close(parent)


def _drop_capabilities(libc: ctypes.CDLL) -> str:
    """Drops the capabilities that the new user namespace granted within itself."""
    head = _CapabilityHead(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(head), ctypes.byref(nothing)) != 0:
        return f"capabilities: {os.strerror(ctypes.get_errno())}"
    return ""


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def _filter_system_calls(libc: ctypes.CDLL) -> str:
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return f"system calls: no filter for {platform.machine()}"
    steps = _bpf_program(*calls, _OF_PROCESSES[platform.machine()])
    program = _Filter(len(steps) // 8, steps)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        return f"system calls: {os.strerror(ctypes.get_errno())}"
    return ""


def _bpf_program(
    machine: int, socket: int, refused: tuple[int, ...], of_processes: Mapping[int, tuple[int, ...]]
) -> bytes:
    """A classic BPF program over `struct seccomp_data`: number at 0, machine at 4, arguments at 16, 8 bytes each."""
    number, arguments = 0, 16
    # (code, value, steps to skip if it holds, steps to skip if not); at the end: allow, then refuse
    own = [step for call, zeros in of_processes.items() for step in _allow_if_zero(call, arguments, zeros)]
    tail = len(refused) + 8
    steps = [
        (_LOAD, 4, 0, 0),
        (_IF_EQUAL, machine, 0, len(own) + tail + 2),
        (_LOAD, number, 0, 0),
        (_IF_AT_LEAST, _OTHER_ABI, len(own) + tail, 0),
        *own,
    ]
    steps += [(_IF_EQUAL, call, tail - 1 - at, 0) for at, call in enumerate(refused)]
    steps += [
        (_IF_EQUAL, socket, 0, 6),
        (_LOAD, arguments, 0, 0),
        (_IF_EQUAL, _UNIX, 0, 5),
        (_LOAD, arguments + 8, 0, 0),
        (_AND, 0xF, 0, 0),
        (_IF_EQUAL, _KINDS_OF_SOCKET[0], 1, 0),
        (_IF_EQUAL, _KINDS_OF_SOCKET[1], 0, 1),
        (_RETURN, _ALLOW, 0, 0),
        (_RETURN, _REFUSE, 0, 0),
    ]
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, value, yes, no in steps)


def _allow_if_zero(call: int, arguments: int, zeros: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Steps that decide about one call, and are passed over by others. The kernel reads the lower half of each of
    these arguments, and so do they."""
    checks = list[tuple[int, int, int, int]]()
    for left, argument in zip(reversed(range(len(zeros))), zeros, strict=True):
        checks += [(_LOAD, arguments + 8 * argument, 0, 0), (_IF_EQUAL, 0, 0, 2 * left + 1)]
    return [(_IF_EQUAL, call, 0, len(checks) + 2), *checks, (_RETURN, _ALLOW, 0, 0), (_RETURN, _REFUSE, 0, 0)]
