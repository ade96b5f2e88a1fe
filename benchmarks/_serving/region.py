"""A local region as users start one (`shoal dev up`): agent, gateway and coordinator as processes, models placed."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _serving.models import SMALL, ServedModel
from _serving.peers import first_answer
from _serving.processes import own_cores, wait_until
from _serving.servers import Address, Protocol, Server

from shoal.client import Contexts, RegionClient
from shoal.devstack.control import Control, RunningStack
from shoal.devstack.layout import StackMember, StackOptions
from shoal.types.device import Role
from shoal.v1 import operator_pb2
from shoal.wire.identity import dns_of

SECOND_TENANT = "second"
"""Serves the small model too: one caller may have fewer calls open than the load with most connections."""
PLACED_S = 90.0
TOKEN_S = 3600.0

TENANT = """apiVersion: shoal/v1
kind: Tenant
metadata: {{name: {tenant}}}
spec: {{quota: {{replicas: 2}}}}
"""
WORKLOAD = """apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {tenant}}}
spec: {{model: {{source: {name}}}}}
"""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """front, gateway: over TLS, with a bearer token; the gateway's requests are answered by the front's node."""

    front: Server
    gateway: Server


def data_address(up: RunningStack, member: StackMember) -> Address:
    """Where clients with a bearer token call a front."""
    bearer = ("authorization", f"Bearer {up.bearer.read_text()}")
    role = Role.AGENT if member.role == "agent" else Role.GATEWAY
    name = dns_of(up.stack.region, role, member.name)
    return Address(f"https://{member.addresses['data']}", (bearer,), str(up.client.ca), name)


@contextmanager
def local_region(
    folder: Path, models: Mapping[str, ServedModel], cores: tuple[int, ...] | None
) -> Iterator[LocalRegion]:
    """A region on these cores with all models ready. Raises ShoalError, SystemExit."""
    control = Control(folder / "dev", Contexts(folder / "home"))
    with own_cores(cores):
        up = control.up(StackOptions(agents=1, relayed=False), lambda text: print(f"# {text}", flush=True))
    try:
        second = (TENANT.format(tenant=SECOND_TENANT), WORKLOAD.format(name=SMALL, tenant=SECOND_TENANT))
        place(up, models.values(), second)
        with RegionClient(up.operator) as api:
            tokens = up.bearer.read_text(), api.create_token("bearer", SECOND_TENANT, TOKEN_S).token
        agent, gateway = up.stack.agents[0], up.stack.gateways[0]
        front = _server("shoal front, TLS", control, up, agent)
        front.callers = tuple((("authorization", f"Bearer {token}"),) for token in tokens)
        through = _server("shoal gateway, TLS", control, up, gateway, agent)
        front.start_s = _restart(control, agent, front, models[SMALL], folder)
        wait_until(lambda: _is_placed(up), PLACED_S)
        yield LocalRegion(front, through)
    finally:
        control.down()


def _server(name: str, control: Control, up: RunningStack, *members: StackMember) -> Server:
    """The first member answers; processes of all of them are the server's, the others' under their own roles."""
    addresses = {each: data_address(up, members[0]) for each in (Protocol.GRPC, Protocol.JSON)}

    def processes() -> dict[str, list[int]]:
        found = dict[str, list[int]]()
        for row in control.status():
            for member in members:
                if row["name"] == member.name and row["pid"]:
                    role = "gateway" if member.role == "gateway" and row["role"] == "front" else row["role"]
                    found.setdefault(role, []).append(int(row["pid"]))
        return found

    return Server(name, addresses, processes)


def place(up: RunningStack, models: Iterable[ServedModel], documents: Iterable[str] = ()) -> None:
    """Push the models, apply a workload for each and the documents, and wait until all are ready. Raises SystemExit."""
    with RegionClient(up.operator) as api:
        texts = list(documents)
        for model in models:
            api.push(model.path, model.name)
            texts.append(WORKLOAD.format(name=model.name, tenant="default"))
        reply = api.apply([operator_pb2.Document(name="bench.yaml", text="---\n".join(texts))])
    if reply.problems:
        raise SystemExit(f"refused: {reply.problems}")
    if wait_until(lambda: _is_placed(up), PLACED_S) is None:
        raise SystemExit(f"the models were not ready within {PLACED_S:g} s")


def _is_placed(up: RunningStack) -> bool:
    with RegionClient(up.operator) as api:
        return all(view.state == "ready" for view in api.poll("workloads").workloads)


def _restart(control: Control, agent: StackMember, front: Server, model: ServedModel, folder: Path) -> float:
    """Seconds from the agent's start to its first right answer: a machine that is switched on, its models on disk."""
    control.break_member(agent.name, "kill")
    if wait_until(lambda: not front.processes(), PLACED_S) is None:
        raise SystemExit(f"{agent.name} is not gone after {PLACED_S:g} s")
    began = time.monotonic()
    control.break_member(agent.name, "resume")
    return first_answer(front, model, began, None, folder / "dev" / "logs" / f"{agent.name}.log")
