"""The supervisor's handle of its front process (`ports.Front`): start or adopt it, restart it, reserve its ports."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from shoal.agent import scheduling_priority
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.dataplane import control
from shoal.agent.dataplane.control import FrontConfig, ServingConfig, VerificationOrder
from shoal.agent.frames import FrameClient, FrameMessage, start_time
from shoal.agent.ports import (
    AgentClock,
    FrontStats,
    LocalWorker,
    ReferenceRecording,
    StatefulReplica,
    VerificationSource,
)
from shoal.agent.timeouts import TICK_S, start_watchdog, within
from shoal.host.event_wait import wait_or_timeout
from shoal.types.address import HostPort
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.backoff import delay
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import SpansAsked, SpansFound
from shoal.types.migration import Verdict, Verification
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import Elapsed, Seconds
from shoal.wire import nouns

START_TIMEOUT_S: Final = 30.0
ADOPT_TIMEOUT_S: Final = 5.0
CALL_TIMEOUT_S: Final = 15.0
STUCK_S: Final = 2.0
"""A front whose event loop is silent for this long, while it and this process run, is killed and restarted. One request
costs a loop at most 0.5 s (`tests/unit/agent/dataplane/test_a55_requests.py`), and a start takes 1 to 2 s."""
SLOW_S: Final = 1.0
"""A front that is silent for this long is not ready."""
PROGRESS_CHECK_S: Final = 0.25
"""Seconds between two progress checks."""
STABLE_S: Final = 10.0
"""A front that lived for this long is restarted at once; otherwise the back-off grows with each restart."""
_RESTART_BASE_S: Final = 0.05
_RESTART_CAP_S: Final = 5.0
_POLL_S: Final = 0.02

_log = structlog.get_logger(__name__)


class _Process:
    """One front process, started here or adopted. Raises ProcessLookupError when there is none of this pid."""

    def __init__(self, pid: int, nonce: str, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self.nonce = nonce
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self.gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def signal(self, number: int) -> None:
        if not self.gone.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def run_delay_s(self) -> float:
        """Total seconds that its main thread has waited for a CPU; 0 where the kernel does not report it."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def release(self) -> None:
        """Stop watching the process; it keeps running."""
        if not self.gone.is_set():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._child is not None:
            self._child.wait()
        self.gone.set()


class MachineClock(AgentClock, Protocol):
    def ticks(self, at: Elapsed) -> Elapsed:
        """`at` on the machine's own elapsed clock, which the front reads too."""
        ...


