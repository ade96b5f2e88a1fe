"""Contexts: which region to call, and as whom. One file, `contexts.json`, and a folder of PEM files for each."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import check_name

NAMED_MOST: Final = 5
"""Contexts that a refusal names; `shoal context ls` has all."""


@dataclass(frozen=True, slots=True)
class Context:
    """Which region to call, and as whom."""

    # Unique in contexts.json.
    name: str
    # Region, or the federation's name.
    region: str
    # host:port of the region's API; several are separated by commas.
    address: str
    # Folder of cert.pem, key.pem and ca.pem.
    folder: str
    # host:port of a gateway's data port; empty: ask the coordinator.
    gateway: str = ""
    # Tenant of the workloads that commands name.
    tenant: str = "default"
    # host:port where the certificate is renewed; empty: something else keeps the files fresh.
    enrolment: str = ""
    # host:port of the region's dashboard from here; empty: ask the coordinator.
    dashboard: str = ""

    @property
    def certificate(self) -> Path:
        return Path(self.folder) / "cert.pem"

    @property
    def key(self) -> Path:
        return Path(self.folder) / "key.pem"

    @property
    def ca(self) -> Path:
        return Path(self.folder) / "ca.pem"


def config_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """SHOAL_HOME, else the user's configuration folder."""
    if found := environment.get("SHOAL_HOME"):
        return Path(found)
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "shoal"


@dataclass(frozen=True, slots=True)
class _ContextFile:
    contexts: tuple[Context, ...]
    current: str


class Contexts:
    """The user's contexts in `folder`, which may be moved or mounted elsewhere together with the files in it."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or config_folder()
        self._file = self.folder / "contexts.json"

    def all(self) -> tuple[Context, ...]:
        return self._read().contexts

    @property
    def current(self) -> str:
        return self._read().current

    def get(self, name: str = "") -> Context:
        """By name; else the current one. Raises ShoalError(CONTEXT_UNKNOWN)."""
        book = self._read()
        wanted = name or os.environ.get("SHOAL_CONTEXT") or book.current
        for context in book.contexts:
            if context.name == wanted:
                return context
        unknown = f"no context {wanted!r:.80}" if wanted else "no context is in use"
        if book.contexts:
            names = [context.name for context in book.contexts]
            said = ", ".join(names[:NAMED_MOST]) + (", .." if len(names) > NAMED_MOST else "")
            remedy = "shoal context ls" if wanted else f"shoal context use {names[0]}"
            raise refuse(Code.CONTEXT_UNKNOWN, unknown, f"one of {said}", remedy)
        raise refuse(
            Code.CONTEXT_UNKNOWN,
            unknown,
            "a region to talk to; none is known yet",
            "shoal dev up, or shoal context login --coordinator HOST:PORT --token TOKEN; "
            "on a coordinator's machine shoal context add DATA_DIR/operator",
        )

    def save(self, context: Context, *, use: bool = True) -> None:
        """Adds or replaces the context of that name."""
        check_name(context.name, "context")
        book = self._read()
        contexts = {other.name: other for other in book.contexts} | {context.name: context}
        current = context.name if use or not book.current else book.current
        self._write(_ContextFile(tuple(contexts.values()), current))

    def use(self, name: str) -> Context:
        """Raises ShoalError(CONTEXT_UNKNOWN)."""
        context = self.get(name)
        self._write(replace(self._read(), current=context.name))
        return context

    def remove(self, name: str) -> None:
        """No error when there is none of that name."""
        book = self._read()
        rest = tuple(context for context in book.contexts if context.name != name)
        current = book.current if book.current != name else (rest[0].name if rest else "")
        self._write(_ContextFile(rest, current))

    def _read(self) -> _ContextFile:
        try:
            if not self._file.exists():
                return _ContextFile((), "")
            data = json.loads(self._file.read_text())
            contexts = tuple(Context(**entry) for entry in data["contexts"])
            return _ContextFile(
                tuple(replace(one, folder=str(self.folder / one.folder)) for one in contexts), str(data["current"])
            )
        except PermissionError as cause:
            raise _denied(cause) from cause
        except (ValueError, KeyError, TypeError) as cause:
            raise refuse(
                Code.STATE_CORRUPT,
                f"{self._file}: {cause}",
                "the file that shoal wrote",
                "move it away and log in again",
            ) from cause

    def _write(self, book: _ContextFile) -> None:
        try:
            self._replace_file(book)
        except PermissionError as cause:
            raise _denied(cause) from cause

    def _replace_file(self, book: _ContextFile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        contexts = [replace(one, folder=self._relative(one.folder)) for one in book.contexts]
        data = {"current": book.current, "contexts": [asdict(context) for context in contexts]}
        write_private(self._file, json.dumps(data, indent=1).encode())

    def _relative(self, folder: str) -> str:
        path = Path(folder)
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else folder


def _denied(cause: PermissionError) -> ShoalError:
    return refuse(
        Code.SOURCE_UNREACHABLE,
        f"{cause.filename}: {cause.strerror}",
        "contexts that this user may read and write",
        "run this as the user who owns them, or have others: SHOAL_HOME=FOLDER",
    )
