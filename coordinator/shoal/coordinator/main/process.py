"""The parts of a coordinator's process that outlive its store and its terms as a leader: ports, metrics page and
log."""

import asyncio
import json
import os
import platform
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.queries.logs import read_pages
from shoal.coordinator.main.options import CoordinatorConfig
from shoal.coordinator.main.serving import make_private_folder, open_store, reserve_port, serve_metrics
from shoal.coordinator.ports import OpenStore
from shoal.coordinator.telemetry.metrics import PrometheusMeter
from shoal.coordinator.telemetry.store import TimedStore
from shoal.host import log_files
from shoal.host.event_wait import wait_or_timeout
from shoal.types.address import HostPort
from shoal.types.codes import Refusal, ShoalError
from shoal.types.metric import MetricReadings
from shoal.wire.handshake import PemFiles
from shoal.wire.metrics_access import RegionMetricsAccess

RETRY_S: Final = 1.0
CANCEL_AGAIN_S: Final = 5.0
"""Longer than what a task closes in good order takes: `CLOSE_S` of a broker's connection is 1 s."""
METRICS: Final = {"region": metrics.REGION, "federation": metrics.FEDERATION}
"""By role."""

log: Final = structlog.get_logger("shoal.coordinator")


def log_of(config: CoordinatorConfig) -> Path:
    return config.data_dir / "log" / "coordinator.log"


class CoordinatorProcess:
    """role: as the process reports it. link_addresses, enrol_addresses: of all coordinators on the same store."""

    def __init__(self, config: CoordinatorConfig, role: str) -> None:
        self.clock, self.ids, self.meter = CoordinatorClock(), SystemIds(), PrometheusMeter(METRICS[role])
        self._reserved_ports: list[socket.socket] = []
        try:
            self.link = self._reserve(config.link, "--link")
            self.enrol = self._reserve(config.enrol, "--enrol")
        except ShoalError:
            self.close()
            raise
        self.region = config.region
        self.check_serial: Callable[[str], Refusal | None] = lambda serial: None
        self.readings: Callable[[], MetricReadings] = dict
        """What is read at each scrape."""
        self._role = role
        self._config = config
        self._advertise = config.advertise
        self.link_addresses: Final = config.links or self.link_address
        self.enrol_addresses: Final = config.enrols or self.enrol_address
        self._metrics_address = config.metrics
        self._metrics: HostPort | None = None
        self.meter.read_at_scrape(lambda: self.readings())

    def _reserve(self, address: HostPort, option: str) -> HostPort:
        """The address with its port, which is held until `close`."""
        found, place = reserve_port(address, option)
        if place is not None:
            self._reserved_ports.append(place)
        return found

    def close(self) -> None:
        """Lets go of the ports. Call it after the servers have stopped."""
        for each in self._reserved_ports:
            each.close()

    @property
    def link_address(self) -> str:
        return str(HostPort(self._advertise, self.link.port))

    @property
    def enrol_address(self) -> str:
        return str(HostPort(self._advertise, self.enrol.port))

    @property
    def has_served(self) -> bool:
        return self._metrics is not None

    def versions(self) -> Mapping[str, str]:
        ours = (f"shoal-orchestrator-{part}" for part in ("coordinator", "protos", "policies"))
        names = (*ours, "grpcio", "protobuf", "cryptography", "numpy")
        system, python = platform.platform(), platform.python_version()
        return {**{name: version(name) for name in names}, "python": python, "system": system}

    def flags(self) -> Mapping[str, str]:
        """Values, addresses and file names; the content of files is never read here."""
        said = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
        return {name: str(value) for name, value in said.items()}

    def metrics(self) -> str:
        return self.meter.text()

    def log(self, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]:
        """The lines that this process kept of its log."""

        async def read(after: str) -> log_files.LogPage:
            kept = sorted(log_of(self._config).parent.glob("*.log*"))
            return await asyncio.to_thread(log_files.read, kept, after, lines)

        return read_pages(read, self.clock, follow=follow)

    def announce(self, files: PemFiles, **more: object) -> None:
        """Prints one line for the parent process when it serves for the first time."""
        if self.has_served:
            return
        scraped = RegionMetricsAccess(
            self.region,
            files.certificate,
            files.key,
            files.ca,
            self.clock.wall,
            lambda serial: self.check_serial(serial),
        )
        self._metrics = serve_metrics(self.meter, self._metrics_address, scraped)
        line = {
            "event": "ready",
            "role": self._role,
            "region": self.region,
            "pid": os.getpid(),
            "link": self.link_address,
            "enrol": self.enrol_address,
            "metrics": str(self._metrics),
        }
        print(json.dumps({**line, **more}), flush=True)


ServeStore = Callable[[CoordinatorConfig, CoordinatorProcess, OpenStore, asyncio.Event], Awaitable[None]]
"""Serves from one store until it is stopped, or must read its state again."""


def stop_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def serve(config: CoordinatorConfig, role: str, serve_store: ServeStore, stopping: asyncio.Event) -> None:
    """Serves until `stopping`. Whenever `serve_store` returns before, opens the store again, because cached state is no
    longer valid. Raises ShoalError if the store cannot be opened, or served from, at the start."""
    make_private_folder(config.data_dir)
    process = CoordinatorProcess(config, role)
    try:
        await _serve_stores(config, process, serve_store, stopping)
    finally:
        process.close()


async def _serve_stores(
    config: CoordinatorConfig, process: CoordinatorProcess, serve_store: ServeStore, stopping: asyncio.Event
) -> None:
    store = await _open_timed_store(config, process)
    while True:
        try:
            await serve_store(config, process, store, stopping)
        except ShoalError as error:
            if not process.has_served:
                raise
            log.error("serving_failed", code=error.code, error=str(error))
            await wait_or_timeout(stopping, RETRY_S)
        finally:
            await store.close()
        while not stopping.is_set():
            try:
                store = await _open_timed_store(config, process)
                break
            except ShoalError as error:
                log.error("store_open_failed", code=error.code, error=str(error))
                await wait_or_timeout(stopping, RETRY_S)
        if stopping.is_set():
            return


async def _open_timed_store(config: CoordinatorConfig, process: CoordinatorProcess) -> OpenStore:
    return TimedStore(await open_store(config), process.clock, process.meter.observe_store)


async def wait_for_any(*waits: Awaitable[object]) -> None:
    """Returns when the first wait is done. A failed wait counts as done and is logged. Futures among them are left
    alone; coroutines are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("task_failed", error=repr(error))
    finally:
        for task, each in zip(tasks, waits, strict=True):
            if task is not each:
                task.cancel()


async def cancel_all(tasks: Collection[asyncio.Task[None]], again_s: float = CANCEL_AGAIN_S) -> None:
    """Cancels tasks, again where one goes on, and returns when all have ended. What they raise is dropped.

    Once is not enough: a library may lose a cancellation (`asyncio.wait_for` does, in Python 3.11), and a coordinator
    that waits for such a task neither leads nor stands for election.
    """
    left = {each for each in tasks if not each.done()}
    while left:
        for each in left:
            each.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
        if left:
            log.warning("task_not_cancelled", tasks=sorted(each.get_name() for each in left))
    await asyncio.gather(*tasks, return_exceptions=True)