class FrontProcess:
    """Keeps one front running.

    `command` starts `dataplane.main.run`; `--config PATH` is added to it, and a nonce is written to its input.

    Ports of 0 in `config` are chosen once and kept. While this object lives they stay bound (not listening), so that no
    other process takes them while a front restarts.
    """

    def __init__(self, config: FrontConfig, command: Sequence[str], clock: MachineClock) -> None:
        self._requested_config = config
        self._config = config
        self._command = tuple(command)
        self._clock = clock
        self._reserved_ports: list[socket.socket] = []
        self._desired_config: ServingConfig | None = None
        self._client: FrameClient | None = None
        self._process: _Process | None = None
        self._up = asyncio.Event()
        self._wakes: asyncio.Queue[str] = asyncio.Queue()
        self._asked = asyncio.Event()
        self._closed = False
        self._keep_task: asyncio.Task[None] | None = None
        self.is_adopted = False
        """As in `ports.FrontControl`."""
        self.waits_for_routes = True
        """As in `ports.FrontControl`."""
        self.restarts = 0

    @property
    def config(self) -> FrontConfig:
        """The configuration, with the real ports once started."""
        return self._config

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> FrontConfig:
        """Adopt the front of an earlier supervisor if it serves the same configuration, else start one.

        Raises ShoalError(CONFLICT) when a port is in use by another process.
        """
        Path(self._requested_config.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        adopted = await self._adopt()
        self.is_adopted = adopted is not None
        if adopted is None:
            self._config = self._reserve_ports(self._requested_config)
        else:
            self._reserve_ports(self._config)
        self._keep_task = asyncio.create_task(self._keep_running(adopted), name="front")
        return self._config

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        verification_sources: tuple[VerificationSource, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
        tenants: tuple[TenantLimit, ...] = (),
        unloaded: tuple[UnloadedReplica, ...] = (),
        routes_on_demand: bool = False,
    ) -> None:
        """Set what the front must serve, also after a restart.

        Raises ShoalError(DEADLINE_EXCEEDED | REPLICA_UNREACHABLE); the configuration stays the desired one.
        """
        self._desired_config = ServingConfig(
            *(
                routes,
                credentials,
                workers,
                revoked,
                peers,
                verification_sources,
                stateful_replicas,
                forwarding,
                tenants,
            ),
            unloaded=unloaded,
            routes_on_demand=routes_on_demand,
        )
        await self._configure(await self._wait_until_up())

    async def wakes(self) -> AsyncIterator[str]:
        """As in `ports.FrontControl`."""
        while True:
            yield await self._wakes.get()

    async def lease(self, seconds: Seconds, claim: str) -> None:
        """Extend the lease by `seconds` from now, however late the front receives it.

        Raises ShoalError; then the earlier lease stays in force.
        """
        until = self._clock.ticks(Elapsed(self._clock.now() + seconds))
        client = await self._wait_until_up()
        await client.call("lease", control.pack_lease(until, claim), timeout=CALL_TIMEOUT_S)

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Raises ShoalError, at the latest after `asked.within_s`."""
        client = await self._wait_until_up()
        order = control.pack_order(VerificationOrder(worker, asked, pack))
        return nouns.decode(Verdict, (await client.call("verify", order, timeout=asked.within_s)).payload)

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> ReferenceRecording:
        """Raises ShoalError, at the latest after `asked.within_s`."""
        client = await self._wait_until_up()
        order = control.pack_order(VerificationOrder(worker, asked, pack))
        return control.unpack_recording(await client.call("record", order, timeout=asked.within_s))

    async def stats(self) -> FrontStats:
        """Raises ShoalError while the front is being restarted, or does not answer."""
        if self._client is None:
            raise _restart_error()
        try:
            return control.unpack_stats((await within(SLOW_S, self._client.call("stats"))).payload)
        except TimeoutError as error:
            raise _stuck_error(SLOW_S) from error

    async def next_ask(self, within_s: Seconds) -> None:
        await wait_or_timeout(self._asked, within_s)
        self._asked.clear()

    async def spans(self, asked: SpansAsked) -> SpansFound:
        """Raises ShoalError while the front is being restarted."""
        if self._client is None:
            raise _restart_error()
        answer = await self._client.call("spans", nouns.encode(asked), timeout=CALL_TIMEOUT_S)
        return nouns.decode(SpansFound, answer.payload)

    async def close(self, *, keep: bool) -> None:
        """Release the front for the next supervisor (`keep`), or drain and stop it. Idempotent.

        Calls still waiting for the front are refused.
        """
        self._closed = True
        if self._keep_task is not None:
            self._keep_task.cancel()
            await asyncio.gather(self._keep_task, return_exceptions=True)
        process, self._process = self._process, None
        client, self._client = self._client, None
        if process is not None and keep:
            process.release()
        elif process is not None:
            process.signal(signal.SIGTERM)
            await _wait_or_kill(process, self._config.drain_s + ADOPT_TIMEOUT_S)
        if client is not None:
            await client.close()
        while self._reserved_ports:
            self._reserved_ports.pop().close()

    async def _wait_until_up(self) -> FrameClient:
        if not await wait_or_timeout(self._up, START_TIMEOUT_S):
            raise refuse(
                Code.DEADLINE_EXCEEDED, "the front does not start", f"within {START_TIMEOUT_S:g}s", "see its log"
            )
        if self._closed or self._client is None:
            raise refuse(Code.REPLICA_UNREACHABLE, "the front is ended", "a running front", "start the agent")
        return self._client

    async def _configure(self, client: FrameClient) -> None:
        if self._desired_config is not None:
            await client.call("configure", control.pack(self._desired_config), timeout=CALL_TIMEOUT_S)

    async def _keep_running(self, process: _Process | None) -> None:
        """Keep a front running, connected and configured with what is desired. Runs until cancelled."""
        quick = 0
        while True:
            started = self._clock.now()
            try:
                self._process = process or self._spawn()
                await self._run_once(self._process)
            except ShoalError as error:
                _log.warning("front_lost", code=error.code, error=str(error))
            except OSError as error:
                _log.error("front_start_failed", error=str(error))
            self._up.clear()
            self._client = None
            if self._process is not None:
                self._process.signal(signal.SIGKILL)
                await self._process.gone.wait()
            quick = 0 if self._clock.now() - started >= STABLE_S else quick + 1
            self.restarts += 1
            _log.warning("front_restarted", pid=self.pid, restarts=self.restarts)
            if quick > 1:
                await self._clock.sleep(delay("front", quick - 2, base_s=_RESTART_BASE_S, cap_s=_RESTART_CAP_S))
            if self.is_adopted and self._desired_config is None:
                self._desired_config = ServingConfig()  # the configuration of the adopted front is unknown
            self.is_adopted, self.waits_for_routes, process = False, True, None

    async def _run_once(self, process: _Process) -> None:
        """Return when the process or its connection ends. Raises ShoalError when it does not start."""
        client = await self._connect(process, START_TIMEOUT_S)
        self._client = client
        try:
            await self._configure(client)
            self._up.set()
            await self._watch(process, client)
        finally:
            if not self._up.is_set():
                await client.close()

    async def _watch(self, process: _Process, client: FrameClient) -> None:
        """Return when the connection ends. Raises ShoalError(FRONT_STUCK) when the front makes no progress."""
        closed = asyncio.ensure_future(client.wait_closed())
        try:
            while not closed.done():
                await self._check_progress(process, client)
                await asyncio.wait((closed,), timeout=PROGRESS_CHECK_S)
        finally:
            closed.cancel()

    async def _check_progress(self, process: _Process, client: FrameClient) -> None:
        """Return when the front's event loop has answered, or its connection ended.

        Raises ShoalError(FRONT_STUCK) after STUCK_S in which this process ran and the front was not kept from running.
        """
        asked = asyncio.ensure_future(client.call("stats"))
        silent, starved_s = start_watchdog(STUCK_S), process.run_delay_s()
        try:
            while not (await asyncio.wait((asked,), timeout=TICK_S))[0]:
                before_s, starved_s = starved_s, process.run_delay_s()
                silent = silent.on_tick(asyncio.get_running_loop().time(), starved_s - before_s)
                if silent.is_expired:
                    raise _stuck_error(silent.silent_s)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def _on_push(self, message: FrameMessage) -> None:
        match message.kind:
            case control.ASKED:
                self._asked.set()
            case control.WAKE:
                self._wakes.put_nowait(str(message.header.get("assignment", "")))

    async def _connect(self, process: _Process, timeout_s: float) -> FrameClient:
        """Raises the last refusal when the process ends, or does not answer in time.

        The time in which it waits for a CPU does not count. Otherwise it would be killed on a busy machine whenever it
        has nearly started, and the machine would do nothing but start it.
        """
        loop = asyncio.get_running_loop()
        began, delayed_s = loop.time(), process.run_delay_s()
        while True:
            try:
                return await FrameClient.connect(
                    self._config.socket_path(), process.nonce, on_push=self._on_push, peer_pid=process.pid
                )
            except ShoalError:
                waited_s = loop.time() - began - (process.run_delay_s() - delayed_s)
                if process.gone.is_set() or waited_s > timeout_s:
                    raise
            await wait_or_timeout(process.gone, _POLL_S)

    def _spawn(self) -> _Process:
        """Start a front. Raises OSError.

        It gets its own process group, so that signals to the supervisor's group do not reach it. It stays in the
        supervisor's session, as workers do (see there). The nonce is not on the command line.
        """
        nonce = secrets.token_hex(16)
        path = self._config.record_path().with_suffix(".config")
        if not path.exists() or path.read_text() != self._config.dump():  # so that a restart works on a full disk
            path.write_text(self._config.dump())
        child = subprocess.Popen(
            [*self._command, "--config", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else the front would hold the supervisor's open after it ended
            process_group=0,
        )
        try:
            scheduling_priority.restore_child_priority(child.pid)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(nonce.encode() + b"\n")
            return _Process(child.pid, nonce, child)
        except BaseException:
            child.kill()
            child.wait()
            raise

    async def _adopt(self) -> _Process | None:
        """Return the recorded front if it lives, accepts its nonce and serves the requested configuration; else stop
        it."""
        try:
            record = json.loads(self._requested_config.record_path().read_text())
            config = FrontConfig.load(json.dumps(record["config"]))
            if start_time(record["pid"]) != record["start_time"]:
                return None
            process = _Process(record["pid"], record["nonce"], None)
        except (OSError, ValueError, KeyError, ShoalError):
            return None
        self._config = config
        if _is_same(self._requested_config, config):
            try:
                client = await self._connect(process, ADOPT_TIMEOUT_S)
                try:
                    said = await client.call("stats", timeout=ADOPT_TIMEOUT_S)
                finally:
                    await client.close()
                self.waits_for_routes = control.unpack_stats(said.payload).asked is not None
            except ShoalError as error:
                _log.warning("front_adoption_failed", pid=process.pid, code=error.code, error=str(error))
            else:
                _log.info("front_adopted", pid=process.pid)
                return process
        process.signal(signal.SIGTERM)
        await _wait_or_kill(process, ADOPT_TIMEOUT_S)
        return None

    def _reserve_ports(self, config: FrontConfig) -> FrontConfig:
        """Raises ShoalError(CONFLICT)."""
        ports = {}
        hosts: dict[str, str] = {"port": config.host}
        if config.health_port is not None:
            hosts["health_port"] = config.health_host
        for name, host in hosts.items():
            reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._reserved_ports.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                reserved.bind((host, getattr(config, name)))
            except OSError as error:
                raise refuse(
                    Code.CONFLICT,
                    f"{HostPort(host, getattr(config, name))}: {error.strerror}",
                    "a free port",
                    "choose another",
                ) from error
            ports[name] = reserved.getsockname()[1]
        return replace(config, **ports)


def _stuck_error(silent_s: float) -> ShoalError:
    return refuse(
        Code.FRONT_STUCK, f"the front is silent for {silent_s:.1f}s", "an answer", "it is ended and started again"
    )


def _restart_error() -> ShoalError:
    return refuse(Code.REPLICA_UNREACHABLE, "the front is being started", "a running front", "retry")


def _is_same(asked: FrontConfig, running: FrontConfig) -> bool:
    """Whether `running` matches `asked`, where a port of 0 matches any."""
    ports = {
        name: getattr(running, name) for name in ("port", "metrics_port", "health_port") if getattr(asked, name) == 0
    }
    return replace(asked, **ports) == running


async def _wait_or_kill(process: _Process, timeout_s: float) -> None:
    """Wait until the process ended; kill it after `timeout_s`."""
    await wait_or_timeout(process.gone, timeout_s)
    process.signal(signal.SIGKILL)
    await process.gone.wait()
