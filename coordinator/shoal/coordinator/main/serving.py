"""What both roles need of their machine: ports, a store, a private folder."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import structlog

from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.api.request_limits import RequestLimitInterceptor
from shoal.coordinator.main.options import store_kinds
from shoal.coordinator.ports import OpenStore, Store, StoreOptions
from shoal.coordinator.telemetry.metrics import PrometheusMeter
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.wire.limits import LINK_BYTES, enrol_options, server_options
from shoal.wire.metrics_access import RegionMetricsAccess

STOP_S: Final = 2.0
"""Seconds that running calls have to end after a stop."""
REFRESH_S: Final = 3600.0
RETRY_S: Final = 1.0
RESTORE_KEY: Final = "restoring"
"""Key of the record that marks a restore in progress."""

log: Final = structlog.get_logger("shoal.coordinator")


async def keep_running(run: Callable[[], Awaitable[None]]) -> None:
    """Restarts `run` after an unexpected error. The error must neither take down the API, which can repair its cause,
    nor silently end a background task."""
    while True:
        try:
            await run()
            return
        except Exception:
            log.exception("task_failed")
            await asyncio.sleep(RETRY_S)


async def refresh_certificates(*refreshers: Callable[[], None]) -> None:
    """Renews the certificates that this machine makes for itself before they expire; one's failure does not stop the
    others."""
    while True:
        await asyncio.sleep(REFRESH_S)
        for each in refreshers:
            try:
                each()
            except Exception:
                log.exception("certificate_renewal_failed", retry_s=REFRESH_S)


async def back_up(store: OpenStore, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            copy = await store.backup()
            if copy is not None:
                log.debug("store_copied", file=copy.name)
        except (ShoalError, OSError) as error:
            log.error("store_copy_failed", error=str(error))


def reserve_port(address: HostPort, option: str) -> tuple[HostPort, socket.socket | None]:
    """Holds a port for whichever of this process's servers listens on it, and finds one for port 0. The port is held
    while the socket is open, which never listens itself; None: it could not be held, and the server says why, if it
    cannot listen either. option: as in `cannot_listen`.

    Raises ShoalError(FIELD_INVALID) where another server listens there or is about to, of this process too.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    if address.port:
        _check_is_free(address, family, option)
    place = socket.socket(family)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        place.bind((address.host, address.port))
    except OSError as cause:
        place.close()
        if address.port:
            return address, None  # not of this machine; or connections of a server that shares no port ended just now
        raise cannot_listen(address, option) from cause
    return HostPort(address.host, place.getsockname()[1]), place


def _check_is_free(address: HostPort, family: socket.AddressFamily, option: str) -> None:
    """gRPC listens with SO_REUSEPORT: without this two coordinators of one user would share a port, and each would
    answer a part of the other's callers. What else is wrong with the address, the server says when it listens."""
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended hold no port
        try:
            probe.bind((address.host, address.port))
        except OSError as cause:
            if cause.errno == errno.EADDRINUSE:
                raise cannot_listen(address, option) from cause


def server_for_members(guard: Authorisation) -> Any:
    """A server for clients with certificates. The guard authorises the caller, then checks the request's limits; only
    then is it parsed."""
    return grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))


def server_for_strangers() -> Any:
    """A server for the port where tokens are redeemed."""
    return grpc.aio.server(interceptors=[RequestLimitInterceptor()], options=enrol_options())


def listen(server: Any, address: HostPort, credentials: grpc.ServerCredentials, option: str) -> HostPort:
    """option: as in `cannot_listen`. Raises ShoalError(FIELD_INVALID)."""
    try:
        port = server.add_secure_port(str(address), credentials)
    except RuntimeError as cause:
        raise cannot_listen(address, option) from cause
    if port == 0:
        raise cannot_listen(address, option)
    return HostPort(address.host, port)


def serve_metrics(meter: PrometheusMeter, address: HostPort, guard: RegionMetricsAccess) -> HostPort:
    try:
        port = meter.serve(address.host, address.port, guard)
    except OSError as cause:
        raise cannot_listen(address, "--metrics") from cause
    return HostPort(address.host, port)


async def serve_models(server: ModelServer, address: HostPort) -> int:
    try:
        return await server.start(address.host, address.port)
    except OSError as cause:
        raise cannot_listen(address, "--models") from cause


def cannot_listen(address: HostPort, option: str) -> ShoalError:
    """option: of the command line, which sets the address."""
    return refuse(
        Code.FIELD_INVALID,
        f"cannot listen at {address}",
        "an address of this machine that is free",
        f"stop what listens there, or choose another {option}",
    )


def make_private_folder(folder: Path) -> None:
    """Raises ShoalError(STORE_UNAVAILABLE)."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE, f"{folder}: {cause.strerror}", "a directory of its own", "choose another --data-dir"
        ) from cause


class StoreConfig(Protocol):
    """The options that `open_store` needs. store: name of an entry point."""

    @property
    def store(self) -> str: ...
    @property
    def store_options(self) -> StoreOptions: ...


async def check_restore_complete(store: Store) -> None:
    """Raises ShoalError(STORE_UNAVAILABLE) while a backup is being restored, and after an interrupted restore."""
    if (mark := await store.read(RESTORE_KEY)) is not None:
        name = mark.value.decode(errors="replace")
        raise refuse(
            Code.STORE_UNAVAILABLE,
            f"a store into which {name:.200} was being restored",
            "a whole one",
            "wait for `shoal-coordinator restore`, or run it again if it was cut off",
        )


async def open_store(config: StoreConfig) -> OpenStore:
    """Opens the store that the options name. Raises ShoalError."""
    return await store_kinds()[config.store].from_options(config.store_options)


def dialable_hosts(*addresses: HostPort) -> tuple[str, ...]:
    return tuple(address.host for address in addresses if not address.is_any)
