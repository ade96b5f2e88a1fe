"""Starts, queries and stops the supervisor of a local federation, for `shoal dev` and `shoal demo`."""

import datetime
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from shoal.client import Context, Contexts, RegionClient, client_files
from shoal.devstack import broker, etcd, layout
from shoal.devstack.bootstrap import Say, federate, wait
from shoal.devstack.layout import StackLayout, StackMember, StackOptions
from shoal.devstack.process_supervisor import (
    READY_WITHIN_S,
    SOCKET,
    STOP_WITHIN_S,
    TEMPORARY,
    emulated_state_file,
    last_line,
    program_path,
)
from shoal.devstack.scale import Rate, time_scale
from shoal.host.unix_sockets import socket_address
from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError, refuse

CONTEXT: Final = "dev"
_NAMED_MOST: Final = 5
"""Members that an error lists by name."""
NODES_READY_WITHIN_S: Final = 90.0
ANSWER_WITHIN_S: Final = READY_WITHIN_S + 10
"""For the supervisor's answer, which may be that a program is ready."""
STALLED_AFTER_S: Final = 3 * STOP_WITHIN_S
"""Since the last member ended. Those that ignore SIGTERM end together after `STOP_WITHIN_S`, and a busy machine is slow
to run even that."""
STOP_REPORT_S: Final = 2.0
"""Between two counts of what is left."""
STOP_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A running stack, and how to reach it."""

    # What runs, with all addresses.
    stack: StackLayout
    # Where the stack keeps its files.
    folder: Path
    # The operator's context in the first region.
    operator: Context
    # A tenant's context in the first region.
    client: Context
    # File of a bearer token for the same tenant.
    bearer: Path


class Control:
    """Controls one stack, identified by its folder."""

    def __init__(
        self,
        folder: Path | None = None,
        contexts: Contexts | None = None,
        free_ports: Callable[[int], Sequence[int]] | None = None,
        *,
        is_temporary: bool = False,
    ) -> None:
        """free_ports: returns that many free ports; by default any. is_temporary: what this process starts ends with
        it, even by SIGKILL, and the folder is deleted then; so it is none that users have."""
        if is_temporary and folder is None:
            raise ValueError("the default folder is not temporary")
        # Absolute, because contexts name files in it, and are read from elsewhere.
        self.folder = (folder or layout.default_folder()).absolute()
        self._contexts = contexts or Contexts()
        self._free_ports = free_ports or _free_ports
        self._is_temporary = is_temporary
        # The supervisor of what is temporary, until it has ended. The kernel closes its standard input where nobody
        # else does.
        self._held: subprocess.Popen[bytes] | None = None

    def up(self, asked: StackOptions, say: Say) -> RunningStack:
        """Start what is not running; on return everything is enrolled, ready, measured and joined. All or nothing.

        Raises ShoalError with the code of the part that failed, or CONFLICT while another start is running.
        """
        with self._exclusive_lock():
            if self.running():
                self._refuse_while_stopping()
                stack = layout.load(self.folder)
                say(f"already up in {self.folder}")
                if str(StackOptions.from_stack(stack)) != str(asked):
                    say(f"as it was started; for what is asked now: --data-dir {_free_folder(self.folder)}")
                    say(f"or {self._purge_command()} first, which deletes what was applied")
                # another stack may have taken the names of the contexts since
                self._save_contexts(stack)
                return self._describe(stack)
            if self._held is not None and self._held.poll() is None:
                found = f"another supervisor of {self.folder} still ends, and deletes the folder then"
                raise refuse(Code.CONFLICT, found, "one at a time", "wait for it")
            before = None if (self.folder / layout.FILE).exists() else frozenset(self.folder.iterdir())
            try:
                return self._start(asked, say)
            except BaseException:
                self.down()
                if before is not None:
                    self._discard(before)
                raise

    def _refuse_while_stopping(self) -> None:
        try:
            is_stopping = self.ask({"op": "is_stopping"})
        except ShoalError as error:
            # A supervisor before this version does not know the question, nor answers while it stops.
            if error.code not in (Code.UNIMPLEMENTED, Code.NOT_FOUND):
                raise
            return
        if is_stopping:
            found = f"the local federation in {self.folder} is being stopped"
            raise refuse(Code.CONFLICT, found, "one that runs, or none", "shoal dev down, which waits for its end")

    def _discard(self, before: frozenset[Path]) -> None:
        """Delete what a first start that failed has made, but for its logs: nobody has applied anything to it, and the
        next one may be asked for something else. before: what was in the folder, which stays."""
        try:
            stack = layout.load(self.folder)
        except ShoalError:
            return  # it made nothing but logs
        for path in {self.folder / name for name in self._names_of(stack)} - before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _names_of(self, stack: StackLayout) -> Iterator[str]:
        """What the stack makes in its folder, but for its logs. The folder may hold other files: --data-dir may be any
        folder, and others may write there meanwhile."""
        yield from (layout.FILE, SOCKET, etcd.FILES)
        for name in stack.regions:
            yield self._client_folder(stack, name).name
        for member in stack.members:
            yield from (member.name, emulated_state_file(self.folder, member).name)
        for member in (*stack.federation, *stack.coordinators):
            yield layout.ca_folder(self.folder, stack.replicas(member)).name

    @contextmanager
    def _exclusive_lock(self) -> Iterator[None]:
        """Two concurrent starts in one folder would each take the other's members for its own."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "up.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                raise refuse(
                    Code.CONFLICT, f"another `shoal dev up` is at work in {self.folder}", "one at a time", "wait for it"
                ) from cause
            yield

    def _start(self, asked: StackOptions, say: Say) -> RunningStack:
        if asked.link == "mqtt":
            broker.require()
        if asked.store == layout.ETCD:
            etcd.require()
        stack = self._load_or_compose(asked)
        layout.save(self.folder, stack)
        if stack.etcd:
            now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 - dates of certificates
            etcd.prepare(self.folder, now, etcd.scopes_of(stack))
        self._spawn_supervisor()
        if stack.etcd:
            say(f"etcd of this machine, {len(stack.etcd)} members")
            self._start_all(stack.etcd)  # none listens before a majority runs
            self._authorise(stack)
        for member in stack.federation:
            say(f"federation {member.name}")
            self.ask({"op": "start", "name": member.name})
        with ExitStack() as opened:
            apis = dict[str, RegionClient]()
            for name in stack.regions:
                apis[name] = opened.enter_context(RegionClient(self._start_coordinators(stack.for_region(name), say)))
                for gateway in stack.for_region(name).gateways:
                    self._start_node(apis[name], stack, gateway, say)
            # One agent of each kind tells the scale; the others that emulate then start with it, and once.
            later = [each for each in stack.agents if each.emulate and each != stack.kinds[each.emulate]]
            self._start_agents(apis, stack, [each for each in stack.agents if each not in later], say)
            stack = self._apply_time_scale(apis, stack, say)
            self._start_agents(apis, stack, later, say)
            for name, api in apis.items():
                client_files(
                    api, stack.for_region(name).coordinator_addresses("enrol"), self._client_folder(stack, name)
                )
            self._federate(apis, stack, say)
        self._save_contexts(stack)
        return self._describe(stack)

    def _save_contexts(self, stack: StackLayout) -> None:
        for name in stack.regions:
            self._contexts.save(
                self._operator_context(stack.for_region(name), context_of(stack, name)), use=name == stack.region
            )

    def _authorise(self, stack: StackLayout) -> None:
        """Give each region access to its own part of etcd, and to nothing else there."""
        command = [*program_path("shoal-coordinator"), *etcd.users_command(self.folder, stack)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            logs = self.folder / "logs"
            raise refuse(Code.INTERNAL, done.stderr.strip()[-400:], "etcd to have its users", f"see {logs}/etcd-1.log")

    def _start_coordinators(self, region: StackLayout, say: Say) -> Context:
        if region.broker is not None:
            say("broker, Mosquitto of this machine, which carries the agents' links")
            broker.prepare(self.folder, region, region.broker)
            self.ask({"op": "start", "name": region.broker.name})
        several = f", {len(region.coordinators)} of which one leads" if len(region.coordinators) > 1 else ""
        say(f"coordinator of region {region.region}{several}")
        self._start_all(region.coordinators)  # no follower is ready before one leads
        return self._operator_context(region, CONTEXT)

    def _start_all(self, members: Sequence[StackMember]) -> None:
        with ThreadPoolExecutor() as together:
            list(together.map(lambda member: self.ask({"op": "start", "name": member.name}), members))

    def _start_agents(
        self, apis: Mapping[str, RegionClient], stack: StackLayout, agents: Sequence[StackMember], say: Say
    ) -> None:
        """As many at a time as there are cores; on return they are ready and measured."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as together:
            list(together.map(lambda agent: self._start_node(apis[agent.region], stack, agent, say), agents))
        for name, api in apis.items():
            self._wait_for_receipts(api, [each for each in agents if each.region == name])

    def _start_node(self, api: RegionClient, stack: StackLayout, member: StackMember, say: Say) -> None:
        emulated = f", emulated: {member.emulate}" if member.emulate else ""
        simulated = f", simulated: {member.simulate}" if member.simulate else ""
        say(f"{member.role} {member.name}{emulated}{simulated}")
        self._enrol(api, stack.for_region(member.region), member)
        self.ask({"op": "start", "name": member.name})

    def _operator_context(self, region: StackLayout, name: str) -> Context:
        return Context(
            name,
            region.region,
            region.coordinator_addresses("link"),
            str(self.folder / region.coordinator.name / "operator"),
            gateway=region.gateways[0].addresses["data"],
        )

    def _client_folder(self, stack: StackLayout, region: str) -> Path:
        return self.folder / ("client" if region == stack.region else f"{region}-client")

    def _federate(self, apis: Mapping[str, RegionClient], stack: StackLayout, say: Say) -> None:
        """Make every region a member that works for all the others; members of an earlier start stay as they are."""
        if not stack.federation:
            return
        door = stack.federation[0]
        operator = Context(
            f"{CONTEXT}-{layout.FEDERATION}",
            layout.FEDERATION,
            ",".join(replica.addresses["link"] for replica in stack.federation),
            str(self.folder / door.name / "operator"),
        )
        doors = ",".join(stack.dial_address(replica.addresses["enrol"]) for replica in stack.federation)
        with RegionClient(operator) as federation:
            federate(federation, doors, apis, say)
        self._contexts.save(operator, use=False)

    def running(self) -> bool:
        try:
            self.ask({"op": "status"})
        except ShoalError as error:
            return error.code is not Code.NOT_FOUND
        return True

    def status(self) -> list[dict[str, Any]]:
        """One row per process. Raises ShoalError(NOT_FOUND) if nothing runs here."""
        return list(self.ask({"op": "status"}))

    def break_member(self, name: str, verb: str) -> list[int]:
        """Return the ids of the signalled processes."""
        return list(self.ask({"op": "break", "name": name, "verb": verb}))

    def down(self, say: Say = lambda text: None, stalled_after_s: float = STALLED_AFTER_S) -> None:
        """Stop everything before returning; no error if nothing ran. say: called with what is left, now and then.

        Raises ShoalError(DEADLINE_EXCEEDED) if nothing has ended for so long; it goes on ending, and may be waited for
        again.
        """
        left = self._members_left()
        own = {each.name for each in self._contexts.all() if Path(each.folder).is_relative_to(self.folder)}
        for name in self._context_names():
            if name in own:  # another stack's context may have taken the name since
                self._contexts.remove(name)
        self._wait_stopped(left, say, stalled_after_s)
        if self._held is not None:
            assert self._held.stdin is not None
            self._held.stdin.close()  # not before: what is stopped in good order is not abandoned
            with suppress(subprocess.TimeoutExpired):
                self._held.wait(stalled_after_s)
                self._held = None

    def _members_left(self) -> list[str] | None:
        """Have it stop, and return the names of what has not ended yet; None: nobody keeps anything running here."""
        try:
            return list(self.ask({"op": "down"}) or ())
        except ShoalError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            # A supervisor before this version answers no more while it stops, and removes this file at the end.
            return [] if (self.folder / SOCKET).exists() else None

    def _wait_stopped(self, left: list[str] | None, say: Say, stalled_after_s: float) -> None:
        first = len(left or ())
        progress_at = said_at = time.monotonic()  # noqa: TID251 - a command's own deadline
        while left is not None:
            time.sleep(STOP_POLL_S)  # noqa: TID251
            before, left = len(left), self._members_left()
            now = time.monotonic()  # noqa: TID251
            if left is None:
                return
            if len(left) < before:
                progress_at = now
            if now - progress_at > stalled_after_s:
                raise self._stalled(left, first, stalled_after_s)
            if now - said_at > STOP_REPORT_S:
                say(f"stopping: {len(left)} of {first} left")
                said_at = now

    def _stalled(self, left: Sequence[str], first: int, waited_s: float) -> ShoalError:
        if not left:
            found = f"{self.folder / SOCKET} is still there, {waited_s:g}s after the last member ended"
            remedy = f"shoal dev down again; if no process of {self.folder} runs any more, remove that file first"
            return refuse(Code.DEADLINE_EXCEEDED, found, "the supervisor to end", remedy)
        names = ", ".join(left[:_NAMED_MOST]) + (", .." if len(left) > _NAMED_MOST else "")
        found = f"{len(left)} of {first} members still run, and none has ended for {waited_s:g}s: {names}"
        return refuse(
            Code.DEADLINE_EXCEEDED, found, "all to end", "they are still being stopped: the same command again waits on"
        )

    def purge(self) -> None:
        """Delete the folder of a stack that does not run. Raises ShoalError(IN_USE) if it does, or if anything of the
        folder cannot be deleted."""
        if self.running():
            raise refuse(Code.IN_USE, f"{self.folder} is up", "a stopped one", "shoal dev down")
        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            if self.folder.exists():
                raise
        except OSError as cause:
            remedy = f"end what writes there, then remove {self.folder}"
            found = f"{cause.filename or self.folder}: {cause.strerror}"
            raise refuse(Code.IN_USE, found, "a folder that can be deleted", remedy) from cause

    def ask(self, request: dict[str, Any]) -> Any:
        """Send one request to the supervisor. Raises ShoalError(NOT_FOUND) if none listens, or DEADLINE_EXCEEDED if it
        does not answer."""
        path = self.folder / SOCKET
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(ANSWER_WITHIN_S)
                with socket_address(path) as address:
                    connection.connect(address)
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile() as lines:
                    reply = json.loads(lines.readline())
        except TimeoutError as cause:
            found = f"the supervisor of {self.folder} has not answered within {ANSWER_WITHIN_S:g}s"
            remedy = f"read {self.folder / 'supervisor.log'}; on a busy machine, try again"
            raise refuse(Code.DEADLINE_EXCEEDED, found, "an answer", remedy) from cause
        except (OSError, ValueError) as cause:
            raise refuse(
                Code.NOT_FOUND, f"no local federation runs in {self.folder}", "one that runs", "shoal dev up"
            ) from cause
        if "refusal" in reply:
            code, *rest = reply["refusal"]
            raise ShoalError(Refusal(Code(code), *rest))
        return reply["ok"]

    # the steps of `up`

    def _purge_command(self) -> str:
        """A stopped stack starts again with its own options alone, so `shoal dev down` is not enough."""
        is_usual = self.folder == layout.default_folder().absolute()
        return "shoal dev down --purge" + ("" if is_usual else f" --data-dir {self.folder}")

    def _context_names(self) -> tuple[str, ...]:
        try:
            stack = layout.load(self.folder)
        except ShoalError:
            return (CONTEXT,)
        return (*(context_of(stack, name) for name in stack.regions), f"{CONTEXT}-{layout.FEDERATION}")

    def _load_or_compose(self, asked: StackOptions) -> StackLayout:
        try:
            before = layout.load(self.folder)
        except ShoalError:
            names = layout.port_names(asked)
            return layout.compose(asked, dict(zip(names, self._free_ports(len(names)), strict=True)))
        # A restart keeps regions, ports and identities, so that applied documents are still in effect.
        held = StackOptions.from_stack(before)
        if held != asked:
            raise refuse(
                Code.CONFLICT,
                f"{self.folder} holds {held}",
                str(asked),
                f"take a folder of its own: --data-dir {_free_folder(self.folder)}; or give the options of that one",
            )
        self._check_ports(before)
        return before

    def _check_ports(self, stack: StackLayout) -> None:
        """Raises ShoalError(CONFLICT) if another program has taken a port of a stopped stack."""
        for member in stack.members:
            for use, address in member.addresses.items():
                listener = HostPort.parse(address)
                with socket.socket() as tried:
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        tried.bind((listener.host, listener.port))
                    except OSError as cause:
                        raise refuse(
                            Code.CONFLICT,
                            f"{address}, the {use} port of {member.name} in {self.folder}, is taken by another program",
                            "the ports that this stack had before",
                            f"stop that program; or take a folder of its own, with free ports: --data-dir "
                            f"{_free_folder(self.folder)}",
                        ) from cause

    def _supervisor_command(self) -> list[str]:
        flags = [TEMPORARY] if self._is_temporary else []
        return [sys.executable, "-m", "shoal.devstack.process_supervisor", str(self.folder), *flags]

    def _spawn_supervisor(self) -> None:
        log = self.folder / "supervisor.log"
        with log.open("ab") as file:
            started = subprocess.Popen(
                self._supervisor_command(),
                stdin=subprocess.PIPE if self._is_temporary else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._held = started if self._is_temporary else None
        try:
            wait(self.running, 15.0, "the supervisor to listen")
        except ShoalError as cause:
            raise refuse(Code.INTERNAL, last_line(log), "a supervisor that starts", f"read {log}") from cause

    def _enrol(self, api: RegionClient, stack: StackLayout, member: StackMember) -> None:
        state = self.folder / member.name
        if (state / "identity" / "cert.pem").exists():
            return
        labels = {**member.labels, "entry": "*"} if member.role == "agent" else {}
        token = api.create_token(member.role, member.name, 300.0, labels).token
        command = [*program_path("shoal-agent"), "join", "--coordinator", stack.coordinator_addresses("enrol")]
        # Pass the token in the environment: every user can read arguments.
        done = subprocess.run(
            [*command, "--name", member.name, "--state-dir", str(state)],
            env={**os.environ, "SHOAL_TOKEN": token},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode != 0:
            raise refuse(Code.INTERNAL, done.stderr.strip()[-400:], f"{member.name} to join", "shoal dev status")

    def _wait_for_receipts(self, api: RegionClient, agents: Sequence[StackMember]) -> None:
        wanted = {member.name for member in agents}

        def have_receipts() -> bool:
            self._check_room()
            ready = {node.node.name for node in api.get("nodes").nodes if node.liveness == "ready" and node.front_ready}
            devices = api.get("devices").devices
            return wanted <= ready and wanted <= {one.node for one in devices if one.receipt.node}

        wait(have_receipts, NODES_READY_WITHIN_S, "every node to be ready and measured")

    def _check_room(self) -> None:
        """Agents without room for their state are never measured: nobody is to wait for that. Raises
        ShoalError(DISK_FULL)."""
        if shutil.disk_usage(self.folder).free == 0:
            raise refuse(
                Code.DISK_FULL, f"no space is left in {self.folder}", "room for state, logs and models",
                "free space there, or --data-dir on another disk",
            )  # fmt: skip

    def _apply_time_scale(self, apis: Mapping[str, RegionClient], stack: StackLayout, say: Say) -> StackLayout:
        """Use one scale for all regions, because they share the machine. `stack.kinds` are measured."""
        scale = time_scale(_rates_of(apis, stack), os.cpu_count() or 1)
        if scale == stack.time_scale:
            return stack
        say(f"time scale {scale:g}: emulated devices answer so much slower than real ones, for this machine to keep up")
        stack = replace(stack, time_scale=scale)
        layout.save(self.folder, stack)
        epochs = {node.node.name: node.epoch for api in apis.values() for node in api.get("nodes").nodes}
        emulated = [member for member in stack.kinds.values() if member.emulate]
        with ThreadPoolExecutor(os.cpu_count() or 1) as together:
            list(together.map(lambda member: self.ask({"op": "restart", "name": member.name}), emulated))

        def are_restarted() -> bool:
            self._check_room()
            nodes = [node for api in apis.values() for node in api.get("nodes").nodes]
            again = {
                n.node.name for n in nodes if n.epoch > epochs[n.node.name] and n.liveness == "ready" and n.front_ready
            }
            return {member.name for member in emulated} <= again

        wait(are_restarted, NODES_READY_WITHIN_S, "the emulated nodes to be back with their scale")
        for name, api in apis.items():
            self._wait_for_receipts(api, [each for each in emulated if each.region == name])
        return stack

    def _describe(self, stack: StackLayout) -> RunningStack:
        operator = self._contexts.get(CONTEXT)
        client = replace(operator, name="client", folder=str(self.folder / "client"))
        return RunningStack(stack, self.folder, operator, client, self.folder / "client" / "bearer")


def _rates_of(apis: Mapping[str, RegionClient], stack: StackLayout) -> list[Rate]:
    """Of every device that is known, and of agents that did not start yet as of the first of their kind."""
    rates = defaultdict[str, list[Rate]](list)
    for api in apis.values():
        for device in api.get("devices").devices:
            if not device.device.simulated:  # it takes as long as its simulator does
                flops = max(device.receipt.rates.conv_flops.values(), default=0.0)
                rates[device.node].append(Rate(flops, device.device.emulated, device.receipt.rates.launch_s))
    for member in stack.agents:
        if member.name not in rates:
            rates[member.name] = rates[stack.kinds[member.emulate].name]
    return [rate for each in rates.values() for rate in each]


def _free_folder(folder: Path) -> Path:
    """The first folder name beside this one that is free."""
    return next(each for number in count(2) if not (each := folder.with_name(f"{folder.name}-{number}")).exists())


def context_of(stack: StackLayout, region: str) -> str:
    """Name of the context of the region's operator."""
    return CONTEXT if region == stack.region else f"{CONTEXT}-{region}"


def _free_ports(count: int) -> list[int]:
    """Ports that are free on both addresses: another starting stack may have taken the relay port of a member that does
    not listen yet."""
    ports = list[int]()
    with ExitStack() as held:
        while len(ports) < count:
            here, road = (held.enter_context(socket.socket()) for _ in range(2))
            here.bind((layout.MEMBER_HOST, 0))
            port = here.getsockname()[1]
            try:
                road.bind((layout.RELAY_HOST, port))
            except OSError:
                continue
            ports.append(port)
    return ports
