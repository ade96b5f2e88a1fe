"""What stays of a coordinator's process while stores are opened anew and leaders replaced: its ports, its page of
metrics, what was said of it."""

import asyncio
import json
import os
import platform
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Final

import structlog

from shoal.coordinator.clock import SystemClock, SystemIds
from shoal.coordinator.controllers.logs import paged
from shoal.coordinator.main.options import Address, Config
from shoal.coordinator.main.serving import open_store, private, reserved, serve_metrics
from shoal.coordinator.ports import OpenStore
from shoal.coordinator.telemetry.metrics import Gauges, PrometheusMeter
from shoal.coordinator.telemetry.store import TimedStore
from shoal.types.codes import Refusal, ShoalError
from shoal.wire import logfiles
from shoal.wire.handshake import PemFiles
from shoal.wire.scrape import Guard

RETRY_S: Final = 1.0

log: Final = structlog.get_logger("shoal.coordinator")


def log_of(config: Config) -> Path:
    return config.data_dir / "log" / "coordinator.log"


class Process:
    """role: what it says of itself. links, enrols: where all coordinators listen that share its store."""

    def __init__(self, config: Config, role: str) -> None:
        self.clock, self.ids, self.meter = SystemClock(), SystemIds(), PrometheusMeter()
        (self.link, self._link), (self.enrol, self._enrol) = reserved(config.link), reserved(config.enrol)
        self.region = config.region
        self.revoked: Callable[[str], Refusal | None] = lambda serial: None
        self.gauges: Callable[[], Gauges] = dict
        self._role = role
        self._config = config
        self._advertise = config.advertise
        self.links: Final = config.links or self.link_address
        self.enrols: Final = config.enrols or self.enrol_address
        self._metrics_at = config.metrics
        self._metrics: Address | None = None
        self.meter.observe(lambda: self.gauges())

    @property
    def link_address(self) -> str:
        return str(Address(self._advertise, self.link.port))

    @property
    def enrol_address(self) -> str:
        return str(Address(self._advertise, self.enrol.port))

    @property
    def served(self) -> bool:
        return self._metrics is not None

    def versions(self) -> Mapping[str, str]:
        names = ("shoal-coordinator", "shoal-protos", "shoal-policies", "grpcio", "protobuf", "cryptography", "numpy")
        system, python = platform.platform(), platform.python_version()
        return {**{name: version(name) for name in names}, "python": python, "system": system}

    def flags(self) -> Mapping[str, str]:
        """Values, addresses and names of files: what is in those is never read here."""
        said = {each.name: getattr(self._config, each.name) for each in fields(self._config)}
        return {name: str(value) for name, value in said.items()}

    def metrics(self) -> str:
        return self.meter.text()

    def log(self, lines: int, *, follow: bool) -> AsyncIterator[tuple[str, ...]]:
        """What this process kept of its log."""

        async def read(after: str) -> logfiles.Page:
            kept = sorted(log_of(self._config).parent.glob("*.log*"))
            return await asyncio.to_thread(logfiles.read, kept, after, lines)

        return paged(read, self.clock, follow=follow)

    def say(self, files: PemFiles, **more: object) -> None:
        """One line for whoever started this process, when it serves for the first time."""
        if self.served:
            return
        scraped = Guard(
            self.region, files.certificate, files.key, files.ca, self.clock.wall, lambda serial: self.revoked(serial)
        )
        self._metrics = serve_metrics(self.meter, self._metrics_at, scraped)
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


Stand = Callable[[Config, Process, OpenStore, asyncio.Event], Awaitable[None]]
"""Serves from one store until it is told to stop, or must read its state again."""


def stop_signals() -> asyncio.Event:
    """Set by SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def serve(config: Config, role: str, stand: Stand, stopping: asyncio.Event) -> None:
    """Until `stopping`. Each time that `stand` returns before, the store is opened anew: what was remembered of it no
    longer counts. Raises ShoalError when it cannot be opened, or served from, at the start."""
    private(config.data_dir)
    process = Process(config, role)
    store = await _opened(config, process)
    while True:
        try:
            await stand(config, process, store, stopping)
        except ShoalError as error:
            if not process.served:
                raise
            log.error("does not serve", refusal=str(error))
            await first_of(stopping.wait(), asyncio.sleep(RETRY_S))
        finally:
            await store.close()
        while not stopping.is_set():
            try:
                store = await _opened(config, process)
                break
            except ShoalError as error:
                log.error("store not opened", refusal=str(error))
                await first_of(stopping.wait(), asyncio.sleep(RETRY_S))
        if stopping.is_set():
            return


async def _opened(config: Config, process: Process) -> OpenStore:
    return TimedStore(await open_store(config), process.clock, process.meter.store_took)


async def first_of(*waits: Awaitable[object]) -> None:
    """Until the first is done, or failed, which is logged. Futures among them are left as they are, what is only waited
    for here is cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("ended by a failure", failure=repr(error))
    finally:
        for task, each in zip(tasks, waits, strict=True):
            if task is not each:
                task.cancel()
