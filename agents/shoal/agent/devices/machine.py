"""What drivers ask of the machine: small files, their names, vendors' commands and libraries.

All of it goes through `Machine`, so that the answers of real hardware can be recorded (`shoal-agent record`) and
replayed in tests. An answer that is missing, too long or too late is empty: what a device does not tell is unknown.
"""

import ctypes
import importlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

MAX_TEXT: Final = 64 * 1024
"""Bytes of a file that are read. Files of sysfs have a page, 4 KiB."""
MAX_OUTPUT: Final = 256 * 1024
"""Bytes of a command's output that are read."""
MAX_PATHS: Final = 1024
COMMAND_S: Final = 2.0
"""A command that takes longer is killed. Below `devices.process`'s limit of a call."""


class Machine(Protocol):
    def text(self, path: str) -> str:
        """Content of a file; empty if it cannot be read."""
        ...

    def paths(self, pattern: str) -> tuple[str, ...]:
        """Paths that match, sorted."""
        ...

    def run(self, *command: str) -> str:
        """Output of a command, in English; empty if there is none, if it fails, or if it does not end in time."""
        ...

    def library(self, name: str) -> Any:
        """The Python module; None if it cannot be imported."""
        ...


class LiveMachine:
    """This machine."""

    def text(self, path: str) -> str:
        try:
            with Path(path).open("rb") as file:
                return file.read(MAX_TEXT).decode(errors="replace")
        except OSError:
            return ""

    def paths(self, pattern: str) -> tuple[str, ...]:
        return tuple(sorted(map(str, Path("/").glob(pattern.lstrip("/"))))[:MAX_PATHS])

    def run(self, *command: str) -> str:
        ends_at = time.monotonic() + COMMAND_S  # noqa: TID251 - a driver is a process of its own
        environment = {"LANG": "C", "LC_ALL": "C", "PATH": os.environ.get("PATH", "")}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        except OSError:
            return ""
        with process:
            output = _read_until(process, ends_at)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what it started
            is_whole = process.wait() == 0 and len(output) <= MAX_OUTPUT
        return output.decode(errors="replace") if is_whole else ""

    def library(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


def _read_until(process: "subprocess.Popen[bytes]", ends_at: float) -> bytes:
    """The output up to its end, to `ends_at`, or to more than MAX_OUTPUT."""
    assert process.stdout is not None
    output = b""
    while len(output) <= MAX_OUTPUT:
        left_s = ends_at - time.monotonic()  # noqa: TID251
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            break
        chunk = os.read(process.stdout.fileno(), MAX_OUTPUT)
        if not chunk:
            try:
                process.wait(max(0.0, left_s))
            except subprocess.TimeoutExpired:
                pass
            break
        output += chunk
    return output


class RecordingMachine:
    """Another machine, with all that it answered in `answers`, by what was asked: `text PATH`, `paths PATTERN`,
    `run COMMAND`, and `FUNCTION(ARGUMENT, ..)` of a library."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.answers: dict[str, Any] = {}

    def text(self, path: str) -> str:
        return self._keep(f"text {path}", self._machine.text(path))

    def paths(self, pattern: str) -> tuple[str, ...]:
        found = self._machine.paths(pattern)
        self.answers[f"paths {pattern}"] = list(found)
        return found

    def run(self, *command: str) -> str:
        return self._keep(f"run {' '.join(command)}", self._machine.run(*command))

    def library(self, name: str) -> Any:
        module = self._machine.library(name)
        return None if module is None else _RecordingLibrary(module, self.answers)

    def _keep(self, asked: str, answer: str) -> str:
        self.answers[asked] = answer
        return answer


class _RecordingLibrary:
    """A module of functions. Its answers are kept as JSON: a structure as its fields, and a handle as a name by which
    later calls are kept."""

    def __init__(self, module: Any, answers: dict[str, Any]) -> None:
        self._module = module
        self._answers = answers
        self._handles: dict[int, str] = {}
        # Handles are known by their identity, so they must not be freed.
        self._held: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or isinstance(found, type):
            return found
        function: Callable[..., Any] = found

        def call(*arguments: Any) -> Any:
            named = ", ".join(self._handles.get(id(each), str(each)) for each in arguments)
            asked = f"{name}({named})"
            try:
                answer = function(*arguments)
            except Exception as error:
                self._answers[asked] = {"error": getattr(error, "value", str(error))}
                raise
            self._answers[asked] = self._plain(answer)
            return answer

        return call

    def _plain(self, answer: Any) -> Any:
        if answer is None or isinstance(answer, bool | int | float | str):
            return answer
        if isinstance(answer, bytes):
            return answer.decode(errors="replace")
        if isinstance(answer, list | tuple | ctypes.Array):
            return [self._plain(each) for each in answer]
        fields = _fields_of(answer)
        if fields:
            return {name: self._plain(value) for name, value in fields.items()}
        if id(answer) not in self._handles:
            self._held.append(answer)
            self._handles[id(answer)] = f"h{len(self._handles)}"
        return self._handles[id(answer)]


def _fields_of(answer: Any) -> Mapping[str, Any]:
    """Fields of a C structure or union, or attributes of an object; empty for a pointer."""
    names = [each[0] for each in getattr(answer, "_fields_", ())] or list(getattr(answer, "__dict__", ()))
    return {name: getattr(answer, name) for name in names if not name.startswith("_")}


def label(text: object) -> str:
    """What a name or a fact may be: one line of at most 80 printable characters. Older libraries give bytes."""
    plain = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return "".join(each for each in plain if each.isprintable()).strip()[:80]


def number(text: str, base: int = 10) -> int | None:
    """The one number in a text; None if it is anything else, or absurdly long."""
    digits = text.strip()
    try:
        return int(digits, base) if len(digits) <= 20 and digits.isascii() else None
    except ValueError:
        return None


def scaled_number(text: str, factor: float) -> float:
    """The one number in a text, times a factor; NaN if it is anything else."""
    found = number(text)
    return float("nan") if found is None else found * factor
