"""A process that is not Shoal's, and takes memory of the same machine: `ForeignMemory`, and what runs in it."""

import mmap
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

BLOCK: Final = 2**20
_TRIES: Final = 4


class ForeignMemory:
    """Holds as much as it is told, whatever it is. `free_bytes` says what the machine has left."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._blocks = 0
        self._process = self._start()

    def leave(self, free_bytes: int) -> int:
        """Grow or shrink until the machine has so much left, to a MiB, as far as this process can. Returns what is
        left."""
        for _ in range(_TRIES):
            apart = round((self._free_bytes() - free_bytes) / BLOCK)
            if apart == 0 or not self._hold(max(0, self._blocks + apart)):
                break
        return self._free_bytes()

    def hold_nothing(self) -> None:
        self._hold(0)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def revive(self) -> None:
        """After it was killed: another one, which holds nothing."""
        self.close()
        self._blocks, self._process = 0, self._start()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _hold(self, blocks: int) -> bool:
        """False if it died of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{blocks}\n")
            self._process.stdin.flush()
            if self._process.stdout.readline():
                self._blocks = blocks
                return True
        self._process.wait()
        return False

    @staticmethod
    def _start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


def _hold_blocks() -> None:
    """Reads numbers of blocks, one a line; answers each once so many are resident."""
    held = list[mmap.mmap]()
    for line in sys.stdin:
        wanted = int(line)
        while len(held) > wanted:
            held.pop().close()
        while len(held) < wanted:
            block = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block.write(b"\1" * BLOCK)
            held.append(block)
        print(wanted, flush=True)


if __name__ == "__main__":
    _hold_blocks()
