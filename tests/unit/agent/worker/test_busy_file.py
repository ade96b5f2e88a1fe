"""Whom a worker's end throws suspicion on, and what a full disk may cost: that, and no worker."""

import errno
import os
from pathlib import Path

import pytest

from shoal.agent.worker.busy_file import BUSY_BYTES, map_busy_file


def test_it_has_its_blocks_before_anything_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "worker.busy"
    with path.open("w+b") as file:
        mapped = map_busy_file(file)
        assert os.fstat(file.fileno()).st_blocks * 512 >= BUSY_BYTES
        mapped[:4] = b"a b\0"
    assert path.read_bytes()[:4] == b"a b\0"


def test_on_a_full_disk_a_worker_notes_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "worker.busy"
    with path.open("w+b") as file:
        mapped = map_busy_file(file)
        mapped[:4] = b"a b\0"
    assert len(mapped) == BUSY_BYTES
    assert path.read_bytes() == b"", "of which nobody is suspected before others"
