"""A region whose members are machines of their own: `harness.stack` over `harness.netns`.

`python -m harness.apart FOLDER NAMESPACES` is its keeper, which starts each member inside its namespace.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from harness.crafted import relu
from harness.disk import compile_disk, slow_disk, slowed
from harness.netns import Network, network
from harness.ports import free_ports
from harness.preload import compile_library, preloaded
from harness.stack import PATIENCE_S, Stack
from harness.wait import wait_until
from harness.wall import WallClock
from shoal.client import Contexts
from shoal.devstack import layout
from shoal.devstack.control import Control
from shoal.devstack.keeper import Keeper
from shoal.devstack.layout import Member
from shoal.v1 import operator_pb2

TESTS = Path(__file__).parents[1]


class ApartControl(Control):
    """`shoal dev up`, but every member has an address of its own."""

    def __init__(self, folder: Path, contexts: Contexts, net: Network, before: Mapping[str, Sequence[str]]) -> None:
        """before: what each member's command line begins with."""
        super().__init__(folder, contexts, free_ports)
        self._net = net
        self._before = before

    def _stack(self, asked: layout.Asked) -> layout.Stack:
        stack = super()._stack(asked)
        return replace(stack, members=tuple(self._moved(member) for member in stack.members))

    def _moved(self, member: Member) -> Member:
        host = self._net.address(member.name)
        moved = {use: f"{host}:{address.rpartition(':')[2]}" for use, address in member.addresses.items()}
        return replace(member, addresses=moved)

    def _keeper(self) -> list[str]:
        stack = layout.load(self.folder)
        inside = {one.name: (*self._net.inside(one.name), *self._before[one.name]) for one in stack.members}
        command = [sys.executable, "-m", "harness.apart", str(self.folder), json.dumps(inside)]
        return ["env", f"PYTHONPATH={TESTS}", *command]


SESSIONS = ("NODE_CONNECTED", "NODE_DISCONNECTED")


class ApartStack(Stack):
    """`net`, `clocks`: cut and turn them as you like; the test stands outside of every machine."""

    def __init__(self, folder: Path, net: Network, names: Sequence[str], ahead_s: Mapping[str, int]) -> None:
        """ahead_s: of the wall clocks of these machines, from the first start on."""
        super().__init__(folder)
        self.net = net
        self._slow = folder / "slow"
        library = compile_library("wall", folder)
        self.clocks = {name: WallClock(folder / "clocks" / name, library, ahead_s.get(name, 0)) for name in names}
        disk = slow_disk(compile_disk(folder), folder / "dev", self._slow)
        before = {name: preloaded(disk, clock.environment) for name, clock in self.clocks.items()}
        self.control = ApartControl(folder / "dev", self.contexts, net, before)

    def slow_disks(self, *, flush_s: float, write_s: float) -> AbstractContextManager[None]:
        """Of all machines."""
        return slowed(self._slow, flush_s=flush_s, write_s=write_s)

    def liveness(self, node: str) -> str:
        with self.api() as api:
            return next(view.liveness for view in api.get("nodes").nodes if view.node.name == node)

    def serving(self, workload: str) -> list[operator_pb2.PlacementView]:
        """Placements that requests are sent to."""
        return [row for row in self.placements(workload) if row.routed]

    def is_whole(self) -> bool:
        """Every node is there, and nothing is on its way in or out."""
        with self.api() as api:
            nodes, rows = api.get("nodes").nodes, api.get("placements").placements
        there = all(view.liveness == "ready" and view.front_ready for view in nodes)
        return there and all(row.routed and not row.assignment.draining for row in rows)

    def has_sessions(self) -> bool:
        """Whether each node's newest session stands: a node that was heard a moment ago is ready without one."""
        last = {event.node: event.code for event in self.events() if event.code in SESSIONS}
        return set(last.values()) == {"NODE_CONNECTED"}

    def whole(self) -> None:
        wait_until(lambda: self.is_whole() and self.has_sessions(), PATIENCE_S, "the region to be whole", every_s=0.1)


class ApartKeeper(Keeper):
    def __init__(self, folder: Path, stack: layout.Stack, inside: dict[str, list[str]]) -> None:
        super().__init__(folder, stack)
        self._inside = inside

    def command(self, member: Member) -> list[str]:
        return [*self._inside[member.name], *super().command(member)]


@contextlib.contextmanager
def apart(folder: Path, agents: int, ahead_s: Mapping[str, int]) -> Iterator[ApartStack]:
    """A region with the model `relu`; the first agents of `shoal dev up`. ahead_s: see ApartStack."""
    names = ["coordinator", "gateway", *(name for name, _ in layout.fleet_of(agents))]
    with network(names) as net:
        stack = ApartStack(folder, net, names, ahead_s)
        try:
            stack.up(layout.Asked(agents=agents))
            stack.push(relu().SerializeToString(), "relu")
            yield stack
        finally:
            net.heal()
            stack.down()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    asyncio.run(ApartKeeper(where, layout.load(where), json.loads(sys.argv[2])).run())
