"""A driver in a process of its own, so that a call that hangs, crashes or lies costs its devices and nothing else.

The process is asked in turn: it may not answer two calls at once. What it answered last is what the supervisor reads,
without waiting. When a call fails, the process is killed and started again after a while; until it answers, all its
devices are DEVICE_UNREACHABLE.
"""

import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog

from shoal.agent.devices.calls import MAX_LINE, DriverAnswer, DriverCall, DriverMethod, FoundDevice
from shoal.agent.devices.topology import MAX_NUMA_NODE
from shoal.agent.driver_port import DeviceAccess, DriverOptions
from shoal.agent.packing import pack, unpack
from shoal.agent.ports import AgentClock
from shoal.agent.timeouts import within
from shoal.host.event_wait import wait_or_timeout
from shoal.types.backoff import delay
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Device, DeviceLink, Reading
from shoal.types.readings import check_figures, with_unknown_for_absurd
from shoal.types.units import Elapsed, Seconds, Wall

_log = structlog.get_logger(__name__)

COMMAND: Final = (sys.executable, "-P", "-m", "shoal.agent.devices.serve")
DISCOVER_S: Final = 20.0
"""The longest that a driver may take to start and to find its devices. CUDA takes some seconds to initialise eight
GPUs without its persistence daemon (NVIDIA, Driver Persistence)."""
CALL_S: Final = 5.0
"""The longest that any other call may take. NVML answers within some milliseconds."""
POLL_S: Final = 0.5
"""Least seconds between two readings of a driver's devices, besides what they take."""
MOST_OF_TIME: Final = 0.1
"""Share of the time in which a driver may be reading: a vendor's command takes a core for up to a second."""
POLL_MOST_S: Final = 5.0
"""Most seconds between two readings, however long they take. Heartbeats tell the last one meanwhile."""
RETRY_MOST_S: Final = 3.0
"""The longest pause before a driver is started again: a node has its devices back within 5 s of their driver."""
CLOSE_S: Final = 1.0
"""The longest wait for the end of its output after the process is gone."""
MAX_DEVICES: Final = 64
MAX_LINKS: Final = 2 * MAX_DEVICES
"""Of a device: one to each other device, one to the host, one to a switch, and some more."""
MAX_LOGGED_LINES: Final = 16
"""Lines of a driver's standard error that are logged of a process. The others are read and dropped, and so are all of
one that is started after another has failed."""


class DriverFailed(Exception):
    """The process did not answer a call as a driver does; why, in words."""


@dataclass(slots=True)
class _SleepOrder:
    """The last order to put a device to sleep, or to wake it."""

    # True: it sleeps.
    asleep: bool
    # When the device can run something. None: the driver has not confirmed the order.
    ready_at: Elapsed | None


