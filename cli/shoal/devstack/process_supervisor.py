"""The process that keeps a local federation running: `python -m shoal.devstack.process_supervisor FOLDER`.

With `--temporary` it ends with its starter, however that ends, and deletes the folder: its standard input is a pipe
whose other end only the starter has. The members end with it, even if it is killed itself; then the folder stays.

It starts the other programs, restarts a dead one after 0.5 s as an init would, injects faults on request (`shoal dev
break`), and answers on a Unix socket in the stack's folder with one JSON object a line. It imports none of the
programs.

A bare name is a machine: `kill` ends all of its processes at once and keeps them down until `resume` (power restored).
`NAME/supervisor`, `/front` or `/worker` is one kind of process, which its own supervisor restarts. `cut` and `slow` act
on the relays between machines (link_shaping.py), `fill` limits the size of that machine's files, and `heat` and
`unplug` write the file with the state of an emulated device.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from shoal.devstack import etcd, layout, link_shaping
from shoal.devstack.layout import StackLayout, StackMember
from shoal.devstack.temporary_member import temporary_command
from shoal.host.unix_sockets import socket_address
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse

RESTART_AFTER_S: Final = 0.5
STOP_WITHIN_S: Final = 10.0
UNUSED_POLL_S: Final = 0.1
READY_WITHIN_S: Final = 60.0
SOCKET: Final = "supervisor.sock"
TEMPORARY: Final = "--temporary"
FULL_DISK_FILE_BYTES: Final = 64 * 2**10
"""Leaves room for the desired set, which the agent still keeps on a disk that is really full."""
HOT_C: Final = 97.0
"""Processors and accelerators throttle themselves between 90 and 105 degrees."""
EMULATED_STATES: Final[Mapping[str, Mapping[str, Any]]] = {
    "heat": {"temperature_c": HOT_C, "throttled": True},
    "unplug": {"answers": False},
}
"""What an emulated device then reports (`shoal-agent run --emulate-condition`)."""
LINK_FAULT_INTERVAL_S: Final = 1.0
"""How soon the relays learn of processes that a broken machine has started since."""
VERBS: Final = {
    "kill": "SIGKILL; a bare name stays down until resume",
    "pause": "SIGSTOP",
    "resume": "SIGCONT, and start what was killed",
    "cut": "nothing passes between it and the others, and nobody is told",
    "slow": f"{link_shaping.SLOW_BYTES_PER_S // 1024} KiB/s between it and the others, each way together",
    "fill": f"an agent's disk is full: no file of it grows beyond {FULL_DISK_FILE_BYTES // 1024} KiB",
    "heat": f"an emulated device is at {HOT_C:g} C and says that it slows itself down; its answers stay as fast",
    "unplug": "an emulated device does not answer its driver; kill NAME/worker beside it: nothing loads on it again",
    "heal": "undo cut, slow, fill, heat and unplug",
}
_OPERATIONS: Final = "start, restart, status, break, down, is_stopping"
_SINGLE_PROCESS_ROLES: Final = ("broker", "coordinator", layout.FEDERATION, layout.ETCD)
"""Members that are one process, which has the member's role."""
_ROLES_WITHOUT_READY_LINE: Final = {"broker": "mqtt", layout.ETCD: "client"}
"""Roles that print no ready line -> address that accepts connections once they listen."""
UNTIL_HEALED: Final = ("cut", "slow", "fill", *EMULATED_STATES)
"""Faults that last until `heal`."""


@dataclass
class SupervisedProgram:
    """One supervised program."""

    # What to run.
    member: StackMember
    # The last process started; None before the first.
    process: asyncio.subprocess.Process | None = None
    # The program's last ready line; empty before the first.
    ready: dict[str, Any] = field(default_factory=dict)
    # Set once the program listens.
    ready_event: asyncio.Event = field(default_factory=asyncio.Event)
    # Runs and restarts the program; None before the first start.
    task: asyncio.Task[None] | None = None
    # True if it was killed or stopped on purpose: it stays down.
    no_restart: bool = False
    # Processes started so far, restarts included.
    start_count: int = 0


