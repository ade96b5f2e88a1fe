"""A region whose members are machines of their own: `harness.cluster.stack` over `harness.faults.netns`.

`python -m harness.cluster.netns_stack FOLDER NAMESPACES` is its process supervisor, which starts each member inside its
namespace.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, HarnessControl
from harness.faults.disk import compile_disk, disk_latency, slow_disk_environment
from harness.faults.netns import NetnsNetwork, network
from harness.faults.preload import compile_library, preload_command
from harness.faults.wall_clock import FakeWallClock
from harness.models.synthetic import relu
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.client import Contexts
from shoal.devstack import layout
from shoal.devstack.layout import StackMember
from shoal.devstack.process_supervisor import ProcessSupervisor
from shoal.v1 import operator_pb2

TESTS = Path(__file__).parents[2]


class NetnsControl(HarnessControl):
    """`shoal dev up`, but every member has its own address."""

    def __init__(
        self, folder: Path, contexts: Contexts, net: NetnsNetwork, command_prefixes: Mapping[str, Sequence[str]]
    ) -> None:
        """command_prefixes: what each member's command line begins with."""
        super().__init__(folder, contexts, free_ports)
        self._net = net
        self._command_prefixes = command_prefixes

    def _load_or_compose(self, asked: layout.StackOptions) -> layout.StackLayout:
        stack = super()._load_or_compose(asked)
        return replace(stack, members=tuple(self._with_own_addresses(member) for member in stack.members))

    def _with_own_addresses(self, member: StackMember) -> StackMember:
        host = self._net.address(member.name)
        moved = {use: f"{host}:{address.rpartition(':')[2]}" for use, address in member.addresses.items()}
        return replace(member, addresses=moved)

    def _supervisor_command(self) -> list[str]:
        stack = layout.load(self.folder)
        inside = {one.name: (*self._net.inside(one.name), *self._command_prefixes[one.name]) for one in stack.members}
        command = [sys.executable, "-m", "harness.cluster.netns_stack", str(self.folder), json.dumps(inside)]
        return ["env", f"PYTHONPATH={TESTS}", *command]


SESSION_EVENTS = ("NODE_CONNECTED", "NODE_DISCONNECTED")


class NetnsStack(DevStack):
    """`net` and `clocks` may be changed freely; the test runs outside of every machine."""

    def __init__(self, folder: Path, net: NetnsNetwork, names: Sequence[str], ahead_s: Mapping[str, int]) -> None:
        """ahead_s: seconds by which the wall clocks of these machines are ahead from the first start on."""
        super().__init__(folder)
        self.net = net
        self._slow = folder / "slow"
        library = compile_library("wall", folder)
        self.clocks = {name: FakeWallClock(folder / "clocks" / name, library, ahead_s.get(name, 0)) for name in names}
        disk = slow_disk_environment(compile_disk(folder), folder / "dev", self._slow)
        before = {name: preload_command(disk, clock.environment) for name, clock in self.clocks.items()}
        self.control = NetnsControl(folder / "dev", self.contexts, net, before)

    def slow_disks(self, *, flush_s: float, write_s: float) -> AbstractContextManager[None]:
        """Slow the disks of all machines."""
        return disk_latency(self._slow, flush_s=flush_s, write_s=write_s)

    def liveness(self, node: str) -> str:
        with self.api() as api:
            return next(view.liveness for view in api.get("nodes").nodes if view.node.name == node)

    def serving(self, workload: str) -> list[operator_pb2.PlacementView]:
        """Placements that are routed."""
        return [row for row in self.placements(workload) if row.routed]

    def is_steady(self) -> bool:
        """Every node is ready, and no replica starts or drains."""
        with self.api() as api:
            nodes, rows = api.get("nodes").nodes, api.get("placements").placements
        there = all(view.liveness == "ready" and view.front_ready for view in nodes)
        return there and all(row.routed and not row.assignment.draining for row in rows)

    def has_sessions(self) -> bool:
        """Whether each node's newest session is open: a node that reported a moment ago is ready without one."""
        last = {event.node: event.code for event in self.events() if event.code in SESSION_EVENTS}
        return set(last.values()) == {"NODE_CONNECTED"}

    def wait_steady(self) -> None:
        wait_until(
            lambda: self.is_steady() and self.has_sessions(), WAIT_TIMEOUT_S, "the region to be whole", every_s=0.1
        )


class NetnsSupervisor(ProcessSupervisor):
    def __init__(self, folder: Path, stack: layout.StackLayout, inside: dict[str, list[str]]) -> None:
        super().__init__(folder, stack)
        self._inside = inside

    def command(self, member: StackMember) -> list[str]:
        return [*self._inside[member.name], *super().command(member)]


@contextlib.contextmanager
def netns_region(folder: Path, agents: int, ahead_s: Mapping[str, int]) -> Iterator[NetnsStack]:
    """A region with the model `relu` and the first agents of `shoal dev up`. ahead_s: see NetnsStack."""
    names = ["coordinator", "gateway", *(name for name, _ in layout.fleet_of(agents))]
    with network(names) as net:
        stack = NetnsStack(folder, net, names, ahead_s)
        try:
            stack.up(layout.StackOptions(agents=agents))
            stack.push(relu().SerializeToString(), "relu")
            yield stack
        finally:
            net.heal()
            stack.down()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    asyncio.run(NetnsSupervisor(where, layout.load(where), json.loads(sys.argv[2])).run())