class DriverProcess:
    """Implements `DeviceDriver` with what the process of the driver `name` answered last.

    `on_devices` is called when it finds devices that it had not found before.
    """

    def __init__(
        self,
        name: str,
        factory: str,
        options: DriverOptions,
        clock: AgentClock,
        on_devices: Callable[[], None],
    ) -> None:
        """`factory` is the `module:class` of the driver."""
        self.name = name
        self._factory = factory
        self._options = options
        self._clock = clock
        self._on_devices = on_devices
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: asyncio.Task[None] | None = None
        self._devices: dict[str, FoundDevice] = {}
        self._answers: dict[str, Reading | Refusal] = {}
        # By device: figures that once could not be true, each of which is logged once.
        self._absurd: dict[str, set[str]] = {}
        self._sleep: dict[str, _SleepOrder] = {}
        self._is_order_due = asyncio.Event()
        self._has_started = asyncio.Event()
        # Why the driver does not answer, and since when. None: it does.
        self._failure: tuple[str, Wall] | None = None
        # Why it cannot run with its options. None: it can.
        self._invalid: Refusal | None = None

    # what the supervisor reads

    @property
    def is_silent(self) -> bool:
        """Whether the driver did not answer when it was called last."""
        return self._failure is not None

    def discover(self) -> tuple[Device, ...]:
        """All devices that the driver has found since the agent was started."""
        return tuple(each.device for each in self._devices.values())

    def read(self, device: str) -> Reading:
        """The newest reading. Raises ShoalError(DEVICE_UNREACHABLE), and what the driver raised."""
        self._require_answers()
        answer = self._answers.get(device)
        if answer is None:
            raise refuse(Code.DEVICE_UNREACHABLE, f"{device!r:.80} was not read yet", "a reading", "")
        if isinstance(answer, Refusal):
            raise ShoalError(answer)
        return answer

    def access(self, device: str) -> DeviceAccess:
        found = self._devices.get(device)
        return found.access if found is not None else DeviceAccess()

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        """As in the port; the driver is told later. Until it has confirmed that the device wakes, this returns the time
        that waking takes. Raises ShoalError(DEVICE_UNREACHABLE)."""
        found = self._devices.get(device)
        if found is None or found.device.rest is None:
            return Seconds(0.0)
        self._require_answers()
        order = self._sleep[device]
        if order.asleep is not asleep:
            order = self._sleep[device] = _SleepOrder(asleep, None)
            self._is_order_due.set()
        if asleep or order.ready_at is None:
            return found.device.rest.wake_s
        return Seconds(max(0.0, order.ready_at - self._clock.now()))

    def _require_answers(self) -> None:
        if self._failure is not None:
            why, since = self._failure
            raise refuse(
                Code.DEVICE_UNREACHABLE,
                f"its driver {self.name} does not answer for {max(0.0, self._clock.wall() - since):.0f} s: {why}",
                "an answer",
                "it is started again by itself; see the agent's log",
            )

    # the process

    async def wait_started(self) -> None:
        """Until the driver has found its devices, or has failed to. Raises ShoalError(FIELD_INVALID) where it refuses
        its options."""
        await self._has_started.wait()
        if self._invalid is not None:
            raise ShoalError(self._invalid)

    async def run(self) -> None:
        """Start the driver, and ask it until cancelled. Returns if it finds no device, or refuses its options."""
        attempt = 0
        try:
            while True:
                try:
                    await self._start()
                    if not self._devices:
                        return  # nothing can be asked
                    self._has_started.set()
                    attempt = 0
                    await self._ask_forever()
                except DriverFailed as error:
                    self._on_failure(str(error))
                await self._end()
                await self._clock.sleep(delay(self.name, attempt, base_s=0.5, cap_s=RETRY_MOST_S))
                attempt += 1
        finally:
            await self._end()
            self._has_started.set()

    def _on_failure(self, why: str) -> None:
        since = self._failure[1] if self._failure is not None else self._clock.wall()
        if self._failure is None or self._failure[0] != why:
            _log.warning("driver_failed", driver=self.name, error=why)
        self._failure = (why, since)
        self._has_started.set()

    async def _start(self) -> None:
        """Raises DriverFailed."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
                self._factory,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                # Not a session: a session is a scheduling group, and nice counts within one (sched(7), autogroup).
                process_group=0,
            )
        except OSError as error:
            raise DriverFailed(f"it could not be started: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        most = MAX_LOGGED_LINES if self._failure is None else 0
        self._stderr = asyncio.create_task(_log_lines(self.name, self._process.stderr, most))
        self._process.stdin.write(pack(self._options) + b"\n")
        answer = await self._call(DriverCall(DriverMethod.DISCOVER), DISCOVER_S)
        if answer.refusal is not None and answer.refusal.code is Code.FIELD_INVALID:
            self._invalid = answer.refusal
            return
        if answer.refusal is not None:
            raise DriverFailed(str(answer.refusal))
        _check_devices(answer.found)
        before = dict(self._devices)
        self._devices |= {each.device.name: each for each in answer.found}
        for name in self._devices:  # the order of an earlier process is given again
            asleep = self._sleep[name].asleep if name in self._sleep else False
            self._sleep[name] = _SleepOrder(asleep, None if name in before else self._clock.now())
        for each in answer.found:
            await self._read(each.device)
        self._failure = None
        if self._devices:
            _log.info("driver_started", driver=self.name, devices=len(answer.found))
        if self._devices != before:
            self._on_devices()

    async def _ask_forever(self) -> None:
        """Raises DriverFailed."""
        took_s = 0.0  # `_start` has just read all devices
        while True:
            pause_s = min(POLL_MOST_S, max(POLL_S, took_s * (1 / MOST_OF_TIME - 1)))
            await wait_or_timeout(self._is_order_due, pause_s)
            self._is_order_due.clear()
            began = self._clock.now()
            for name, order in tuple(self._sleep.items()):
                if order.ready_at is None:
                    answer = await self._call(DriverCall(DriverMethod.SET_SLEEP, name, order.asleep), CALL_S)
                    if not 0.0 <= answer.seconds < math.inf:
                        raise DriverFailed(f"it answered that {name} wakes in {answer.seconds} s")
                    order.ready_at = Elapsed(self._clock.now() + answer.seconds)
            for found in tuple(self._devices.values()):
                await self._read(found.device)
            took_s = self._clock.now() - began

    async def _read(self, device: Device) -> None:
        answer = await self._call(DriverCall(DriverMethod.READ, device.name), CALL_S)
        if answer.reading is None and answer.refusal is None:
            raise DriverFailed(f"it answered no reading of {device.name}")
        if answer.reading is None or answer.reading.device != device.name:
            self._answers[device.name] = answer.refusal or Refusal(
                Code.DEVICE_UNREACHABLE, f"its driver {self.name} answered with a reading of another", device.name
            )
            return
        reading, absurd = with_unknown_for_absurd(replace(answer.reading, taken_at=self._clock.wall()))
        for figure in absurd.keys() - self._absurd.get(device.name, set()):
            self._absurd.setdefault(device.name, set()).add(figure)
            why = f"{figure} {absurd[figure]:g}"
            _log.warning("reading_figure_ignored", driver=self.name, device=device.name, error=why)
        self._answers[device.name] = _impossible(reading, device) or reading

    async def _call(self, call: DriverCall, limit_s: float) -> DriverAnswer:
        """Raises DriverFailed."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pack(call) + b"\n")
            line = await within(limit_s, process.stdout.readline())
        except TimeoutError as error:
            raise DriverFailed(f"no answer to {call.method} within {limit_s:g} s") from error
        except (OSError, ValueError) as error:  # ValueError: a line beyond the limit
            raise DriverFailed(f"its answer to {call.method} cannot be read: {error!s:.100}") from error
        if not line.endswith(b"\n"):
            raise DriverFailed(f"it ended at {call.method} ({await self._exit()})")
        try:
            return unpack(DriverAnswer, line)
        except ShoalError as error:
            raise DriverFailed(f"its answer to {call.method} is none: {error.refusal.found:.200}") from error

    async def _exit(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None
        try:
            status = await within(1.0, self._process.wait())
        except TimeoutError:
            return "it closed its output"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"

    async def _end(self) -> None:
        """Kill the process, and wait until it is gone: one that cannot be killed is not started a second time."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        assert self._stderr is not None
        process.stdin.close()
        # What a process of the driver's own holds open must not hold this up.
        with suppress(TimeoutError, ValueError):
            await within(CLOSE_S, asyncio.gather(self._stderr, process.stdout.read()))
        self._process = None


def _check_devices(found: tuple[FoundDevice, ...]) -> None:
    """Raises DriverFailed where these cannot be devices of a node."""
    names = [each.device.name for each in found]
    if len(found) > MAX_DEVICES or len(set(names)) < len(names):
        raise DriverFailed(f"it found {len(found)} devices of {len(set(names))} names, at most {MAX_DEVICES} may be")
    for each in found:
        device = each.device
        if not device.name or device.memory_bytes < 0 or device.parallelism < 1:
            raise DriverFailed(
                f"it found {device.name!r:.80} of {device.memory_bytes} bytes and {device.parallelism} runs at a time"
            )
        if len(device.links) > MAX_LINKS or not all(map(_is_possible, device.links)):
            raise DriverFailed(f"it found {device.name!r:.80} with links that cannot be")
        if device.numa is not None and not 0 <= device.numa <= MAX_NUMA_NODE:
            raise DriverFailed(f"it found {device.name!r:.80} at NUMA node {device.numa}")


def _is_possible(link: DeviceLink) -> bool:
    return link.bytes_per_s is None or 0 < link.bytes_per_s < math.inf


def _impossible(reading: Reading, device: Device) -> Refusal | None:
    """Why the reading cannot be true. The region would distrust the node for it."""
    found = check_figures(reading, device.memory_bytes)
    return None if found is None else replace(found, code=Code.DEVICE_UNREACHABLE)


async def _log_lines(driver: str, stream: asyncio.StreamReader, most: int) -> None:
    logged = 0
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line beyond the limit
            continue
        if not line:
            return
        if logged < most:
            logged += 1
            _log.warning("driver_message_logged", driver=driver, message=line.decode(errors="replace").rstrip("\n"))
