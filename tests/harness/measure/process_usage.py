"""What a process takes of the machine: processor time of its main thread, which runs its event loop, and memory."""

from pathlib import Path


class Usage:
    def __init__(self, pid: int) -> None:
        self._process = Path("/proc") / str(pid)

    def loop_s(self) -> float:
        """Processor time of the main thread so far."""
        return int((self._process / "task" / self._process.name / "schedstat").read_text().split()[0]) / 1e9

    def reset_peak(self) -> int:
        """The bytes that it holds now."""
        (self._process / "clear_refs").write_text("5")
        return self._bytes("VmRSS")

    def peak(self) -> int:
        """The most bytes that it held since `reset_peak`."""
        return self._bytes("VmHWM")

    def _bytes(self, name: str) -> int:
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
