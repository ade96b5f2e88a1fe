"""One worker process as its supervisor holds it: started or adopted, its files, how it ended."""

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import structlog

from shoal.agent import courtesy
from shoal.agent.frames import FrameClient, Push, start_time
from shoal.agent.worker.groups import WORKER, Group, Groups
from shoal.agent.worker.messages import from_json, pack
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Verdict
from shoal.wire.private import write_private

_log = structlog.get_logger(__name__)
_OWN_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)
_SIGNAL_NAMES: Final = {number.value: number.name for number in signal.Signals}
_KEPT_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME")
"""What of the supervisor's environment a worker sees; it may hold secrets."""
_CALL: Final = re.compile(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)')
_CALLS: Final = 4
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """A process of its own session, watched by pidfd, with files `worker-ID.*` in the agent's run folder.

    on_exit is called once, on the loop, after the process is gone and reaped.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        nonce: str,
        pid: int,
        popen: subprocess.Popen[bytes] | None,
        on_exit: Callable[["WorkerProcess"], None],
        group: Group | None = None,
    ) -> None:
        self.name = name
        self.nonce = nonce
        self.pid = pid
        self.socket = folder / f"{name}.sock"
        self.gone = asyncio.Event()
        self.client: FrameClient | None = None
        self.assignments: dict[str, Assignment] = {}
        """What it holds, by id: several only where all of them are shared and of one tenant and device."""
        self.verdicts: dict[str, Verdict] = {}
        """Of those that were compared with what they took over from."""
        self.loading = asyncio.Lock()
        """One model loads at a time, so that a crash meanwhile has one cause."""
        self.silent_since: float | None = None
        self.verdict: Refusal | None = None
        """Why this supervisor killed it; None while it did not."""
        self.returncode: int | None = None
        """As subprocess gives it; None while it runs, and of an adopted process, whose parent is another."""
        self._record = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._crash = folder / f"{name}.crash"
        self._busy = folder / f"{name}.busy"
        self._popen = popen
        self._on_exit = on_exit
        self._group = group
        self._pidfd = os.pidfd_open(pid)
        self.start_time = start_time(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    @classmethod
    def spawn(
        cls,
        folder: Path,
        models: Path,
        orphan_after_s: float,
        groups: Groups,
        on_exit: Callable[["WorkerProcess"], None],
    ) -> Self:
        """Raises OSError. The nonce goes through standard input: arguments and environment can be read by others. It
        waits for that, and is in its group by then. In the supervisor's session: Linux weighs sessions against each
        other, whatever the priorities in them (sched(7), autogroup), and nobody could step aside for another."""
        name, nonce = f"{WORKER}{secrets.token_hex(4)}", secrets.token_hex(16)
        command = [sys.executable, "-P", "-m", "shoal.agent.worker.main"]
        command += ["--socket", str(folder / f"{name}.sock"), "--models", str(models)]
        command += ["--orphan-after", str(orphan_after_s)]
        with (folder / f"{name}.log").open("wb") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ},
                cwd="/",
                process_group=0,
            )
        try:
            courtesy.go_first(popen.pid)
            assert popen.stdin is not None
            group = _grouped(groups, name, popen.pid)
            with suppress(BrokenPipeError), popen.stdin:
                popen.stdin.write(nonce.encode() + b"\n")
            process = cls(folder, name, nonce, popen.pid, popen, on_exit, group)
        except BaseException:
            popen.kill()
            popen.wait()
            raise
        process.save()
        return process

    @classmethod
    def find(cls, record: Path, groups: Groups, on_exit: Callable[["WorkerProcess"], None]) -> Self | None:
        """The process that this record is about; None (and its files removed) when it is no more."""
        group = groups.named(record.stem)
        try:
            told = json.loads(record.read_text())
            process = cls(record.parent, record.stem, str(told["nonce"]), int(told["pid"]), None, on_exit, group)
        except (OSError, ValueError, KeyError, TypeError):
            group.remove()
            _remove(record)
            return None
        if process.start_time != told.get("start_time"):
            # another process has the number by now
            process.forget()
            group.remove()
            _remove(record)
            return None
        with suppress(ShoalError):  # written by another version: then it cannot be adopted, only ended
            held = [from_json(Assignment, one) for one in told.get("assignments", ())]
            process.assignments = {one.id: one for one in held}
            verdicts = told.get("verdicts", {}).items()
            process.verdicts = {name: from_json(Verdict, one) for name, one in verdicts}
        return process

    async def greet(self, on_push: Push, timeout_s: float) -> FrameClient:
        """Connects once the process serves. Raises ShoalError(WORKER_STUCK | WORKER_CRASHED), ConnectionLost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._serving()
        except TimeoutError as error:
            raise refuse(
                Code.WORKER_STUCK, "a new worker does not start", f"within {timeout_s:g}s", "see the log"
            ) from error
        if self.gone.is_set():
            raise ShoalError(self.judge(oom=False)[1])
        self.client = await FrameClient.connect(self.socket, self.nonce, on_push=on_push, peer_pid=self.pid)
        return self.client

    def save(self) -> None:
        """So that the next supervisor can adopt it. Where the disk takes nothing that one ends it, and loads anew."""
        told = {
            "pid": self.pid,
            "start_time": self.start_time,
            "nonce": self.nonce,
            "assignments": [json.loads(pack(one)) for one in self.assignments.values()],
            "verdicts": {name: json.loads(pack(one)) for name, one in self.verdicts.items()},
        }
        try:
            write_private(self._record, json.dumps(told).encode(), durable=False)
        except OSError as error:
            _log.warning("worker_not_recorded", worker=self.name, reason=str(error))

    async def end(self) -> None:
        """Kills it, waits until it is gone, removes its files."""
        if not self.gone.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self.gone.wait()
        await self._hang_up()
        if self._group is not None:
            self._group.remove()
        _remove(self._record)

    def step_aside(self) -> None:
        """Until it steps up, it has the processor while nobody else wants it."""
        if not self.gone.is_set():
            courtesy.step_aside(self.pid)

    def step_up(self) -> None:
        if not self.gone.is_set():
            courtesy.step_up(self.pid)

    def limit_memory(self, models_bytes: int) -> None:
        """What its group may take for its models; 0: as much as there is."""
        if self._group is None:
            return
        try:
            self._group.limit_memory(models_bytes)
        except OSError as error:
            _log.warning("memory_not_limited", worker=self.name, reason=str(error))

    async def leave(self) -> None:
        """Lets it run on for another supervisor."""
        self.forget()
        await self._hang_up()

    def forget(self) -> None:
        """Stops watching."""
        if not self.gone.is_set():
            self.gone.set()
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._close_pipe()
            if self._popen is not None:
                # it is somebody else's child soon
                self._popen.returncode = 0

    def judge(self, *, oom: bool) -> tuple[bool, Refusal]:
        """(whether it fell by its own fault, why it is gone). oom: the kernel killed for memory meanwhile."""
        stack = self._crash.read_text(errors="replace") if self._crash.exists() else ""
        return judge_exit(self.returncode, brief_stack(stack), oom=oom)

    def oom_kills(self) -> int | None:
        """How often the kernel killed it for memory; None where only the machine's count is known."""
        return self._group.oom_kills() if self._group is not None else None

    def used_s(self) -> float:
        """Processor time so far; 0 once it is gone."""
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0

    def rests(self) -> bool:
        """It was stopped, or waits for something other than a processor or a disk."""
        fields = self._stat()
        return bool(fields) and fields[0] in "STt"

    def _stat(self) -> list[str]:
        """What /proc/PID/stat says after the name."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def busy(self) -> frozenset[str]:
        """Assignments with requests in flight, as the process itself last noted: it can be read after its end."""
        try:
            noted = self._busy.read_bytes()
        except OSError:
            return frozenset()
        return frozenset(noted.partition(b"\0")[0].decode(errors="replace").split())

    async def _hang_up(self) -> None:
        if self.client is not None:
            await self.client.close()

    async def _serving(self) -> None:
        """Until it writes its line, or its end closes the pipe."""
        if self._popen is None or self._popen.stdout is None:
            return
        loop = asyncio.get_running_loop()
        handle = self._popen.stdout.fileno()
        said = asyncio.Event()
        loop.add_reader(handle, said.set)
        try:
            await said.wait()
            if not os.read(handle, 64):
                await self.gone.wait()
        finally:
            loop.remove_reader(handle)
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._popen is not None and self._popen.stdout is not None:
            asyncio.get_running_loop().remove_reader(self._popen.stdout.fileno())
            self._popen.stdout.close()
            self._popen.stdout = None

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._popen is not None:
            self.returncode = self._popen.wait()
        self.gone.set()
        self._on_exit(self)


def judge_exit(returncode: int | None, crash: str, *, oom: bool) -> tuple[bool, Refusal]:
    """returncode: negative for a signal, None when nobody can say. crash: the stack a fatal signal left behind.

    A fatal signal that the process raised itself leaves a stack; a kill from outside leaves none and is no fault.
    """
    remedy = "the assignment is loaded again"
    number = -returncode if returncode is not None and returncode < 0 else 0
    name = _SIGNAL_NAMES.get(number, f"signal {number}")
    if number in _OWN_SIGNALS or (returncode is None and crash):
        found = f"{name if number else 'a fatal signal'} in the worker: {crash}"
        return True, Refusal(Code.WORKER_CRASHED, found, "", "the model is refused here after three crashes")
    if oom and (number == signal.SIGKILL or returncode is None):
        return False, Refusal(
            Code.OUT_OF_MEMORY, "the kernel killed the worker", "memory that the machine did not have", remedy
        )
    if number or returncode in (None, 0):
        found = f"{name} from outside" if number else "it ended without a word"
        return False, Refusal(Code.WORKER_KILLED, found, "", remedy)
    if returncode == EXIT_STUCK:
        return True, Refusal(Code.WORKER_STUCK, "a run went on after it was told to stop", "", remedy)
    return True, Refusal(Code.WORKER_CRASHED, f"exit status {returncode}: {crash}", "", "see the worker's log")


def brief_stack(stack: str) -> str:
    """What faulthandler wrote, in one line: the fault and the innermost calls, without this machine's paths."""
    lines = stack.splitlines()
    calls = [f"{name}:{line}" for text in lines for name, line in _CALL.findall(text)]
    return " < ".join([*lines[:1], *calls[:_CALLS]])


def blamed(held: Collection[str], loading: Collection[str], busy: Collection[str]) -> frozenset[str]:
    """Which of the assignments in a process that fell by its own fault are at fault.

    The one that was loading; else those with a request in flight; and where nobody did anything, all of them.
    """
    return frozenset(held).intersection(loading) or frozenset(held).intersection(busy) or frozenset(held)


BUSY_BYTES: Final = 64 * 1024
"""Size of the file in which a worker notes the assignments with requests in flight: names, then a zero byte."""

EXIT_STUCK: Final = 75
"""What a worker exits with when a run cannot be stopped."""


def oom_kills() -> int:
    """Processes that the kernel killed for memory since boot."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _grouped(groups: Groups, name: str, pid: int) -> Group | None:
    """Where that fails the worker runs without: its own limit is left."""
    try:
        group = groups.make(name)
        if group is not None:
            group.add(pid)
    except OSError as error:
        _log.warning("not_isolated", worker=name, reason=f"control group: {error}")
        groups.named(name).remove()
        return None
    return group


def _remove(record: Path) -> None:
    for suffix in (".json", ".sock", ".log", ".crash", ".busy"):
        record.with_suffix(suffix).unlink(missing_ok=True)
