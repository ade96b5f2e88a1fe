"""What a power cut leaves of real file operations.

`Platter` records what code under test asks of the operating system (through `os`, as `pathlib` does) below one folder.
`after_cut` builds the folder as a disk may hold it had the power gone after the first `n` operations: names as of the
last flush of the directory or any later moment, bytes as of the last flush of the file and any part of the rest, the
last written page torn.
"""

import os
import random  # noqa: TID251 - seeded, for choosing what a power cut loses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


@dataclass
class _File:
    written: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


class Platter:
    """Operations are numbered from 0; `count` is how many there were."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.operations: list[tuple[Any, ...]] = []
        self._paths: dict[int, str] = {}
        for name in ("open", "write", "fsync", "close", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    @property
    def count(self) -> int:
        return len(self.operations)

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            result = real(*arguments, **keywords)
            self._record(name, arguments, result)
            return result

        return call

    def _record(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        match name:
            case "open" if self._ours(arguments[0]):
                self._paths[result] = os.fspath(arguments[0])
                if arguments[1] & os.O_CREAT:
                    self.operations.append(("open", Path(arguments[0]).name, bool(arguments[1] & os.O_TRUNC)))
            case "write" if arguments[0] in self._paths:
                name_ = Path(self._paths[arguments[0]]).name
                self.operations.append(("write", name_, bytes(arguments[1][:result])))
            case "fsync" if arguments[0] in self._paths:
                path = Path(self._paths[arguments[0]])
                self.operations.append(("flush folder",) if path == self.folder else ("flush", path.name))
            case "close":
                self._paths.pop(arguments[0], None)
            case "replace" if self._ours(arguments[0]):
                self.operations.append(("rename", Path(arguments[0]).name, Path(arguments[1]).name))
            case "unlink" if self._ours(arguments[0]):
                self.operations.append(("unlink", Path(arguments[0]).name))

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(self.folder)

    def after_cut(self, operations: int, chance: random.Random, where: Path) -> None:
        """Writes the folder into `where`, which must be empty."""
        names: dict[str, _File] = {}
        kept = [dict(names)]
        for operation in self.operations[:operations]:
            match operation:
                case ("open", str(name), bool(truncate)):
                    if name not in names:
                        names[name] = _File()
                        kept.append(dict(names))
                    elif truncate:
                        names[name].written.clear()
                case ("write", str(name), bytes(data)):
                    names[name].written += data
                case ("flush", str(name)):
                    names[name].flushed = bytes(names[name].written)
                case ("rename", str(old), str(new)):
                    names[new] = names.pop(old)
                    kept.append(dict(names))
                case ("unlink", str(name)):
                    del names[name]
                    kept.append(dict(names))
                case ("flush folder",):
                    kept = [dict(names)]
        for name, file in chance.choice(kept).items():
            (where / name).write_bytes(_survives(file, chance))


def _survives(file: _File, chance: random.Random) -> bytes:
    if bytes(file.written) == file.flushed:
        return file.flushed
    if not file.written.startswith(file.flushed):  # overwritten and not flushed: the old bytes, or a part of the new
        return file.flushed if chance.random() < 0.5 else bytes(file.written[: chance.randint(0, len(file.written))])
    left = bytearray(file.written[: chance.randint(len(file.flushed), len(file.written))])
    for at in range(max(len(file.flushed), len(left) - PAGE), len(left)):
        if chance.random() < 0.01:
            left[at] ^= 0xFF
    return bytes(left)
