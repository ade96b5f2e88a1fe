"""A machine whose wall clock is wrong: processes started with its `environment` see it; time since boot is right."""

from pathlib import Path

from harness.faults.preload import compile_library


class FakeWallClock:
    """Right until `jump`. Needs a C compiler (Debian: gcc, libc6-dev)."""

    def __init__(self, folder: Path, library: Path | None = None, ahead_s: int = 0) -> None:
        """library: `wall.c`, where it was compiled before."""
        self._library = library or compile_library("wall", folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "ahead"
        self.ahead_s = ahead_s
        self.jump(ahead_s)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "SHOAL_CLOCK": str(self._file)}

    def jump(self, ahead_s: int) -> None:
        """From now on the clock is ahead by that many seconds, in running processes as well."""
        self.ahead_s = ahead_s
        fresh = self._file.with_suffix(".new")
        fresh.write_text(str(ahead_s))
        fresh.replace(self._file)
