"""The containers' seccomp profile: what is not named is refused, and what our programs do is not.

The file is loaded by libseccomp, as Docker does, into a process of its own, which then does what a worker does.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[3]
FILE: Final = ROOT / "deploy" / "seccomp.json"
MADE: Final[dict[str, Any]] = runpy.run_path(str(ROOT / "deploy" / "seccomp.py"))
NEEDED: Final = (
    "seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "prctl", "pidfd_open",
    "pidfd_send_signal", "execve", "mmap", "mprotect", "futex", "epoll_wait", "accept4", "memfd_create", "fchmodat2",
)  # fmt: skip
CONFINED: Final = """
import ctypes, errno, json, os, socket, sys

lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)

class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]

OPS = {"NE": 1, "LT": 2, "LE": 3, "EQ": 4, "GE": 5, "GT": 6, "MASKED_EQ": 7}
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
lib.seccomp_init.restype = ctypes.c_void_p
lib.seccomp_init.argtypes = [ctypes.c_uint32]
lib.seccomp_rule_add_array.argtypes = [
    ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Compare)]
lib.seccomp_load.argtypes = [ctypes.c_void_p]
profile = json.load(open(sys.argv[1]))
assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
context = lib.seccomp_init(ERRNO | profile["defaultErrnoRet"])
for rule in profile["syscalls"]:
    action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule["errnoRet"]
    compared = [
        Compare(each["index"], OPS[each["op"].removeprefix("SCMP_CMP_")], each["value"], each.get("valueTwo", 0))
        for each in rule.get("args", ())]
    for name in rule["names"]:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # a name that this libseccomp does not know
            array = (Compare * len(compared))(*compared)
            assert lib.seccomp_rule_add_array(context, action, number, len(compared), array) == 0, name
assert lib.seccomp_load(context) == 0

libc = ctypes.CDLL(None, use_errno=True)

def is_call_refused(call, *arguments):
    ctypes.set_errno(0)
    return getattr(libc, call)(*arguments) == -1 and ctypes.get_errno() == errno.EPERM

def is_socket_denied(family, kind, protocol=0):
    try:
        socket.socket(family, kind, protocol).close()
    except PermissionError:
        return True
    return False

found = {
    "mount": is_call_refused("mount", b"none", b"/mnt", b"tmpfs", 0, None),
    "ptrace": is_call_refused("ptrace", 0, 0, 0, 0),
    "a new mount namespace": is_call_refused("unshare", 0x20000),
    "a new pid namespace": is_call_refused("unshare", 0x10000000 | 0x20000000),
    "setns": is_call_refused("setns", 0, 0),
    "io_uring": is_call_refused("syscall", 425, 8, None),
    "a call of no kernel": is_call_refused("syscall", 999),
    "packet sockets": is_socket_denied(socket.AF_PACKET, socket.SOCK_RAW),
    "nftables": is_socket_denied(socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "the kernel's crypto": is_socket_denied(socket.AF_ALG, socket.SOCK_SEQPACKET),
}
server = socket.create_server(("127.0.0.1", 0))
server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
socket.create_connection(server.getsockname()).close()
socket.socketpair()
import asyncio, subprocess, threading
import numpy, onnxruntime
from harness.models import engine_cases

async def child():
    done = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=subprocess.PIPE)
    return (await done.communicate())[0]

assert asyncio.run(child()) == b"1\\n"
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
session = onnxruntime.InferenceSession(engine_cases.summing(), providers=["CPUExecutionProvider"])
left = os.fork()
if not left:  # a worker leaves the network: EPERM of its kernel, not of the filter, where user namespaces are off
    done = libc.unshare(0x10000000 | 0x40000000)
    os._exit(0 if done == 0 else 1)
found["user and network namespaces are let through"] = os.waitstatus_to_exitcode(os.waitpid(left, 0)[1]) == 0
print(json.dumps(found))
"""


def names(profile: dict[str, Any], action: str) -> set[str]:
    return {name for rule in profile["syscalls"] if rule["action"] == action for name in rule["names"]}


def test_the_file_is_what_the_generator_makes_and_refuses_by_default() -> None:
    profile = json.loads(FILE.read_text())
    assert profile == MADE["profile"]()
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = names(profile, "SCMP_ACT_ALLOW")
    assert not allowed & {*MADE["REFUSED"]}
    assert {*NEEDED} <= allowed
    assert names(profile, "SCMP_ACT_ERRNO") == {"clone3"}


def test_a_process_under_it_does_what_a_worker_does_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(FILE)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT / "tests",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert {what for what, held in json.loads(done.stdout).items() if not held} == set()
