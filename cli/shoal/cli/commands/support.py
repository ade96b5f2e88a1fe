"""`shoal support-bundle`: what somebody else needs for a diagnosis, without secrets."""

import errno
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import click

from shoal.cli.options import SINGULAR, connect, connection
from shoal.cli.redact import redact, redact_flags
from shoal.cli.render.data import as_data
from shoal.cli.render.listings import rows_of
from shoal.cli.render.output import line, note
from shoal.client import RegionClient
from shoal.types.codes import Code, ShoalError, refuse

KINDS: Final = tuple(kind for kind in SINGULAR if kind not in ("tenants", "policies"))
"""Documents are left out because they hold the users' own text: only with --documents."""
LINES: Final = 1000


@click.command("support-bundle")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--documents", is_flag=True, help="With policies and tenants as they were written.")
@connection
def support_bundle(file: Path, documents: bool, context: str, region: str) -> None:
    """Write FILE (.tar.gz): versions, flags, listings, events, doctor's checks, metrics, the newest log lines of the
    coordinator and of every connected node.

    What looks like a secret, or is called like one, is replaced by REDACTED: private keys, tokens, passwords, also in
    URLs. It holds names of nodes and workloads, and addresses: look at it before you send it.
    """
    if not file.parent.is_dir():  # before everything is asked for
        raise refuse(
            Code.CONFLICT, f"no folder {file.parent}", "a new file in one that is there", "choose another name"
        )
    with connect(context, region) as api:
        parts = dict(_bundle_files(api, documents=documents))
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise refuse(Code.CONFLICT, f"{file}: {cause.strerror}", "a new file", "choose another name") from cause
    try:
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as bundle:
            for name, text in parts.items():
                _add(bundle, name, redact(text).encode())
    except OSError as cause:
        file.unlink(missing_ok=True)  # or it would be in the way of another try
        code = Code.DISK_FULL if cause.errno in (errno.ENOSPC, errno.EDQUOT) else Code.SOURCE_UNREACHABLE
        raise refuse(code, f"{file}: {cause.strerror}", "a folder with room for it", "choose another") from cause
    line(f"{file}: {len(parts)} files, {file.stat().st_size} bytes")


def _add(bundle: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(f"shoal-support/{name}")
    info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())  # noqa: TID251 - a person's file
    bundle.addfile(info, io.BytesIO(content))


def _bundle_files(api: RegionClient, *, documents: bool) -> Iterator[tuple[str, str]]:
    """File names and texts. If something cannot be read, its file says why: bundles are made when things are broken."""
    nodes: list[str] = []
    diagnosed = cache(api.diagnostics)

    def coordinator_info() -> str:
        found = diagnosed()
        said = {
            "shoal": version("shoal-orchestrator"),
            "versions": dict(found.versions),
            "flags": redact_flags(found.config),
        }
        return json.dumps(said, indent=1, sort_keys=True)

    def listing(kind: str) -> Callable[[], str]:
        def read_listing() -> str:
            messages = rows_of(api, kind, "", "")
            if kind == "nodes":
                nodes.extend(each.node.name for each in messages if each.liveness == "ready")  # type: ignore[attr-defined]
            return json.dumps([as_data(each) for each in messages], indent=1)

        return read_listing

    kinds = (*KINDS, "tenants", "policies") if documents else KINDS
    wanted: dict[str, Callable[[], str]] = {
        "coordinator.json": coordinator_info,
        "doctor.json": lambda: json.dumps([as_data(check) for check in api.doctor().checks], indent=1),
        "metrics.txt": lambda: diagnosed().metrics,
        "logs/coordinator.log": lambda: _log_text(api, ""),
        **{f"get/{kind}.json": listing(kind) for kind in kinds},
    }
    for name, part in wanted.items():
        yield name, _text_or_refusal(name, part)
    for node in nodes:
        name = f"logs/node-{node}.log"
        yield name, _text_or_refusal(name, lambda node=node: _log_text(api, node))  # type: ignore[misc]


def _log_text(api: RegionClient, node: str) -> str:
    return "".join(f"{text}\n" for text in api.logs(node, lines=LINES))


def _text_or_refusal(name: str, part: Callable[[], str]) -> str:
    note(name)
    try:
        return part()
    except ShoalError as error:
        return f"{error.refusal}\n"
