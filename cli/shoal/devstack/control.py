"""Starts, asks and stops the keeper of a local federation: what `shoal dev` and `shoal demo` call."""

import datetime
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shoal.client import Context, Contexts, Region, client_files
from shoal.devstack import broker, etcd, layout
from shoal.devstack.joining import Say, federate, wait
from shoal.devstack.keeper import READY_WITHIN_S, SOCKET, STOP_WITHIN_S, last_line, program_path
from shoal.devstack.layout import Asked, Member, Stack
from shoal.devstack.scale import Rate, time_scale
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.wire.unix import reachable

CONTEXT: Final = "dev"
NODES_READY_WITHIN_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Up:
    """A running stack: its operator's context, a tenant's context, and a bearer token for the same tenant."""

    stack: Stack
    folder: Path
    operator: Context
    client: Context
    bearer: Path


class Control:
    """One stack, by its folder."""

    def __init__(
        self,
        folder: Path | None = None,
        contexts: Contexts | None = None,
        free_ports: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """free_ports: so many; by default any that are free."""
        self.folder = folder or layout.default_folder()
        self._contexts = contexts or Contexts()
        self._free_ports = free_ports or _free_ports

    def up(self, asked: Asked, say: Say) -> Up:
        """Starts what is not running; everything enrolled, ready, measured and joined when it returns. All or nothing.

        Raises ShoalError with the code of the part that failed, or CONFLICT while another is at it."""
        with self._alone():
            if self.running():
                say(f"already up in {self.folder}")
                return self._describe(layout.load(self.folder))
            try:
                return self._start(asked, say)
            except BaseException:
                self.down()
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two starts in one folder would each take the other's half for its own."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / "up.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                raise refuse(
                    Code.CONFLICT, f"another `shoal dev up` is at work in {self.folder}", "one at a time", "wait for it"
                ) from cause
            yield

    def _start(self, asked: Asked, say: Say) -> Up:
        if asked.link == "mqtt":
            broker.require()
        if asked.store == layout.ETCD:
            etcd.require()
        stack = self._stack(asked)
        layout.save(self.folder, stack)
        if stack.etcd:
            etcd.prepare(self.folder, datetime.datetime.now(datetime.UTC))  # noqa: TID251 - dates of certificates
        self._spawn_keeper()
        if stack.etcd:
            say(f"etcd of this machine, {len(stack.etcd)} members")
            self._start_together(stack.etcd)  # none listens before a majority is there
        for member in stack.federation:
            say(f"federation {member.name}")
            self.ask({"op": "start", "name": member.name})
        with ExitStack() as opened:
            apis = dict[str, Region]()
            for name in stack.regions:
                apis[name] = opened.enter_context(Region(self._start_leading(stack.of(name), say)))
                self._start_nodes(apis[name], stack.of(name), say)
            for name, api in apis.items():
                self._wait_measured(api, stack.of(name))
            stack = self._scaled(apis, stack, say, asked.slower)
            for name, api in apis.items():
                client_files(api, stack.of(name).at("enrol"), self._client(stack, name))
            self._federate(apis, stack, say)
        for name in stack.regions:
            self._contexts.save(self._operator(stack.of(name), context_of(stack, name)), use=name == stack.region)
        return self._describe(stack)

    def _start_leading(self, region: Stack, say: Say) -> Context:
        if region.broker is not None:
            say("broker, Mosquitto of this machine, which carries the agents' links")
            broker.prepare(self.folder, region, region.broker)
            self.ask({"op": "start", "name": region.broker.name})
        several = f", {len(region.coordinators)} of which one leads" if len(region.coordinators) > 1 else ""
        say(f"coordinator of region {region.region}{several}")
        self._start_together(region.coordinators)  # none follows before one leads
        return self._operator(region, CONTEXT)

    def _start_together(self, members: Sequence[Member]) -> None:
        with ThreadPoolExecutor() as together:
            list(together.map(lambda member: self.ask({"op": "start", "name": member.name}), members))

    def _start_nodes(self, api: Region, region: Stack, say: Say) -> None:
        for member in (*region.gateways, *region.agents):
            say(f"{member.role} {member.name}" + (f", emulated: {member.emulate}" if member.emulate else ""))
            self._enrol(api, region, member)
            self.ask({"op": "start", "name": member.name})

    def _operator(self, region: Stack, name: str) -> Context:
        return Context(
            name,
            region.region,
            region.at("link"),
            str(self.folder / region.coordinator.name / "operator"),
            gateway_rest=region.gateways[0].addresses["rest"],
            gateway_grpc=region.gateways[0].addresses["grpc"],
        )

    def _client(self, stack: Stack, region: str) -> Path:
        return self.folder / ("client" if region == stack.region else f"{region}-client")

    def _federate(self, apis: Mapping[str, Region], stack: Stack, say: Say) -> None:
        """Every region a member that works for all the others; one that is, from an earlier start, stays as it is."""
        if not stack.federation:
            return
        door = stack.federation[0]
        operator = Context(
            f"{CONTEXT}-{layout.FEDERATION}",
            layout.FEDERATION,
            ",".join(replica.addresses["link"] for replica in stack.federation),
            str(self.folder / door.name / "operator"),
        )
        doors = ",".join(layout.road(replica.addresses["enrol"]) for replica in stack.federation)
        with Region(operator) as federation:
            federate(federation, doors, apis, say)
        self._contexts.save(operator, use=False)

    def running(self) -> bool:
        try:
            self.ask({"op": "status"})
        except ShoalError:
            return False
        return True

    def status(self) -> list[dict[str, Any]]:
        """A row a process. Raises ShoalError(NOT_FOUND) when nothing runs here."""
        return list(self.ask({"op": "status"}))

    def hurt(self, name: str, verb: str) -> list[int]:
        """The processes that were signalled."""
        return list(self.ask({"op": "break", "name": name, "verb": verb}))

    def down(self) -> None:
        """Everything stopped when it returns; no error when nothing ran."""
        try:
            self.ask({"op": "down"})
        except ShoalError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        for name in self._context_names():
            self._contexts.remove(name)
        limit = 3 * STOP_WITHIN_S + 5
        wait(lambda: not (self.folder / SOCKET).exists(), limit, "the local federation to stop")

    def purge(self) -> None:
        """Deletes the folder of a stack that does not run."""
        if self.running():
            raise refuse(Code.IN_USE, f"{self.folder} is up", "a stopped one", "shoal dev down")
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, request: dict[str, Any]) -> Any:
        """One request to the keeper. Raises ShoalError(NOT_FOUND) when none listens."""
        path = self.folder / SOCKET
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(READY_WITHIN_S + 10)
                with reachable(path) as address:
                    connection.connect(address)
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile() as lines:
                    reply = json.loads(lines.readline())
        except (OSError, ValueError) as cause:
            raise refuse(
                Code.NOT_FOUND, f"no local federation runs in {self.folder}", "one that runs", "shoal dev up"
            ) from cause
        if "refusal" in reply:
            code, *rest = reply["refusal"]
            raise ShoalError(Refusal(Code(code), *rest))
        return reply["ok"]

    # the steps of `up`

    def _context_names(self) -> tuple[str, ...]:
        try:
            stack = layout.load(self.folder)
        except ShoalError:
            return (CONTEXT,)
        return (*(context_of(stack, name) for name in stack.regions), f"{CONTEXT}-{layout.FEDERATION}")

    def _stack(self, asked: Asked) -> Stack:
        try:
            before = layout.load(self.folder)
        except ShoalError:
            names = layout.needed_ports(asked)
            return layout.compose(asked, dict(zip(names, self._free_ports(len(names)), strict=True)))
        # Started again: the same regions, ports and identities, so that what was applied is there again.
        held = Asked.of(before)
        if held != asked:
            raise refuse(
                Code.CONFLICT,
                f"{self.folder} holds {held}",
                str(asked),
                "use another --data-dir, or shoal dev down --purge",
            )
        return before

    def _keeper(self) -> list[str]:
        return [sys.executable, "-m", "shoal.devstack.keeper", str(self.folder)]

    def _spawn_keeper(self) -> None:
        log = self.folder / "keeper.log"
        with log.open("ab") as file:
            subprocess.Popen(
                self._keeper(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            wait(self.running, 15.0, "the keeper to listen")
        except ShoalError as cause:
            raise refuse(Code.INTERNAL, last_line(log), "a keeper that starts", f"read {log}") from cause

    def _enrol(self, api: Region, stack: Stack, member: Member) -> None:
        state = self.folder / member.name
        if (state / "identity" / "cert.pem").exists():
            return
        token = api.create_token(member.role, member.name, 300.0).token
        command = [*program_path("shoal-agent"), "join", "--coordinator", stack.at("enrol")]
        # The token goes in by the environment: arguments are for every user to read.
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

    def _wait_measured(self, api: Region, stack: Stack) -> None:
        wanted = {member.name for member in stack.agents}

        def measured() -> bool:
            ready = {node.node.name for node in api.get("nodes").nodes if node.liveness == "ready" and node.front_ready}
            devices = api.get("devices").devices
            return wanted <= ready and wanted <= {one.node for one in devices if one.receipt.node}

        wait(measured, NODES_READY_WITHIN_S, "every node to be ready and measured")

    def _scaled(self, apis: Mapping[str, Region], stack: Stack, say: Say, slower: float) -> Stack:
        """One scale for all regions: they share the machine."""
        rates = [
            Rate(max(device.receipt.rates.conv_flops.values(), default=0.0), device.device.emulated)
            for api in apis.values()
            for device in api.get("devices").devices
        ]
        scale = time_scale(rates, os.cpu_count() or 1)
        scale *= slower if scale > 1.0 else 1.0
        if scale == stack.time_scale:
            return stack
        say(f"time scale {scale:g}: emulated devices answer so much slower than real ones, for this machine to keep up")
        stack = replace(stack, time_scale=scale)
        layout.save(self.folder, stack)
        epochs = {node.node.name: node.epoch for api in apis.values() for node in api.get("nodes").nodes}
        emulated = {member.name for member in stack.agents if member.emulate}
        for name in sorted(emulated):
            self.ask({"op": "restart", "name": name})

        def back() -> bool:
            nodes = [node for api in apis.values() for node in api.get("nodes").nodes]
            again = {
                n.node.name for n in nodes if n.epoch > epochs[n.node.name] and n.liveness == "ready" and n.front_ready
            }
            return emulated <= again

        wait(back, NODES_READY_WITHIN_S, "the emulated nodes to be back with their scale")
        for name, api in apis.items():
            self._wait_measured(api, stack.of(name))
        return stack

    def _describe(self, stack: Stack) -> Up:
        operator = self._contexts.get(CONTEXT)
        client = replace(operator, name="client", folder=str(self.folder / "client"))
        return Up(stack, self.folder, operator, client, self.folder / "client" / "bearer")


def context_of(stack: Stack, region: str) -> str:
    """Of the region's operator."""
    return CONTEXT if region == stack.region else f"{CONTEXT}-{region}"


def _free_ports(count: int) -> list[int]:
    """Free on both sides: another stack that starts may have taken the road of a member that does not listen yet."""
    ports = list[int]()
    with ExitStack() as held:
        while len(ports) < count:
            here, road = (held.enter_context(socket.socket()) for _ in range(2))
            here.bind((layout.HERE, 0))
            port = here.getsockname()[1]
            try:
                road.bind((layout.ROAD, port))
            except OSError:
                continue
            ports.append(port)
    return ports
