"""The supervisor's hold on its front process (`ports.Front`): starts or adopts it, restarts it, reserves its ports."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import structlog

from shoal.agent import courtesy
from shoal.agent.core.backoff import delay
from shoal.agent.dataplane import control
from shoal.agent.dataplane.control import Configuration, FrontConfig, Order
from shoal.agent.frames import FrameClient, start_time
from shoal.agent.ports import Clock, FrontStats, Keeper, LocalWorker, Recorded, Witness
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.link import SpansAsked, SpansFound
from shoal.types.migration import Verdict, Verification
from shoal.types.route import Route
from shoal.types.units import Elapsed, Seconds
from shoal.wire import nouns

START_TIMEOUT_S: Final = 30.0
ADOPT_TIMEOUT_S: Final = 5.0
CALL_TIMEOUT_S: Final = 15.0
STEADY_S: Final = 10.0
"""A front that lived for so long is restarted at once; one that did not waits longer each time."""
_RESTART_BASE_S: Final = 0.05
_RESTART_CAP_S: Final = 5.0
_POLL_S: Final = 0.02

_log = structlog.get_logger(__name__)


class _Process:
    """One front, ours or adopted. Raises ProcessLookupError when there is none of this pid."""

    def __init__(self, pid: int, nonce: str, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self.nonce = nonce
        self._child = child
        self._pidfd = os.pidfd_open(pid)
        self.gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def signal(self, number: int) -> None:
        if not self.gone.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def release(self) -> None:
        """Watched no more; it lives on."""
        if not self.gone.is_set():
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._child is not None:
            self._child.wait()
        self.gone.set()


class MachineClock(Clock, Protocol):
    def ticks(self, at: Elapsed) -> Elapsed:
        """`at` on the machine's own scale, which the front reads too."""
        ...


