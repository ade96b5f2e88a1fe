"""What a coordinator of either role needs of its machine: ports, a store, a folder of its own."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import structlog

from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.main.options import Address
from shoal.coordinator.ports import OpenStore, Store, StoreOptions
from shoal.coordinator.telemetry.metrics import PrometheusMeter
from shoal.types.codes import Code, ShoalError, refuse
from shoal.wire.scrape import Guard

STOP_S: Final = 2.0
"""Calls that run when a stop is asked for may end within this time."""
REFRESH_S: Final = 3600.0
AGAIN_S: Final = 1.0
RESTORING: Final = "restoring"
"""Where the store says that a backup is being put into it."""

log: Final = structlog.get_logger("shoal.coordinator")


async def keep_running(run: Callable[[], Awaitable[None]]) -> None:
    """An unforeseen error in a step must not take the API away, by which it can be mended, nor end the step for good
    without a word."""
    while True:
        try:
            await run()
            return
        except Exception:
            log.exception("a step failed unforeseen; it is tried again")
            await asyncio.sleep(AGAIN_S)


async def refresh(*due: Callable[[], None]) -> None:
    """The certificates that this machine makes for itself, before their time is over; each whatever became of the
    others."""
    while True:
        await asyncio.sleep(REFRESH_S)
        for each in due:
            try:
                each()
            except Exception:
                log.exception("a certificate was not made anew; it is tried again", again_s=REFRESH_S)


async def back_up(store: OpenStore, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            copy = await store.backup()
            if copy is not None:
                log.debug("store copied", copy=copy.name)
        except (ShoalError, OSError) as error:
            log.error("store not copied", refusal=str(error))


def reserved(address: Address) -> tuple[Address, socket.socket | None]:
    """Where any port will do, one that stays this process's, whichever of its servers listens; keep the socket."""
    if address.port:
        return address, None
    place = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        place.bind((address.host, 0))
    except OSError as cause:
        place.close()
        raise cannot_listen(address) from cause
    return Address(address.host, place.getsockname()[1]), place


def listen(server: Any, address: Address, credentials: grpc.ServerCredentials) -> Address:
    try:
        port = server.add_secure_port(str(address), credentials)
    except RuntimeError as cause:
        raise cannot_listen(address) from cause
    if port == 0:
        raise cannot_listen(address)
    return Address(address.host, port)


def serve_metrics(meter: PrometheusMeter, address: Address, scraped: Guard) -> Address:
    try:
        port = meter.serve(address.host, address.port, scraped)
    except OSError as cause:
        raise cannot_listen(address) from cause
    return Address(address.host, port)


async def serve_models(server: ModelServer, address: Address) -> int:
    try:
        return await server.start(address.host, address.port)
    except OSError as cause:
        raise cannot_listen(address) from cause


def cannot_listen(address: Address) -> ShoalError:
    return refuse(
        Code.FIELD_INVALID, f"cannot listen at {address}", "an address of this machine that is free", "choose another"
    )


def private(folder: Path) -> None:
    """Raises ShoalError(STORE_UNAVAILABLE)."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE, f"{folder}: {cause.strerror}", "a directory of its own", "choose another --data-dir"
        ) from cause


class StoreChoice(Protocol):
    """store: the name of an entry point."""

    @property
    def store(self) -> str: ...
    @property
    def store_options(self) -> StoreOptions: ...


async def check_whole(store: Store) -> None:
    """Raises ShoalError(STORE_UNAVAILABLE) while a backup is being put back, and when that was cut off."""
    if (mark := await store.read(RESTORING)) is not None:
        name = mark.value.decode(errors="replace")
        raise refuse(
            Code.STORE_UNAVAILABLE,
            f"a store into which {name:.200} was being restored",
            "a whole one",
            "wait for `shoal-coordinator restore`, or run it again if it was cut off",
        )


async def open_store(config: StoreChoice) -> OpenStore:
    """Raises ShoalError."""
    found = {entry.name: entry for entry in entry_points(group="shoal.stores")}
    if config.store not in found:
        raise refuse(
            Code.FIELD_INVALID, f"store {config.store!r}", f"one of {', '.join(sorted(found))}", "install its package"
        )
    opened: OpenStore = await found[config.store].load().configured(config.store_options)
    return opened


def dialled(*addresses: Address) -> tuple[str, ...]:
    return tuple(address.host for address in addresses if not address.is_any)
