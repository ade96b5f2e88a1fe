"""The process that keeps a local federation running: `python -m shoal.devstack.keeper FOLDER`.

Starts the other programs, restarts a dead one after 0.5 s as an init would, hurts them on request (`shoal dev break`),
and answers on a Unix socket in the stack's folder with one JSON object a line. Imports none of the programs.

A bare name is a machine: `kill` takes all of its processes at once and leaves them dead until `resume` (power back).
`NAME/supervisor`, `/front`, `/worker` is one kind of process: whoever is in charge brings it back. `cut` and `slow` are
done on the roads between machines (roads.py), `fill` by a limit on how large a file of that machine may grow, `heat`
and `unplug` by the file that says how an emulated device is.
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

from shoal.devstack import etcd, layout, roads
from shoal.devstack.layout import Member, Stack
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire.unix import reachable

RESTART_AFTER_S: Final = 0.5
STOP_WITHIN_S: Final = 10.0
READY_WITHIN_S: Final = 60.0
SOCKET: Final = "keeper.sock"
FILLED_BYTES: Final = 64 * 2**10
"""Room for the desired set, as the agent keeps it on a disk that is really full."""
HOT_C: Final = 97.0
"""Processors and accelerators slow themselves down between 90 and 105 degrees."""
CONDITIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "heat": {"temperature_c": HOT_C, "throttled": True},
    "unplug": {"answers": False},
}
"""What an emulated device says of itself then (`shoal-agent run --emulate-condition`)."""
TELL_EVERY_S: Final = 1.0
"""How soon the roads know the processes that a broken machine started since."""
VERBS: Final = {
    "kill": "SIGKILL; a bare name stays down until resume",
    "pause": "SIGSTOP",
    "resume": "SIGCONT, and start what was killed",
    "cut": "nothing passes between it and the others, and nobody is told",
    "slow": f"{roads.SLOW_BYTES_PER_S // 1024} KiB/s between it and the others, each way together",
    "fill": f"an agent's disk is full: no file of it grows beyond {FILLED_BYTES // 1024} KiB",
    "heat": f"an emulated device is at {HOT_C:g} C and says that it slows itself down; its answers stay as fast",
    "unplug": "an emulated device does not answer its driver; kill NAME/worker beside it: nothing loads on it again",
    "heal": "undo cut, slow, fill, heat and unplug",
}
_ALONE: Final = ("broker", "coordinator", layout.FEDERATION, layout.ETCD)
"""Members of one process, which has their own role."""
_SILENT: Final = {"broker": "mqtt", layout.ETCD: "client"}
"""Who does not say when it listens, and where it does then."""
LASTING: Final = ("cut", "slow", "fill", *CONDITIONS)
"""What stays until `heal`."""


@dataclass
class Program:
    """One supervised process. held: killed on purpose, not to be restarted."""

    member: Member
    process: asyncio.subprocess.Process | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    ready_event: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    held: bool = False
    starts: int = 0


class Keeper:
    """See the module. `run` returns when asked to stop."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self._folder = folder
        self._stack = stack
        self._programs = {member.name: Program(member) for member in stack.members}
        self._broken: dict[str, set[str]] = {name: set() for name in self._programs}
        self._roads: asyncio.subprocess.Process | None = None
        self._telling = asyncio.Lock()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        (self._folder / "logs").mkdir(exist_ok=True)
        for member in self._stack.members:
            self._tell_condition(member)  # what an earlier keeper broke is whole again
        await self._open_roads()
        telling = asyncio.create_task(self._tell_roads_forever())
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        with reachable(path) as address:
            server = await asyncio.start_unix_server(self._serve, address)
        path.chmod(0o600)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with server:
            await self._stopping.wait()
        telling.cancel()
        await self._stop_all()
        await self._close_roads()
        path.unlink(missing_ok=True)

    # one request a line

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    reply = {"ok": await self._answer(json.loads(line))}
                except ShoalError as error:
                    reply = {
                        "refusal": [error.refusal.code, error.refusal.found, error.refusal.asked, error.refusal.remedy]
                    }
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _answer(self, request: dict[str, Any]) -> Any:
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
                return None
            case other:
                raise refuse(
                    Code.UNIMPLEMENTED, f"operation {other!r}", "start, restart, status, break, down", "update shoal"
                )

    def _program(self, name: str) -> Program:
        if name not in self._programs:
            raise refuse(Code.NOT_FOUND, f"no part called {name!r}", ", ".join(self._programs), "shoal dev status")
        return self._programs[name]

    # starting and restarting

    async def _start(self, name: str) -> dict[str, Any]:
        """Starts it when it is not running; its ready line when it said that it listens."""
        program = self._program(name)
        program.held = False
        if program.task is None or program.task.done():
            program.ready_event.clear()
            program.task = asyncio.create_task(self._keep(program), name=f"keep-{name}")
        waited = asyncio.create_task(program.ready_event.wait())
        await asyncio.wait({waited, program.task}, timeout=READY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        waited.cancel()
        if not program.ready_event.is_set():
            log = self._folder / "logs" / f"{name}.log"
            raise ShoalError(
                Refusal(Code.INTERNAL, f"{name} did not start: {last_line(log)}", "a ready line", f"read {log}")
            )
        return program.ready

    async def _keep(self, program: Program) -> None:
        name = program.member.name
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
        while not (program.held or self._stopping.is_set()):
            with (self._folder / "logs" / f"{name}.log").open("ab") as log:
                # A session of its own: a terminal's ^C reaches the command that waits, not the federation.
                program.process = await asyncio.create_subprocess_exec(
                    *self.command(program.member),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            program.starts += 1
            if "fill" in self._broken[name]:
                _limit_files([program.process.pid], FILLED_BYTES)
            if program.member.role in _SILENT:
                await self._wait_listening(program)
            assert program.process.stdout is not None
            async for line in program.process.stdout:
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        program.ready = found
                        program.ready_event.set()
            await program.process.wait()
            if not (program.held or self._stopping.is_set()):
                await asyncio.sleep(RESTART_AFTER_S)

    async def _wait_listening(self, program: Program) -> None:
        """For a program that says nothing when it is ready."""
        host, _, port = program.member.addresses[_SILENT[program.member.role]].rpartition(":")
        assert program.process is not None
        while program.process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                program.ready_event.set()
                return
            await asyncio.sleep(0.02)

    def command(self, member: Member) -> list[str]:
        """The program's command line, as a user would type it."""
        addresses = member.addresses
        state = str(self._folder / member.name)
        if member.role == "broker":
            return [str(self._folder / member.name / "start")]
        if member.role == layout.ETCD:
            return etcd.command(self._folder, self._stack, member)
        region = self._stack.of(member.region)
        mqtt = ["--mqtt", layout.road(region.broker.addresses["mqtt"])] if region.broker is not None else []
        if member.role in ("coordinator", layout.FEDERATION):
            role = "region" if member.role == "coordinator" else member.role
            return [
                *program_path("shoal-coordinator"), "run", "--role", role, "--region", member.region,
                "--data-dir", state, "--link", addresses["link"], "--enrol", addresses["enrol"],
                "--metrics", addresses["metrics"], *([*mqtt, "--models", addresses["models"]] if mqtt else []),
                *self._broker_dir(region), *self._reached(member), *etcd.flags(self._folder, self._stack),
                *self._shared(member),
            ]  # fmt: skip
        command = [
            *program_path("shoal-agent"), "run", "--role", "node" if member.role == "agent" else "gateway",
            "--state-dir", state, "--coordinator", _roads(region.coordinators, "link"),
            "--advertise", layout.road(addresses["grpc"]).rpartition(":")[0],
            "--grpc", addresses["grpc"], "--rest", addresses["rest"], "--token-port", addresses["token"],
            "--metrics", addresses["metrics"], "--front-metrics", addresses["front-metrics"],
            *(["--link", "mqtt", *mqtt] if mqtt else []),
        ]  # fmt: skip
        for key, value in member.labels.items():
            command += ["--label", f"{key}={value}"]
        if member.emulate:
            stack = layout.load(self._folder)
            command += ["--no-cpu", "--emulate", member.emulate, "--time-scale", f"{stack.time_scale:g}"]
            command += ["--wake-scale", f"{stack.wake_scale:g}", "--emulate-condition", str(self._condition(member))]
        return command

    def _broker_dir(self, region: Stack) -> list[str]:
        broker = region.broker
        return ["--broker-dir", str(self._folder / broker.name)] if broker is not None else []

    def _reached(self, member: Member) -> list[str]:
        """Coordinators of several regions, their federation, and several of one region are reached by road."""
        if not self._stack.federation and len(self._stack.replicas(member)) == 1:
            return []
        peers = ["--peers", member.addresses["peers"]] if "peers" in member.addresses else []
        return [*peers, "--advertise", layout.ROAD]

    def _shared(self, member: Member) -> list[str]:
        """Of several on one state: one CA, and the addresses of all."""
        replicas = self._stack.replicas(member)
        if len(replicas) == 1:
            return []
        links, enrols = (_roads(replicas, use) for use in ("link", "enrol"))
        return ["--shared-dir", str(layout.shared(self._folder, replicas)), "--links", links, "--enrols", enrols]

    # hurting and ending

    async def _break(self, target: str, verb: str) -> list[int]:
        if verb not in VERBS:
            raise refuse(Code.FIELD_INVALID, f"verb {verb!r}", ", ".join(VERBS), "shoal dev break --help")
        name, _, part = target.partition("/")
        program = self._program(name)
        if verb == "heal" or verb in LASTING:
            return await self._break_for_long(program, part, verb)
        found = [process for process in self.processes(program) if part in ("", process["role"])]
        if verb == "resume":
            pids = _signal_all(found, signal.SIGCONT)
            if program.held:
                await self._start(name)
            return pids
        if not found:
            raise refuse(
                Code.NOT_FOUND, f"{target} has no running process", "supervisor, front or worker", "shoal dev status"
            )
        if verb == "kill" and not part:
            program.held = True
        return _signal_all(found, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)

    async def _break_for_long(self, program: Program, part: str, verb: str) -> list[int]:
        """The machine's processes."""
        member = program.member
        if part:
            raise refuse(
                Code.FIELD_INVALID, f"{member.name}/{part}", f"a whole machine to {verb}", "leave the part out"
            )
        if verb == "fill" and member.role != "agent":
            raise refuse(Code.FIELD_INVALID, f"fill {member.name}", "an agent", "only agents' disks can be filled")
        if verb in CONDITIONS and not member.emulate:
            raise refuse(
                Code.FIELD_INVALID, f"{verb} {member.name}", "an emulated device", "shoal dev status says which are"
            )
        broken = self._broken[member.name]
        if verb == "heal":
            broken.clear()
        else:
            broken.add(verb)
        self._tell_condition(member)
        pids = [process["pid"] for process in self.processes(program)]
        _limit_files(pids, FILLED_BYTES if "fill" in broken else resource.RLIM_INFINITY)
        await self._tell_roads()
        return pids

    def _condition(self, member: Member) -> Path:
        return self._folder / f"{member.name}.condition.json"

    def _tell_condition(self, member: Member) -> None:
        """At once, and whole: the agent may read at any moment."""
        path = self._condition(member)
        said = {
            key: value
            for verb, each in CONDITIONS.items()
            if verb in self._broken[member.name]
            for key, value in each.items()
        }
        if said:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(said))
            fresh.replace(path)
        else:
            path.unlink(missing_ok=True)

    async def _open_roads(self) -> None:
        """Before anybody dials."""
        with (self._folder / "logs" / "roads.log").open("ab") as log:
            self._roads = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal.devstack.roads", str(self._folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        await self._heard_from_roads()

    async def _tell_roads(self) -> None:
        """Returns when they know."""
        assert self._roads is not None
        assert self._roads.stdin is not None
        on_roads = {name for name, verbs in self._broken.items() if verbs & {"cut", "slow"}}
        pids = {name: tuple(one["pid"] for one in self.processes(self._programs[name])) for name in on_roads}
        cut, slow = (frozenset(name for name in on_roads if verb in self._broken[name]) for verb in ("cut", "slow"))
        async with self._telling:
            self._roads.stdin.write(roads.Faults(cut, slow, pids).line())
            await self._heard_from_roads()

    async def _tell_roads_forever(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            if any(verbs & {"cut", "slow"} for verbs in self._broken.values()):
                await self._tell_roads()

    async def _heard_from_roads(self) -> None:
        assert self._roads is not None
        assert self._roads.stdout is not None
        if not await self._roads.stdout.readline():
            log = self._folder / "logs" / "roads.log"
            raise refuse(Code.INTERNAL, f"the roads ended: {last_line(log)}", "relays on 127.0.0.2", f"read {log}")

    async def _close_roads(self) -> None:
        if self._roads is not None and self._roads.returncode is None:
            self._roads.kill()
            await self._roads.wait()

    async def _stop(self, program: Program) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for whatever is left of this machine."""
        program.held = True
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
            await program.task

    async def _stop_all(self) -> None:
        # Agents first, so that none reports its siblings' end as a loss.
        order = {"agent": 0, "gateway": 1, "coordinator": 2, "broker": 3, layout.FEDERATION: 3, layout.ETCD: 4}
        for rank in sorted(set(order.values())):
            await asyncio.gather(
                *(self._stop(one) for one in self._programs.values() if order[one.member.role] == rank)
            )

    # looking

    def processes(self, program: Program) -> list[dict[str, Any]]:
        """All processes of one machine: the supervised one, its descendants, and those its records name."""
        found: dict[int, dict[str, Any]] = {}
        main_role = program.member.role if program.member.role in _ALONE else "supervisor"
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
                "broken": sorted(self._broken[member.name]),
                "data_dir": str(self._folder / member.name),
                "log": str(self._folder / "logs" / f"{member.name}.log"),
            }
            running = self.processes(program)
            for process in running:
                main = process["role"] in ("supervisor", *_ALONE)
                rows.append(
                    {
                        **common,
                        **process,
                        "state": _state(process["pid"]),
                        "ports": dict(member.addresses) if main else {},
                        "starts": program.starts if main else 1,
                    }
                )
            if not running:
                state = "killed" if program.held else "stopped"
                rows.append(
                    {
                        **common,
                        "pid": 0,
                        "role": "-",
                        "state": state,
                        "ports": dict(member.addresses),
                        "starts": program.starts,
                    }
                )
        return rows


def _roads(members: Sequence[Member], use: str) -> str:
    return ",".join(layout.road(member.addresses[use]) for member in members)


def program_path(name: str) -> list[str]:
    """The installed program beside this interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise refuse(Code.NOT_FOUND, f"{name} is not installed", "all of Shoal", "pip install 'shoal[local]'")
    return [found]


def last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1][:400]
    return "it said nothing"


def _signal_all(processes: list[dict[str, Any]], number: signal.Signals) -> list[int]:
    hit = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process["pid"], number)
            hit.append(process["pid"])
    return hit


def _limit_files(pids: Sequence[int], size: int) -> None:
    """The hard limit stays, so that it can be undone without rights."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    return {psutil.STATUS_STOPPED: "paused", psutil.STATUS_ZOMBIE: "gone"}.get(status, "running")


def main() -> None:
    folder = Path(sys.argv[1])
    asyncio.run(Keeper(folder, layout.load(folder)).run())


if __name__ == "__main__":
    main()