class ProcessSupervisor:
    """See the module. `run` returns when asked to stop."""

    def __init__(self, folder: Path, stack: StackLayout, starter: int | None = None) -> None:
        """starter: file that is at its end once whoever wants the federation is gone; None: it outlives its starter."""
        self._folder = folder
        self._stack = stack
        self._starter = starter
        self._is_abandoned = False
        self._programs = {member.name: SupervisedProgram(member) for member in stack.members}
        self._active_faults: dict[str, set[str]] = {name: set() for name in self._programs}
        self._relays: asyncio.subprocess.Process | None = None
        self._relay_lock = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        (self._folder / "logs").mkdir(exist_ok=True)
        for member in self._stack.members:
            self._write_emulated_state(member)  # faults of an earlier supervisor are over
        await self._start_relays()
        telling = asyncio.create_task(self._refresh_link_faults())
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        with socket_address(path) as address:
            server = await asyncio.start_unix_server(self._serve, address)
        path.chmod(0o600)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        if self._starter is not None:
            loop.add_reader(self._starter, self._on_starter_gone, self._starter)
        # It answers until all have ended: who waits sees them go, and knows that none runs once nobody answers.
        async with server:
            await self._stopping.wait()
            telling.cancel()
            await self._stop_all()
            await self._stop_relays()
        path.unlink(missing_ok=True)
        if self._is_abandoned:  # as the starter would have done
            await self._wait_unused()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _on_starter_gone(self, starter: int) -> None:
        """Nobody writes there: it is readable because it is at its end."""
        asyncio.get_running_loop().remove_reader(starter)
        self._is_abandoned = True
        self._stopping.set()

    async def _wait_unused(self) -> None:
        """The starter may have had an agent join, which would make the folder again."""
        loop = asyncio.get_running_loop()
        end = loop.time() + STOP_WITHIN_S
        while _are_named(self._folder) and loop.time() < end:  # noqa: ASYNC110 - they wake nobody
            await asyncio.sleep(UNUSED_POLL_S)

    # one request a line

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    reply = {"ok": await self._handle_request(json.loads(line))}
                except ShoalError as error:
                    reply = {
                        "refusal": [error.refusal.code, error.refusal.found, error.refusal.asked, error.refusal.remedy]
                    }
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _handle_request(self, request: dict[str, Any]) -> Any:
        match request["op"]:
            case "start":
                return await self._start(request["name"])
            case "restart":
                await self._stop(self._program(request["name"]))
                return await self._start(request["name"])
            case "status":
                return self._status()
            case "break":
                return await self._break(request["name"], request["verb"])
            case "down":
                self._stopping.set()
                return self._running_members()
            case "is_stopping":
                return self._stopping.is_set()
            case other:
                raise refuse(Code.UNIMPLEMENTED, f"operation {other!r}", _OPERATIONS, "update shoal")

    def _program(self, name: str) -> SupervisedProgram:
        if name not in self._programs:
            raise refuse(Code.NOT_FOUND, f"no part called {name!r}", ", ".join(self._programs), "shoal dev status")
        return self._programs[name]

    # starting and restarting

    async def _start(self, name: str) -> dict[str, Any]:
        """Start the program unless it runs; return its ready line once it listens."""
        program = self._program(name)
        if self._stopping.is_set():
            raise refuse(Code.CONFLICT, f"all of {self._folder} is being stopped", "one that runs", "shoal dev up")
        program.no_restart = False
        if program.task is None or program.task.done():
            program.ready_event.clear()
            program.task = asyncio.create_task(self._run_and_restart(program), name=f"keep-{name}")
        waited = asyncio.create_task(program.ready_event.wait())
        await asyncio.wait({waited, program.task}, timeout=READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        waited.cancel()
        if not program.ready_event.is_set():
            log = self._log_file(program)
            raise ShoalError(
                Refusal(Code.INTERNAL, f"{name} did not start: {last_line(log)}", "a ready line", f"read {log}")
            )
        return program.ready

    async def _run_and_restart(self, program: SupervisedProgram) -> None:
        """Until it is to be restarted no more. What cannot be started at all, and never could, is given up; `_start`
        says so."""
        while not (program.no_restart or self._stopping.is_set()):
            try:
                await self._run_once(program)
            except (OSError, ShoalError, ValueError) as error:  # ValueError: a line of output that never ends
                with contextlib.suppress(OSError), self._log_file(program).open("a") as file:
                    file.write(f"{error}\n")
                if program.process is not None and program.process.returncode is None:
                    program.process.kill()
                    await program.process.wait()
                if not program.ready_event.is_set():
                    return
            if not (program.no_restart or self._stopping.is_set()):
                await asyncio.sleep(RESTART_AFTER_S)

    async def _run_once(self, program: SupervisedProgram) -> None:
        """Raises OSError, ShoalError, ValueError."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
        command = self.command(program.member)
        if self._starter is not None:
            command = temporary_command(command)
        with self._log_file(program).open("ab") as log:
            # Its own session, so that a terminal's ^C reaches the waiting command but not the federation.
            program.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        program.start_count += 1
        if program.no_restart or self._stopping.is_set():  # since it was being made, when nobody could signal it
            program.process.kill()
        if "fill" in self._active_faults[program.member.name]:
            _limit_file_size([program.process.pid], FULL_DISK_FILE_BYTES)
        if program.member.role in _ROLES_WITHOUT_READY_LINE:
            await self._wait_listening(program)
        assert program.process.stdout is not None
        async for line in program.process.stdout:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    program.ready = found
                    program.ready_event.set()
        await program.process.wait()

    def _log_file(self, program: SupervisedProgram) -> Path:
        return self._folder / "logs" / f"{program.member.name}.log"

    async def _wait_listening(self, program: SupervisedProgram) -> None:
        """Wait for a program that prints no ready line."""
        address = HostPort.parse(program.member.addresses[_ROLES_WITHOUT_READY_LINE[program.member.role]])
        assert program.process is not None
        while program.process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.close()
                program.ready_event.set()
                return
            await asyncio.sleep(0.02)

    def command(self, member: StackMember) -> list[str]:
        """The program's command line, as a user would type it."""
        addresses = member.addresses
        state = str(self._folder / member.name)
        if member.role == "broker":
            return [str(self._folder / member.name / "start")]
        if member.role == layout.ETCD:
            return etcd.command(self._folder, self._stack, member)
        region = self._stack.for_region(member.region)
        mqtt = ["--mqtt", region.dial_address(region.broker.addresses["mqtt"])] if region.broker is not None else []
        if member.role in ("coordinator", layout.FEDERATION):
            role = "region" if member.role == "coordinator" else member.role
            return [
                *program_path("shoal-coordinator"),
                "run",
                "--role",
                role,
                "--region",
                member.region,
                "--data-dir",
                state,
                "--link",
                addresses["link"],
                "--enrol",
                addresses["enrol"],
                "--metrics",
                addresses["metrics"],
                # A stack that an earlier version laid out has no port for it.
                *(["--dashboard", addresses.get("dashboard", "off")] if role == "region" else []),
                *([*mqtt, "--models", addresses["models"]] if mqtt else []),
                *self._broker_flags(region),
                *self._peer_flags(member),
                *etcd.store_flags(self._folder, self._stack, member),
                *self._shared_state_flags(member),
            ]
        command = [
            *program_path("shoal-agent"), "run", "--role", "node" if member.role == "agent" else "gateway",
            "--state-dir", state, "--coordinator", _dial_addresses(region, region.coordinators, "link"),
            "--advertise", HostPort.parse(region.dial_address(addresses["data"])).host,
            "--listen", addresses["data"],
            "--metrics", addresses["metrics"], "--front-metrics", addresses["front-metrics"],
            *(["--link", "mqtt", *mqtt] if mqtt else []),
        ]  # fmt: skip
        for key, value in member.labels.items():
            command += ["--label", f"{key}={value}"]
        if member.simulate:
            command += ["--simulate", member.simulate]
        if member.emulate:
            stack = layout.load(self._folder)
            command += ["--no-cpu", "--emulate", member.emulate, "--time-scale", f"{stack.time_scale:g}"]
            command += [
                "--wake-scale",
                f"{stack.wake_scale:g}",
                "--emulate-condition",
                str(emulated_state_file(self._folder, member)),
            ]
        return command

    def _broker_flags(self, region: StackLayout) -> list[str]:
        broker = region.broker
        return ["--broker-dir", str(self._folder / broker.name)] if broker is not None else []

    def _peer_flags(self, member: StackMember) -> list[str]:
        """Coordinators of several regions, of their federation, and several of one region dial each other through
        relays."""
        if not self._stack.federation and len(self._stack.replicas(member)) == 1:
            return []
        peers = ["--peers", member.addresses["peers"]] if "peers" in member.addresses else []
        return [*peers, "--advertise", HostPort.parse(self._stack.dial_address(member.addresses["link"])).host]

    def _shared_state_flags(self, member: StackMember) -> list[str]:
        """Replicas that share their state share one CA and list the addresses of all."""
        replicas = self._stack.replicas(member)
        if len(replicas) == 1:
            return []
        links, enrols = (_dial_addresses(self._stack, replicas, use) for use in ("link", "enrol"))
        return ["--shared-dir", str(layout.ca_folder(self._folder, replicas)), "--links", links, "--enrols", enrols]

    # hurting and ending

    async def _break(self, target: str, verb: str) -> list[int]:
        if verb not in VERBS:
            raise refuse(Code.FIELD_INVALID, f"verb {verb!r}", ", ".join(VERBS), "shoal dev break --help")
        name, _, part = target.partition("/")
        program = self._program(name)
        if verb == "heal" or verb in UNTIL_HEALED:
            return await self._break_until_healed(program, part, verb)
        found = [process for process in self.processes(program) if part in ("", process["role"])]
        if verb == "resume":
            pids = _signal_all(found, signal.SIGCONT)
            if program.no_restart:
                await self._start(name)
            return pids
        if not found:
            raise refuse(
                Code.NOT_FOUND, f"{target} has no running process", "supervisor, front or worker", "shoal dev status"
            )
        if verb == "kill" and not part:
            program.no_restart = True
        return _signal_all(found, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)

    async def _break_until_healed(self, program: SupervisedProgram, part: str, verb: str) -> list[int]:
        """Apply or heal a lasting fault; return the machine's process ids."""
        member = program.member
        if part:
            raise refuse(
                Code.FIELD_INVALID, f"{member.name}/{part}", f"a whole machine to {verb}", "leave the part out"
            )
        if verb == "fill" and member.role != "agent":
            raise refuse(Code.FIELD_INVALID, f"fill {member.name}", "an agent", "only agents' disks can be filled")
        if verb in EMULATED_STATES and not member.emulate:
            raise refuse(
                Code.FIELD_INVALID, f"{verb} {member.name}", "an emulated device", "shoal dev status says which are"
            )
        if verb in ("cut", "slow") and not self._stack.relayed:
            raise refuse(Code.FIELD_INVALID, f"{verb} {member.name}", "a stack with relays", "start it with them")
        broken = self._active_faults[member.name]
        if verb == "heal":
            broken.clear()
        else:
            broken.add(verb)
        self._write_emulated_state(member)
        pids = [process["pid"] for process in self.processes(program)]
        _limit_file_size(pids, FULL_DISK_FILE_BYTES if "fill" in broken else resource.RLIM_INFINITY)
        await self._send_link_faults()
        return pids

    def _write_emulated_state(self, member: StackMember) -> None:
        """Replace the file atomically: the agent may read it at any moment."""
        path = emulated_state_file(self._folder, member)
        said = {
            key: value
            for verb, each in EMULATED_STATES.items()
            if verb in self._active_faults[member.name]
            for key, value in each.items()
        }
        if said:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(said))
            fresh.replace(path)
        else:
            path.unlink(missing_ok=True)

    async def _start_relays(self) -> None:
        """Called before any member dials another."""
        with (self._folder / "logs" / "roads.log").open("ab") as log:
            self._relays = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal.devstack.link_shaping", str(self._folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        await self._await_relay_ack()

    async def _send_link_faults(self) -> None:
        """Returns when the relays have applied the faults."""
        assert self._relays is not None
        assert self._relays.stdin is not None
        on_roads = {name for name, verbs in self._active_faults.items() if verbs & {"cut", "slow"}}
        pids = {name: tuple(one["pid"] for one in self.processes(self._programs[name])) for name in on_roads}
        cut, slow = (
            frozenset(name for name in on_roads if verb in self._active_faults[name]) for verb in ("cut", "slow")
        )
        async with self._relay_lock:
            self._relays.stdin.write(link_shaping.LinkFaults(cut, slow, pids).to_line())
            await self._await_relay_ack()

    async def _refresh_link_faults(self) -> None:
        while True:
            await asyncio.sleep(LINK_FAULT_INTERVAL_S)
            if any(verbs & {"cut", "slow"} for verbs in self._active_faults.values()):
                await self._send_link_faults()

    async def _await_relay_ack(self) -> None:
        assert self._relays is not None
        assert self._relays.stdout is not None
        if not await self._relays.stdout.readline():
            log = self._folder / "logs" / "roads.log"
            raise refuse(Code.INTERNAL, f"the roads ended: {last_line(log)}", "relays on 127.0.0.2", f"read {log}")

    async def _stop_relays(self) -> None:
        if self._relays is not None and self._relays.returncode is None:
            self._relays.kill()
            await self._relays.wait()

    async def _stop(self, program: SupervisedProgram) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for what is left of this machine."""
        program.no_restart = True
        left = self.processes(program)
        if program.process is not None and program.process.returncode is None:
            _signal_all(left, signal.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                program.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(program.process.wait(), STOP_WITHIN_S)
        _signal_all(left, signal.SIGKILL)
        _signal_all(self.processes(program), signal.SIGKILL)
        if program.task is not None:
            await asyncio.gather(program.task, return_exceptions=True)  # whatever became of it, others are stopped too

    async def _stop_all(self) -> None:
        # Agents first, so that none reports the end of its peers as a loss.
        order = {"agent": 0, "gateway": 1, "coordinator": 2, "broker": 3, layout.FEDERATION: 3, layout.ETCD: 4}
        for rank in sorted(set(order.values())):
            await asyncio.gather(
                *(self._stop(one) for one in self._programs.values() if order[one.member.role] == rank)
            )

    # looking

    def _running_members(self) -> list[str]:
        """Names of those that were started and have not ended for good."""
        return [name for name, one in self._programs.items() if one.task is not None and not one.task.done()]

    def processes(self, program: SupervisedProgram) -> list[dict[str, Any]]:
        """All processes of one machine: the supervised one, its descendants, and those in its run records."""
        found: dict[int, dict[str, Any]] = {}
        main_role = program.member.role if program.member.role in _SINGLE_PROCESS_ROLES else "supervisor"
        process = program.process
        if process is not None and process.returncode is None:
            found[process.pid] = {"pid": process.pid, "role": main_role}
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    found[child.pid] = {"pid": child.pid, "role": "worker"}
        for record in sorted((self._folder / program.member.name / "run").glob("*.json")):
            role = "front" if record.name.startswith("front") else "worker"
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                pid = int(json.loads(record.read_text())["pid"])
                if str(self._folder / program.member.name) in " ".join(psutil.Process(pid).cmdline()) or pid in found:
                    found[pid] = {"pid": pid, "role": role}
        return list(found.values())

    def _status(self) -> list[dict[str, Any]]:
        rows = []
        for program in self._programs.values():
            member = program.member
            common = {
                "name": member.name,
                "region": member.region,
                "member": member.role,
                "emulated": bool(member.emulate),
                "profile": member.emulate,
                "broken": sorted(self._active_faults[member.name]),
                "data_dir": str(self._folder / member.name),
                "log": str(self._folder / "logs" / f"{member.name}.log"),
            }
            running = self.processes(program)
            for process in running:
                main = process["role"] in ("supervisor", *_SINGLE_PROCESS_ROLES)
                rows.append(
                    {
                        **common,
                        **process,
                        "state": _process_state(process["pid"]),
                        "ports": dict(member.addresses) if main else {},
                        "starts": program.start_count if main else 1,
                    }
                )
            if not running:
                state = "killed" if program.no_restart else "stopped"
                rows.append(
                    {
                        **common,
                        "pid": 0,
                        "role": "-",
                        "state": state,
                        "ports": dict(member.addresses),
                        "starts": program.start_count,
                    }
                )
        return rows


def _dial_addresses(stack: StackLayout, members: Sequence[StackMember], use: str) -> str:
    return ",".join(stack.dial_address(member.addresses[use]) for member in members)


def emulated_state_file(folder: Path, member: StackMember) -> Path:
    """Tells an agent in which state its emulated device is."""
    return folder / f"{member.name}.condition.json"


def program_path(name: str) -> list[str]:
    """The installed program beside this interpreter, else on PATH. Raises ShoalError(NOT_FOUND)."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise refuse(
            Code.NOT_FOUND, f"{name} is not installed", "all of Shoal, in one environment", "make dev, in its sources"
        )
    return [found]


def last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][:400]
    return "it said nothing"


def _are_named(folder: Path) -> bool:
    """Whether a command line of another process names what lies in this folder."""
    return any(
        each.pid != os.getpid() and any(f"{folder}/" in word for word in each.info["cmdline"] or ())
        for each in psutil.process_iter(["cmdline"])
    )


def _signal_all(processes: list[dict[str, Any]], number: signal.Signals) -> list[int]:
    hit = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], number)
            hit.append(process["pid"])
    return hit


def _limit_file_size(pids: Sequence[int], size: int) -> None:
    """Keep the hard limit, so that the change can be undone without privileges."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))


def _process_state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    return {psutil.STATUS_STOPPED: "paused", psutil.STATUS_ZOMBIE: "gone"}.get(status, "running")


def main() -> None:
    folder = Path(sys.argv[1])
    starter = sys.stdin.fileno() if TEMPORARY in sys.argv[2:] else None
    asyncio.run(ProcessSupervisor(folder, layout.load(folder), starter).run())


if __name__ == "__main__":
    main()
