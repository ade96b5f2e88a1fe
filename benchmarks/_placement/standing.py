"""A region of any size that already stands, as a coordinator finds it in its store when it starts.

Nodes are of eight classes of devices, labelled by site and class. Each stands for two workloads of the region, one
replica each, all of them in service. Workloads belong to twenty tenants and ask by one of four policies: one has a
selector, one two terms of the objective. Nothing of it comes from a measurement: it is a load, not a claim about
devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.records import NODES, RECEIPTS, NodeRecord, SignedRecord
from shoal.coordinator.controllers.log.fencing import KEY, RegionRecord
from shoal.coordinator.controllers.workloads.desired_sets import DESIRED
from shoal.coordinator.controllers.workloads.memory import MEMORY, SmallMemory
from shoal.coordinator.core.catalog.model import MODELS, Catalog, ModelRecord, StoredDocument
from shoal.coordinator.core.fleet.state import ORIGIN
from shoal.coordinator.core.placement.model import terms_of
from shoal.coordinator.core.workloads.model import AssignmentStage, Mark
from shoal.coordinator.ports import Store, Transaction
from shoal.policies import canonical_text, load
from shoal.types.assignment import Assignment, DesiredSet, Version
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Role
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.types.workload import Intent

REGION: Final = "scale"
HISTORY: Final = "history-of-the-benchmark"
TENANTS: Final = 20
MODEL_COUNT: Final = 8
GATEWAYS: Final = 2
PER_NODE: Final = 2
"""Standing workloads for each node."""
NODES_PER_SITE: Final = 25
GIB: Final = 2**30
MIB: Final = 2**20
BATCH: Final = 500
"""Records of one transaction while the store is filled."""
CLASSES: Final = tuple(
    # (kind, provider, FLOP/s, bytes of memory, watts at work)
    (kind, provider, flops, Bytes(memory * GIB), Watts(watts))
    for kind, provider, flops, memory, watts in (
        (DeviceKind.CPU, "CPUExecutionProvider", 5e10, 8, 12.0),
        (DeviceKind.CPU, "CPUExecutionProvider", 1.2e11, 16, 25.0),
        (DeviceKind.CPU, "CPUExecutionProvider", 4e11, 32, 60.0),
        (DeviceKind.CPU, "CPUExecutionProvider", 9e11, 64, 120.0),
        (DeviceKind.GPU, "CUDAExecutionProvider", 1e12, 8, 15.0),
        (DeviceKind.GPU, "CUDAExecutionProvider", 5e12, 16, 40.0),
        (DeviceKind.GPU, "CUDAExecutionProvider", 2e13, 24, 72.0),
        (DeviceKind.GPU, "CUDAExecutionProvider", 6e13, 48, 250.0),
    )
)
POLICIES: Final = """apiVersion: shoal/v1
kind: Policy
metadata: {name: fast}
spec: {optimize: {latency: 1.0}, partition: {heartbeat: HEARTBEAT, lost_after: LOST}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {name: frugal}
spec: {optimize: {latency: 0.5, energy: 0.5}, partition: {heartbeat: HEARTBEAT, lost_after: LOST}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {name: bounded}
spec:
  require: {latency: {p95: 2s, from: device}}
  optimize: {energy: 1.0}
  partition: {heartbeat: HEARTBEAT, lost_after: LOST}
---
apiVersion: shoal/v1
kind: Policy
metadata: {name: selected}
spec:
  require: {where: 'node.labels.rank != "0"'}
  optimize: {latency: 1.0}
  partition: {heartbeat: HEARTBEAT, lost_after: LOST}
---
apiVersion: shoal/v1
kind: Policy
metadata: {name: impossible}
spec:
  require: {where: 'node.labels.rank == "none"'}
  optimize: {latency: 1.0}
  partition: {heartbeat: HEARTBEAT, lost_after: LOST}
"""
POLICY_NAMES: Final = ("fast", "frugal", "bounded", "selected")


@dataclass(frozen=True, slots=True)
class StandingRegion:
    """What was written to the store."""

    nodes: tuple[Node, ...]
    # Epoch of each node's session, which the agents go on with.
    epoch: int


def workload_text(name: str, number: int, policy: str = "") -> str:
    """The document of one workload. number: of its model, tenant and policy."""
    tenant = f"t{number % TENANTS}"
    chosen = policy or POLICY_NAMES[number % len(POLICY_NAMES)]
    return (
        f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: {name}, tenant: {tenant}}}\n"
        f"spec: {{model: {{source: m{number % MODEL_COUNT}}}, policy: {chosen}}}\n"
    )


def node_of(number: int) -> Node:
    """The node of this number; a negative one is a gateway."""
    gateway = number < 0
    name = f"gw-{-number:02}" if gateway else f"n-{number:06}"
    rank = number % len(CLASSES)
    labels = {} if gateway else {"site": f"s{number // NODES_PER_SITE}", "rank": str(rank)}
    return Node(
        name, REGION, Role.GATEWAY if gateway else Role.AGENT, labels, "0", "linux", "x86_64", Bytes(64 * GIB),
        Bytes(64 * GIB), () if gateway else (_device(rank),), f"{name}:8001", f"{name}:9000", "boot-1",
        forward_key="ab" * 32,
    )  # fmt: skip


async def fill(
    store: Store, nodes: int, wall: Wall, heartbeat_s: float, workloads: int | None = None
) -> StandingRegion:
    """Write the region: documents, models, nodes, receipts and desired sets. workloads: PER_NODE for each node, unless
    given."""
    count = nodes * PER_NODE if workloads is None else workloads
    models = {each.digest: each for each in map(_model, range(MODEL_COUNT))}
    documents = {each.key: each for each in _documents(count, wall, heartbeat_s)}
    intents = Catalog(documents=documents, models=models).intents
    members = tuple(map(node_of, range(-GATEWAYS, nodes)))
    puts = {KEY: codec.dump(RegionRecord(REGION, HISTORY, 1))}
    puts |= {MODELS + each.digest: codec.dump(each) for each in models.values()}
    await store.commit(Transaction(puts))
    await _put(store, ((each.key.store_key, codec.dump(each)) for each in documents.values()))
    await _put(store, ((NODES + each.name, codec.dump(_record(each, wall))) for each in members))
    await _put(store, ((f"{RECEIPTS}{each.name}/d0", _receipt(each, wall)) for each in members if each.devices))
    await _put(store, ((DESIRED + name, codec.dump(one)) for name, one in _desired(members, intents, models)))
    marks = {_id(number): Mark(AssignmentStage.SERVING, ORIGIN, terms_of(each)) for number, each in enumerate(intents)}
    await store.commit(Transaction({MEMORY: codec.dump(SmallMemory(issued=len(marks), marks=marks))}))
    return StandingRegion(members, 1)


async def _put(store: Store, records: Iterator[tuple[str, bytes]]) -> None:
    taken = dict[str, bytes]()
    for key, value in records:
        taken[key] = value
        if len(taken) == BATCH:
            await store.commit(Transaction(taken))
            taken = {}
    if taken:
        await store.commit(Transaction(taken))


def _documents(workloads: int, wall: Wall, heartbeat_s: float) -> Iterator[StoredDocument]:
    heartbeat, lost = f"{heartbeat_s:g}s", f"{15 * heartbeat_s:g}s"
    text = POLICIES.replace("HEARTBEAT", heartbeat).replace("LOST", lost)
    for each in load([("policies", text)]).documents:
        yield StoredDocument("Policy", each.name, canonical_text(each.value), 1, wall, "benchmark")
    tenant_text = "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: t%d}\n"
    for each in load([(str(at), tenant_text % at) for at in range(TENANTS)]).documents:
        yield StoredDocument("Tenant", each.name, canonical_text(each.value), 1, wall, "benchmark")
    (first,) = load([("w", workload_text("w", 0))]).documents
    form = canonical_text(first.value)
    for number in range(workloads):
        name, tenant, model = f"w-{number:06}", f"t{number % TENANTS}", number % MODEL_COUNT
        text = form.replace('"name":"w"', f'"name":"{name}"').replace('"t0"', f'"{tenant}"')
        text = text.replace('"m0"', f'"m{model}"').replace('"fast"', f'"{POLICY_NAMES[number % len(POLICY_NAMES)]}"')
        pinned = {f"m{model}": _digest(model)}
        yield StoredDocument("Workload", f"{tenant}/{name}", text, 1, wall, "benchmark", pinned)


def _desired(
    members: tuple[Node, ...], intents: tuple[Intent, ...], models: dict[str, ModelRecord]
) -> Iterator[tuple[str, DesiredSet]]:
    """Two workloads to a node, in turn; `selected` ones on a node that its selector admits."""
    agents = [each for each in members if each.devices]
    admitted = [each for each in agents if each.labels["rank"] != "0"]
    held = dict[str, list[Assignment]]()
    for number, intent in enumerate(intents):
        wanted = admitted if intent.require.where else agents
        node = wanted[(number // PER_NODE) % len(wanted)]
        device, profile = node.devices[0], models[intent.models[0].digest].profile
        one = Assignment(
            _id(number), intent.key, intent.revision, profile.digest, profile.size_bytes, device.name,
            device.provider, "fp32", False, intent.shared_worker, Bytes(100 * MIB), intent.partition,
        )  # fmt: skip
        held.setdefault(node.name, []).append(one)
    for node in members:
        yield node.name, DesiredSet(
            node.name, Version(HISTORY, 1, 1), tuple(held.get(node.name, ())), (), (), (), Seconds(1.0)
        )  # fmt: skip


def _id(number: int) -> str:
    """Of the one replica of the workload of that number, in the order of the catalog."""
    return f"a-{number:016x}"


def _device(rank: int) -> Device:
    kind, provider, _, memory, _ = CLASSES[rank]
    return Device(
        "d0", kind, "maker", f"class-{rank}", "driver", "1", "1", provider, memory, parallelism=4
    )  # fmt: skip


def _record(node: Node, wall: Wall) -> NodeRecord:
    return NodeRecord(node, 1, False, wall, declared=node.labels)


def _receipt(node: Node, wall: Wall) -> bytes:
    device = node.devices[0]
    _, _, flops, memory, watts = CLASSES[int(node.labels["rank"])]
    rates = Rates(
        {"fp32": flops}, {"fp32": flops}, flops / 10, flops / 10, Seconds(5e-5), Seconds(2e-6), 1e9, Watts(watts / 4),
        watts, EnergySource.PROFILE,
    )  # fmt: skip
    receipt = Receipt(
        node.name, device.name, device.provider, "1", "1", ("fp32",), (), rates, memory, 0.05, wall, Seconds(1.0),
        False, "probe",
    )  # fmt: skip
    return codec.dump(SignedRecord(receipt, "", ""))


def _digest(model: int) -> str:
    return "sha256:" + f"{model:02x}" * 32


def _model(number: int) -> ModelRecord:
    flops, size = 2e8 * 2**number, Bytes((2 + 3 * number) * MIB)
    spec = (TensorSpec("x", "FP32", (1, 3, 64, 64)),)
    costs = (OperatorCost("Conv", 20, 0.8 * flops, 2e7), OperatorCost("MatMul", 5, 0.2 * flops, 1e7))
    profile = ModelProfile(
        _digest(number), size, 8, 17, {"": 17}, "benchmark", "fp32", spec, spec, {"x": (1, 3, 64, 64)}, costs,
        Bytes(int(0.95 * size)), Bytes(4 * MIB), True, {},
    )  # fmt: skip
    return ModelRecord(_digest(number), (f"m{number}",), Wall(0.0), "benchmark", profile)
