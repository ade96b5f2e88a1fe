"""What a load frees is returned to the system, whatever it freed before."""

import subprocess
import sys

_CODE = """
import ctypes, gc, sys
from contextlib import nullcontext
from pathlib import Path
from shoal.host.memory import return_at_once

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def block(size):
    found = libc.malloc(size)
    ctypes.memset(found, 1, size)
    return found

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc.free(block(8 << 20))  # from here on glibc keeps what is smaller
before = resident()
with return_at_once() if sys.argv[1] == "at once" else nullcontext():
    pairs = [(block(1 << 20), block(64)) for _ in range(8)]  # a small one is in use above each
    for large, _ in pairs:
        libc.free(large)
    print((resident() - before) >> 20)
"""


def test_large_blocks_are_returned_although_small_ones_follow_them() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", _CODE, how], capture_output=True, check=True, text=True).stdout)
        for how in ("by itself", "at once")
    )
    assert kept >= 6
    assert returned <= 1