class FrontProcess:
    """Keeps one front running. command: starts `dataplane.main.run`; gets `--config PATH` added, a nonce on its input.

    Ports of 0 in `config` are chosen once and kept; as long as this object lives they are bound (not listening), so
    that nobody else takes them while a front restarts.
    """

    def __init__(self, config: FrontConfig, command: Sequence[str], clock: MachineClock) -> None:
        self._asked = config
        self._config = config
        self._command = tuple(command)
        self._clock = clock
        self._reserved: list[socket.socket] = []
        self._wanted: Configuration | None = None
        self._client: FrameClient | None = None
        self._process: _Process | None = None
        self._up = asyncio.Event()
        self._closed = False
        self._keeping: asyncio.Task[None] | None = None
        self.adopted = False
        """As the port has it."""
        self.restarts = 0

    @property
    def config(self) -> FrontConfig:
        """With the real ports, once started."""
        return self._config

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> FrontConfig:
        """Adopts the front of an earlier supervisor if it serves the same configuration, else starts one.

        Raises ShoalError(CONFLICT) when a port is taken by somebody else."""
        Path(self._asked.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        adopted = await self._adopt()
        self.adopted = adopted is not None
        if adopted is None:
            self._config = self._reserve(self._asked)
        else:
            self._reserve(self._config)
        self._keeping = asyncio.create_task(self._keep(adopted), name="front")
        return self._config

    async def configure(
        self,
        routes: tuple[Route, ...],
        credentials: tuple[Credential, ...],
        workers: tuple[LocalWorker, ...] = (),
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        witnesses: tuple[Witness, ...] = (),
        keepers: tuple[Keeper, ...] = (),
    ) -> None:
        """Raises ShoalError(DEADLINE_EXCEEDED | REPLICA_UNREACHABLE); the configuration counts all the same."""
        self._wanted = Configuration(routes, credentials, workers, revoked, peers, witnesses, keepers)
        await self._configure(await self._connected())

    async def lease(self, seconds: Seconds) -> None:
        """Raises ShoalError: then what it was told before counts. It ends when said, however late the front hears."""
        until = self._clock.ticks(Elapsed(self._clock.now() + seconds))
        client = await self._connected()
        await client.call("lease", control.pack_lease(until), timeout=CALL_TIMEOUT_S)

    async def verify(self, worker: LocalWorker, asked: Verification, pack: str) -> Verdict:
        """Raises ShoalError; no later than `asked.within_s`."""
        client = await self._connected()
        order = control.pack_order(Order(worker, asked, pack))
        return nouns.decode(Verdict, (await client.call("verify", order, timeout=asked.within_s)).payload)

    async def record(self, worker: LocalWorker, asked: Verification, pack: str) -> Recorded:
        """Raises ShoalError; no later than `asked.within_s`."""
        client = await self._connected()
        order = control.pack_order(Order(worker, asked, pack))
        return control.unpack_recorded(await client.call("record", order, timeout=asked.within_s))

    async def stats(self) -> FrontStats:
        """Raises ShoalError while the front is being restarted."""
        if self._client is None:
            raise _restarting()
        return control.unpack_stats((await self._client.call("stats", timeout=CALL_TIMEOUT_S)).payload)

    async def spans(self, asked: SpansAsked) -> SpansFound:
        """Raises ShoalError while the front is being restarted."""
        if self._client is None:
            raise _restarting()
        answer = await self._client.call("spans", nouns.encode(asked), timeout=CALL_TIMEOUT_S)
        return nouns.decode(SpansFound, answer.payload)

    async def close(self, *, keep: bool) -> None:
        """keep: the front serves on for the next supervisor; else it drains and ends. What is still to be told to it is
        refused. Idempotent."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process, self._process = self._process, None
        client, self._client = self._client, None
        if process is not None and keep:
            process.release()
        elif process is not None:
            process.signal(signal.SIGTERM)
            await _ended(process, self._config.drain_s + ADOPT_TIMEOUT_S)
        if client is not None:
            await client.close()
        while self._reserved:
            self._reserved.pop().close()

    async def _connected(self) -> FrameClient:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._up.wait()
            if self._closed or self._client is None:
                raise refuse(Code.REPLICA_UNREACHABLE, "the front is ended", "a running front", "start the agent")
            return self._client
        except TimeoutError as error:
            raise refuse(
                Code.DEADLINE_EXCEEDED, "the front does not start", f"within {START_TIMEOUT_S:g}s", "see its log"
            ) from error

    async def _configure(self, client: FrameClient) -> None:
        if self._wanted is not None:
            await client.call("configure", control.pack(self._wanted), timeout=CALL_TIMEOUT_S)

    async def _keep(self, process: _Process | None) -> None:
        """Until cancelled: a front that runs, is connected, and has been told what was last wanted."""
        quick = 0
        while True:
            started = self._clock.now()
            try:
                self._process = process or self._spawn()
                await self._attend(self._process)
            except ShoalError as error:
                _log.warning("front_lost", refusal=str(error))
            except OSError as error:
                _log.warning("front_not_started", reason=str(error))
            self._up.clear()
            self._client = None
            if self._process is not None:
                self._process.signal(signal.SIGKILL)
                await self._process.gone.wait()
            quick = 0 if self._clock.now() - started >= STEADY_S else quick + 1
            self.restarts += 1
            _log.warning("front_restarts", pid=self.pid, restarts=self.restarts)
            if quick > 1:
                await self._clock.sleep(delay("front", quick - 2, base_s=_RESTART_BASE_S, cap_s=_RESTART_CAP_S))
            if self.adopted and self._wanted is None:
                self._wanted = Configuration()  # what the one before was told, nobody knows
            self.adopted, process = False, None

    async def _attend(self, process: _Process) -> None:
        """Returns when the process or its connection is over. Raises ShoalError when it does not come up."""
        client = await self._connect(process, START_TIMEOUT_S)
        self._client = client
        try:
            await self._configure(client)
            self._up.set()
            await client.wait_closed()
        finally:
            if not self._up.is_set():
                await client.close()

    async def _connect(self, process: _Process, timeout_s: float) -> FrameClient:
        """Raises the last refusal when the process ends or does not answer in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            try:
                return await FrameClient.connect(self._config.socket(), process.nonce, peer_pid=process.pid)
            except ShoalError:
                if process.gone.is_set() or loop.time() > end:
                    raise
            with suppress(TimeoutError):
                await asyncio.wait_for(process.gone.wait(), _POLL_S)

    def _spawn(self) -> _Process:
        """A group of its own: what is aimed at the supervisor's does not reach it. In its session, as workers are (see
        there). The nonce is on no command line. Raises OSError."""
        nonce = secrets.token_hex(16)
        path = self._config.record().with_suffix(".config")
        if not path.exists() or path.read_text() != self._config.dump():  # else a full disk is no hindrance
            path.write_text(self._config.dump())
        child = subprocess.Popen(
            [*self._command, "--config", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # the supervisor's would be held open after its end
            process_group=0,
        )
        try:
            courtesy.go_first(child.pid)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(nonce.encode() + b"\n")
            return _Process(child.pid, nonce, child)
        except BaseException:
            child.kill()
            child.wait()
            raise

    async def _adopt(self) -> _Process | None:
        """The recorded front, if it lives, answers to its nonce and serves as asked; else it is ended."""
        try:
            record = json.loads(self._asked.record().read_text())
            config = FrontConfig.load(json.dumps(record["config"]))
            if start_time(record["pid"]) != record["start_time"]:
                return None
            process = _Process(record["pid"], record["nonce"], None)
        except (OSError, ValueError, KeyError, ShoalError):
            return None
        self._config = config
        if _same(self._asked, config):
            try:
                client = await self._connect(process, ADOPT_TIMEOUT_S)
            except ShoalError as error:
                _log.warning("front_not_adopted", pid=process.pid, refusal=str(error))
            else:
                await client.close()
                _log.info("front_adopted", pid=process.pid)
                return process
        process.signal(signal.SIGTERM)
        await _ended(process, ADOPT_TIMEOUT_S)
        return None

    def _reserve(self, config: FrontConfig) -> FrontConfig:
        """Raises ShoalError(CONFLICT)."""
        ports = {}
        for name in ("grpc_port", "token_port", "rest_port"):
            reserved = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                reserved.bind((config.host, getattr(config, name)))
            except OSError as error:
                raise refuse(
                    Code.CONFLICT,
                    f"{config.host}:{getattr(config, name)}: {error.strerror}",
                    "a free port",
                    "choose another",
                ) from error
            ports[name] = reserved.getsockname()[1]
        return replace(config, **ports)


def _restarting() -> ShoalError:
    return refuse(Code.REPLICA_UNREACHABLE, "the front is being started", "a running front", "retry")


def _same(asked: FrontConfig, running: FrontConfig) -> bool:
    """Whether `running` is what was asked for, where a port of 0 asks for any."""
    ports = {
        name: getattr(running, name)
        for name in ("grpc_port", "token_port", "rest_port", "metrics_port")
        if getattr(asked, name) == 0
    }
    return replace(asked, **ports) == running


async def _ended(process: _Process, timeout_s: float) -> None:
    """Returns when it is gone; killed if it takes too long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(process.gone.wait(), timeout_s)
    process.signal(signal.SIGKILL)
    await process.gone.wait()
