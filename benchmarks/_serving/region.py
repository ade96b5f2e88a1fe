"""A local region as users start one (`shoal dev up`): agent, gateway and coordinator as processes, models placed."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _compiled import has_mapped, is_process_compiled, programs_of
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
SERVING = ("gateway", "front", "worker")
"""Roles of the processes that a request passes."""
PROGRAMS_S = 10.0
"""A process has long imported its modules by then."""

LOUD_TENANT = "loud"
"""Floods the front, far beyond its quota."""

TENANT = """apiVersion: shoal/v1
kind: Tenant
metadata: {{name: {tenant}}}
spec: {{quota: {quota}}}
"""
WORKLOAD = """apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {tenant}}}
spec: {{model: {{source: {name}, shapes: {shapes}}}}}
"""


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """front, gateway: over TLS, with a bearer token; the gateway's requests are answered by the front's node."""

    front: Server
    gateway: Server


def data_address(up: RunningStack, member: StackMember) -> Address:
    """Where clients with a bearer token call a front, by whatever protocol."""
    bearer = ("authorization", f"Bearer {up.bearer.read_text()}")
    role = Role.AGENT if member.role == "agent" else Role.GATEWAY
    name = dns_of(up.stack.region, role, member.name)
    return Address(f"https://{member.addresses['data']}", (bearer,), str(up.client.ca), name)


@contextmanager
def local_region(
    folder: Path, models: Mapping[str, ServedModel], cores: tuple[int, ...] | None, compiled: Path | None = None
) -> Iterator[LocalRegion]:
    """A region on these cores with all models ready. compiled: as `programs_of` takes it. Raises ShoalError,
    SystemExit."""
    control = Control(folder / "dev", Contexts(folder / "home"))
    with own_cores(cores), programs_of(compiled):
        up = control.up(StackOptions(agents=1, relayed=False), lambda text: print(f"# {text}", flush=True))
    try:
        quotas = {SECOND_TENANT: "{replicas: 2}", LOUD_TENANT: "{replicas: 2, rate: 50/s, concurrency: 4}"}
        others = [TENANT.format(tenant=tenant, quota=quota) for tenant, quota in quotas.items()]
        place(up, models.values(), [*others, *(_workload(models[SMALL], tenant) for tenant in quotas)])
        with RegionClient(up.operator) as api:
            own, second, loud = (
                (("authorization", f"Bearer {token}"),)
                for token in (
                    up.bearer.read_text(),
                    *(api.create_token("bearer", tenant, TOKEN_S).token for tenant in quotas),
                )
            )
        agent, gateway = up.stack.agents[0], up.stack.gateways[0]
        front = _server("shoal front, TLS", control, up, agent)
        front.callers, front.flooder = (own, second), loud
        through = _server("shoal gateway, TLS", control, up, gateway, agent)
        epoch = _epoch(up, agent)
        front.start_s = _restart(control, agent, front, models[SMALL], folder)
        if wait_until(lambda: _epoch(up, agent) > epoch and _is_placed(up), PLACED_S) is None:
            raise SystemExit(f"{agent.name} was not back within {PLACED_S:g} s")
        for server in (front, through):
            for model in models.values():
                first_answer(server, model, time.monotonic(), None, folder / "dev" / "logs" / f"{agent.name}.log")
        check_programs(through, compiled)
        yield LocalRegion(front, through)
    finally:
        control.down()


def check_programs(server: Server, compiled: Path | None) -> None:
    """Print what the processes run that a request passes. Raises SystemExit if it is another build than was asked
    for."""
    for role in SERVING:
        if wait_until(partial(_is_as_asked, server, role, is_compiled=compiled is not None), PROGRAMS_S) is None:
            raise SystemExit(f"a {role} runs another build of the modules than was asked for")
    build = "as Python" if compiled is None else f"compiled, of {compiled}"
    print(f"# Shoal's modules run {build}: {', '.join(SERVING)}", flush=True)


def _is_as_asked(server: Server, role: str, *, is_compiled: bool) -> bool:
    """False also while a process is just starting, which has not loaded all that it will, or ending."""
    try:
        pids = list(server.processes().get(role, ()))
        if role == "worker":
            pids = [pid for pid in pids if has_mapped(pid, "onnxruntime")]  # no driver, and no spare
        return bool(pids) and all(is_process_compiled(pid) is is_compiled for pid in pids)
    except OSError:
        return False


def _server(name: str, control: Control, up: RunningStack, *members: StackMember) -> Server:
    """The first member answers; processes of all of them are the server's, the others' under their own roles."""
    address = data_address(up, members[0])
    addresses = {Protocol.GRPC: address, Protocol.JSON: address}

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
            texts.append(_workload(model, "default"))
        reply = api.apply([operator_pb2.Document(name="bench.yaml", text="---\n".join(texts))])
    if reply.problems:
        raise SystemExit(f"refused: {reply.problems}")
    if wait_until(lambda: _is_placed(up), PLACED_S) is None:
        raise SystemExit(f"the models were not ready within {PLACED_S:g} s")


def _workload(model: ServedModel, tenant: str) -> str:
    """Of the shapes that it is asked for alone, as the configurations of Triton's models say."""
    shapes = json.dumps({name: value.shape for name, value in model.inputs.items()})
    return WORKLOAD.format(name=model.name, tenant=tenant, shapes=shapes)


def _epoch(up: RunningStack, agent: StackMember) -> int:
    """Number of the agent's start, once it serves; 0 before."""
    with RegionClient(up.operator) as api:
        views = [view for view in api.poll("nodes").nodes if view.node.name == agent.name]
    return max((view.epoch for view in views if view.liveness == "ready" and view.front_ready), default=0)


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
