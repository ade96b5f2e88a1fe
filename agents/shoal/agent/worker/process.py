"""One worker process as its supervisor sees it: how it starts or is adopted, its files, and how it ended."""

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import structlog

from shoal.agent import scheduling_priority
from shoal.agent.frames import FrameClient, FrameMessage, Header, Push, start_time
from shoal.agent.packing import from_json, pack
from shoal.agent.timeouts import within
from shoal.agent.worker.cgroups import WORKER_PREFIX, Cgroup, Cgroups
from shoal.host.private_files import write_private
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Verdict

_log = structlog.get_logger(__name__)
_CRASH_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)
_SIGNAL_NAMES: Final = {number.value: number.name for number in signal.Signals}
PASSED_VARIABLES: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME")
"""The only variables of the supervisor's environment that a worker gets, because others may hold secrets."""
_STACK_FRAME: Final = re.compile(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)')
_THREAD_AT_FAULT: Final = "Current thread"
"""How faulthandler begins the stack of the thread that had the fault; other threads' come before and after it."""
_MAX_FRAMES: Final = 4
_LOG_TAIL_BYTES: Final = 64 * 1024
_MOST_READ: Final = 64 * 1024
"""Of a file that a worker wrote."""
_MAX_LOGGED_ERRORS: Final = 16
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """A process with its own process group, watched by pidfd, with files `worker-ID.*` in the agent's run folder.

    `on_exit` is called once, on the event loop, after the process is gone and reaped.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        nonce: str,
        pid: int,
        popen: subprocess.Popen[bytes] | None,
        on_exit: Callable[["WorkerProcess"], None],
        group: Cgroup | None = None,
    ) -> None:
        self.name = name
        self.nonce = nonce
        self.pid = pid
        self.socket = folder / f"{name}.sock"
        self.exit_event = asyncio.Event()
        self.client: FrameClient | None = None
        # What the process holds, by id. Several only if all are shared, of one tenant and one device.
        self.assignments: dict[str, Assignment] = {}
        # Device files that it may open. None: an earlier supervisor started it, and did not say.
        self.device_files: frozenset[str] | None = None
        # Verdicts of the assignments that were verified, by id.
        self.verdicts: dict[str, Verdict] = {}
        # One model loads at a time, so that a crash during a load has one cause.
        self.load_lock = asyncio.Lock()
        # The status request in progress.
        self.status_poll: asyncio.Task[None] | None = None
        # Why this supervisor killed the process. None if it did not.
        self.kill_reason: Refusal | None = None
        # As in subprocess. None while it runs, and for an adopted process, whose parent is another one.
        self.returncode: int | None = None
        self._record_file = folder / f"{name}.json"
        self._log_file = folder / f"{name}.log"
        self._crash_file = folder / f"{name}.crash"
        self._busy_file = folder / f"{name}.busy"
        self._popen = popen
        self._on_exit = on_exit
        self._group = group
        self._pidfd = os.pidfd_open(pid)
        self.start_time = start_time(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_pidfd_ready)

    @classmethod
    def spawn(
        cls,
        folder: Path,
        models: Path,
        files: Iterable[str],
        orphan_after_s: float,
        groups: Cgroups,
        on_exit: Callable[["WorkerProcess"], None],
    ) -> Self:
        """Start a worker process that may use the device files `files`. Raises OSError.

        The nonce goes through standard input, because other users can read arguments and environment. The process waits
        for it, and is in its cgroup by then.

        It stays in the supervisor's session: Linux weighs sessions against each other, whatever the priorities in them
        (sched(7), autogroup). In separate sessions, lowering the priority of one process would not favour another.
        """
        name, nonce = f"{WORKER_PREFIX}{secrets.token_hex(4)}", secrets.token_hex(16)
        command = [sys.executable, "-P", "-m", "shoal.agent.worker.main"]
        command += ["--socket", str(folder / f"{name}.sock"), "--models", str(models)]
        command += ["--orphan-after", str(orphan_after_s), *(f"--device-file={each}" for each in files)]
        with (folder / f"{name}.log").open("wb") as log:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={key: os.environ[key] for key in PASSED_VARIABLES if key in os.environ},
                cwd="/",
                process_group=0,
            )
        try:
            scheduling_priority.restore_child_priority(popen.pid)
            assert popen.stdin is not None
            group = _join_cgroup(groups, name, popen.pid)
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
    def from_record(cls, record: Path, groups: Cgroups, on_exit: Callable[["WorkerProcess"], None]) -> Self | None:
        """The process of this record. None if it is gone; its files are removed then."""
        group = groups.get(record.stem)
        try:
            told = json.loads(record.read_text())
            process = cls(record.parent, record.stem, str(told["nonce"]), int(told["pid"]), None, on_exit, group)
        except (OSError, ValueError, KeyError, TypeError):
            group.remove()
            _remove_files(record)
            return None
        if process.start_time != told.get("start_time"):
            # the pid belongs to another process by now
            process.stop_watching()
            group.remove()
            _remove_files(record)
            return None
        with suppress(ShoalError):  # a record of another version: the process can only be ended
            held = [from_json(Assignment, one) for one in told.get("assignments", ())]
            process.assignments = {one.id: one for one in held}
            verdicts = told.get("verdicts", {}).items()
            process.verdicts = {name: from_json(Verdict, one) for name, one in verdicts}
        return process

    async def connect(self, on_push: Push, timeout_s: float) -> FrameClient:
        """Connect once the process serves. Raises ShoalError(WORKER_STUCK | WORKER_CRASHED), ConnectionLost."""
        try:
            await within(timeout_s, self._wait_until_serving())
        except TimeoutError as error:
            raise refuse(
                Code.WORKER_STUCK, "a new worker does not start", f"within {timeout_s:g}s", "see the log"
            ) from error
        if self.exit_event.is_set():
            raise ShoalError(self.explain_exit(oom=False)[1])
        self.client = await FrameClient.connect(self.socket, self.nonce, on_push=on_push, peer_pid=self.pid)
        return self.client

    async def call(self, kind: str, limit_s: float, payload: bytes = b"", header: Header | None = None) -> FrameMessage:
        """As `FrameClient.call` of a process that is connected. `limit_s` counts only the time in which the supervisor
        runs.

        Raises ShoalError(DEADLINE_EXCEEDED | ...), ConnectionLost.
        """
        assert self.client is not None
        try:
            return await within(limit_s, self.client.call(kind, payload, header=header))
        except TimeoutError as error:
            raise refuse(
                Code.DEADLINE_EXCEEDED, f"no answer to `{kind}`", f"within {limit_s:g}s", "allow more time or retry"
            ) from error

    def own_bytes(self) -> int:
        """Resident memory that it shares with no file and no other process. 0: it is gone."""
        try:
            _, resident, shared, *_ = Path(f"/proc/{self.pid}/statm").read_text().split()
        except (OSError, ValueError):
            return 0
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def save(self) -> None:
        """Write the record with which the next supervisor adopts this process.

        If the disk is full, that supervisor ends the process and loads the model again.
        """
        told = {
            "pid": self.pid,
            "start_time": self.start_time,
            "nonce": self.nonce,
            "assignments": [json.loads(pack(one)) for one in self.assignments.values()],
            "verdicts": {name: json.loads(pack(one)) for name, one in self.verdicts.items()},
        }
        try:
            write_private(self._record_file, json.dumps(told).encode(), durable=False)
        except OSError as error:
            _log.error("worker_record_write_failed", worker=self.name, error=str(error))

    async def end(self) -> None:
        """Kill the process, wait until it is gone, log the errors in its log, remove its files."""
        if not self.exit_event.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self.exit_event.wait()
        await self._disconnect()
        if self._group is not None:
            self._group.remove()
        self._log_errors()
        _remove_files(self._record_file)

    def _log_errors(self) -> None:
        """A worker ends soon after a failed load, and its log with it, so the reasons go into the supervisor's log."""
        try:
            with self._log_file.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_TAIL_BYTES))
                tail = log.read(_LOG_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return
        for each in error_lines(tail):
            _log.error(
                "worker_error_logged",
                worker=self.name,
                message=str(each.get("event", "")),
                assignment=str(each.get("assignment", "")),
                exception=str(each.get("exception", "")),
            )

    def lower_priority(self) -> None:
        """Run on idle CPU time only, until `restore_priority`."""
        if not self.exit_event.is_set():
            scheduling_priority.set_idle_priority(self.pid)

    def restore_priority(self) -> None:
        if not self.exit_event.is_set():
            scheduling_priority.set_normal_priority(self.pid)

    def limit_memory(self, models_bytes: int) -> None:
        """Limit what its cgroup may use for models. 0: no limit."""
        if self._group is None:
            return
        try:
            self._group.limit_memory(models_bytes)
        except OSError as error:
            _log.warning("memory_limit_failed", worker=self.name, error=str(error))

    async def detach(self) -> None:
        """Leave it running for another supervisor."""
        self.stop_watching()
        await self._disconnect()

    def stop_watching(self) -> None:
        """Close the pidfd; `on_exit` is not called."""
        if not self.exit_event.is_set():
            self.exit_event.set()
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._close_pipe()
            if self._popen is not None:
                # the process will be adopted by another supervisor; this stops subprocess from reaping it
                self._popen.returncode = 0

    def explain_exit(self, *, oom: bool) -> tuple[bool, Refusal]:
        """(whether the process ended through its own fault, why it ended). `oom`: the kernel had an OOM kill
        meanwhile."""
        stack = _start_of(self._crash_file).decode(errors="replace")
        return classify_exit(self.returncode, brief_stack(stack), oom=oom)

    def oom_kills(self) -> int | None:
        """OOM kills of this process. None if only the machine's count is known."""
        return self._group.oom_kills() if self._group is not None else None

    def cpu_s(self) -> float:
        """CPU seconds so far; 0 once it is gone."""
        fields = self._stat()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0

    def is_sleeping(self) -> bool:
        """Whether it is stopped, or waits for something other than CPU or disk."""
        fields = self._stat()
        return bool(fields) and fields[0] in "STt"

    def _stat(self) -> list[str]:
        """The fields of /proc/PID/stat after the name. Empty if the process is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def busy_assignments(self) -> frozenset[str]:
        """Assignments with requests in flight, as the process last noted. Readable after its end."""
        noted = _start_of(self._busy_file)
        return frozenset(noted.partition(b"\0")[0].decode(errors="replace").split())

    async def _disconnect(self) -> None:
        if self.client is not None:
            await self.client.close()

    async def _wait_until_serving(self) -> None:
        """Wait until it writes its ready line, or its end closes the pipe."""
        if self._popen is None or self._popen.stdout is None:
            return
        loop = asyncio.get_running_loop()
        handle = self._popen.stdout.fileno()
        has_output = asyncio.Event()
        loop.add_reader(handle, has_output.set)
        try:
            await has_output.wait()
            if not os.read(handle, 64):
                await self.exit_event.wait()
        finally:
            loop.remove_reader(handle)
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._popen is not None and self._popen.stdout is not None:
            asyncio.get_running_loop().remove_reader(self._popen.stdout.fileno())
            self._popen.stdout.close()
            self._popen.stdout = None

    def _on_pidfd_ready(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._popen is not None:
            self.returncode = self._popen.wait()
        self.exit_event.set()
        self._on_exit(self)


def classify_exit(returncode: int | None, crash: str, *, oom: bool) -> tuple[bool, Refusal]:
    """(whether the process ended through its own fault, why it ended).

    `returncode` is negative for a signal, and None if unknown. `crash` is the stack that a fatal signal left. A fatal
    signal that the process raised itself leaves a stack; a kill from outside leaves none and is not its fault.
    """
    remedy = "the assignment is loaded again"
    number = -returncode if returncode is not None and returncode < 0 else 0
    name = _SIGNAL_NAMES.get(number, f"signal {number}")
    if number in _CRASH_SIGNALS or (returncode is None and crash):
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
    """The output of faulthandler in one line: the fault and the innermost calls of its thread, without paths of this
    machine."""
    first, _, threads = stack.partition("\n")
    _, _, at_fault = threads.partition(_THREAD_AT_FAULT)
    at_fault = (at_fault or threads).partition("\n\n")[0]
    calls = [f"{name}:{line}" for name, line in _STACK_FRAME.findall(at_fault)]
    return " < ".join([*filter(None, [first]), *calls[:_MAX_FRAMES]])


def error_lines(log: str) -> list[dict[str, object]]:
    """The newest errors in a worker's log, oldest first. Lines that are no events are left out."""
    events: list[dict[str, object]] = []
    for line in log.splitlines():
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("level") == "error":
                events.append(event)
    return events[-_MAX_LOGGED_ERRORS:]


def assignments_at_fault(held: Collection[str], loading: Collection[str], busy: Collection[str]) -> frozenset[str]:
    """Which assignments of a process that ended through its own fault are at fault.

    The one that was loading; else those with a request in flight; else all of them.
    """
    return frozenset(held).intersection(loading) or frozenset(held).intersection(busy) or frozenset(held)


EXIT_STUCK: Final = 75
"""Exit status of a worker whose run cannot be stopped."""


def oom_kills() -> int:
    """OOM kills on this machine since boot."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _join_cgroup(groups: Cgroups, name: str, pid: int) -> Cgroup | None:
    """The process's cgroup. None if that fails: then only the worker's own limit (RLIMIT_DATA) applies."""
    try:
        group = groups.make(name)
        if group is not None:
            group.add(pid)
    except OSError as error:
        _log.warning("cgroup_join_failed", worker=name, error=str(error))
        groups.get(name).remove()
        return None
    return group


def _start_of(file: Path) -> bytes:
    """Of what a worker wrote, which may be of any size where a model took it over; empty where there is none."""
    try:
        with file.open("rb") as written:
            return written.read(_MOST_READ)
    except OSError:
        return b""


def _remove_files(record: Path) -> None:
    for suffix in (".json", ".sock", ".log", ".crash", ".busy"):
        record.with_suffix(suffix).unlink(missing_ok=True)
