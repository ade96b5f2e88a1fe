"""Real agents and a gateway of a region of one or several coordinators; every desired set that was written for them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.coordinator import REGION, Coordinator
from harness.crafted import digest_of, padded, relu
from harness.etcd import Etcd
from harness.members import Member
from harness.pki import Files
from harness.stack import Load, documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.client import Context, Region
from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.workloads import DESIRED
from shoal.coordinator.ports import Change, Transaction
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2
from shoal.wire.enrol import redeem

PATIENCE_S = 60.0
MODELS: Mapping[str, bytes] = {"relu": relu().SerializeToString(), "relu-2": padded(1000)}
"""Two models that answer alike."""
UNSETTLED = (Code.NOT_LEADER, Code.STORE_UNAVAILABLE, Code.COORDINATOR_UNREACHABLE, Code.DEADLINE_EXCEEDED)
"""What an operator is told while another leader is elected: it tries again."""

Running = dict[str, tuple[str, int, float]]
"""Node, pid and start of the worker of every assignment that is loaded."""


class Crew:
    """`agents` nodes and a gateway; the models; a workload `reader` in as many replicas as it is told."""

    name = "reader"

    def __init__(self, coordinators: Sequence[Coordinator], folder: Path, agents: int = 2) -> None:
        """coordinators: of one region; they run."""
        self.folder = folder
        self.nodes = tuple(f"edge-{number + 1}" for number in range(agents))
        links, enrols = (",".join(getattr(each, use) for each in coordinators) for use in ("link", "enrol"))
        self.door = Coordinator(folder, link=links, enrol=enrols, ready=coordinators[0].ready)
        self.members = [Member(self.door, folder / name, name, "node") for name in self.nodes]
        self.gateway = Member(self.door, folder / "gateway", "gateway")
        self.files = Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        self.wanted = (1, "relu")

    def start(self) -> None:
        """Everybody joined, measured and connected; the models there."""
        with ThreadPoolExecutor() as together:
            for done in together.map(Member.join, self.everybody):
                assert done.returncode == 0, done.stderr
        for each in self.everybody:
            each.start()
        with self.api() as api:
            token = api.create_token("tenant", "default", 300.0).token
            redeem(self.door.enrol, token, "default").write(self.folder)
            for name, content in MODELS.items():
                path = self.folder / f"{name}.onnx"
                path.write_bytes(content)
                api.push(path, name)
        wait_until(self._is_whole, PATIENCE_S, "the nodes to be measured", every_s=0.1)

    def stop(self) -> None:
        for each in self.everybody:
            each.end()

    @property
    def everybody(self) -> Sequence[Member]:
        return (*self.members, self.gateway)

    def api(self) -> Region:
        """At whichever coordinator leads."""
        return Region(Context("test", REGION, self.door.link, str(self.door.ready["operator_dir"])))

    def load(self) -> Load:
        """At the gateway. Start it once something serves."""
        with self.api() as api:
            view = next(each for each in api.get("nodes").nodes if each.node.name == self.gateway.name)
        return Load(int(view.node.grpc_address.rpartition(":")[2]), self.files, self.name)

    def want(self, replicas: int, model: str, nodes: Sequence[str] = ()) -> int:
        """One try to apply that. nodes: where alone, if not on any. Raises ShoalError."""
        self.wanted = (replicas, model)
        text = documents(policy("here", on_nodes(nodes or self.nodes, replicas)), workload(self.name, model, "here"))
        with self.api() as api:
            reply = api.apply([operator_pb2.Document(name="test.yaml", text=text)])
        assert not reply.problems, reply.problems
        return reply.revision

    def insist(self) -> None:
        """As an operator whose try got no answer: until what is wanted is acknowledged."""

        def acknowledged() -> bool:
            try:
                self.want(*self.wanted)
            except ShoalError as error:
                if error.code not in UNSETTLED:
                    raise
                return False
            return True

        wait_until(acknowledged, PATIENCE_S, "a document to be taken", every_s=0.1)

    def settled(self) -> list[operator_pb2.PlacementView]:
        """Exactly the replicas that are wanted, all in service, as every front knows, and nothing else on any node."""
        replicas, model = self.wanted

        def found() -> list[operator_pb2.PlacementView]:
            with self.api() as api:
                rows = list(api.get("placements").placements)
                nodes = api.get("nodes").nodes
            ids = {row.assignment.id for row in rows}
            whole = (
                len(rows) == len(ids) == len({row.node for row in rows}) == replicas
                and all(row.routed and not row.assignment.draining for row in rows)
                and {row.assignment.model for row in rows} == {digest_of(MODELS[model])}
                and all(node.liveness == "ready" and node.observed == node.desired for node in nodes)
            )
            running = self.running()
            return rows if whole and {name: at[0] for name, at in running.items()} == _places(rows) else []

        return wait_until(found, PATIENCE_S, f"{replicas} replicas of {model} and nothing else", every_s=0.1)

    def running(self) -> Running:
        """As the nodes' own records and the machine's processes tell."""
        found: Running = {}
        for name, member in zip(self.nodes, self.members, strict=True):
            for path in sorted((member.state / "run").glob("worker-*.json")):
                with suppress(FileNotFoundError, psutil.NoSuchProcess, ValueError):
                    told = json.loads(path.read_text())
                    began = psutil.Process(told["pid"]).create_time()
                    for one in told["assignments"]:
                        found[one["id"]] = (name, told["pid"], began)
        return found

    def _is_whole(self) -> bool:
        with self.api() as api:
            ready = {each.node.name for each in api.get("nodes").nodes if each.liveness == "ready" and each.front_ready}
            measured = {each.node for each in api.get("devices").devices if each.receipt.node}
        return ready == {*self.nodes, self.gateway.name} and measured == set(self.nodes)


def _places(rows: Sequence[operator_pb2.PlacementView]) -> dict[str, str]:
    return {row.assignment.id: row.node for row in rows}


@dataclass
class Written:
    """Every desired set that the store was given between `begin` and `end`, judged at each revision.

    most: replicas of one model that are ever wanted at once.
    """

    cluster: Etcd
    folder: Path
    most: int
    sets: int = 0
    terms: set[int] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    _begun: int = 0
    _held: dict[str, DesiredSet] = field(default_factory=dict)

    async def begin(self) -> None:
        store = await self._open()
        self._begun = await store.commit(Transaction({_MARK: b"begin"}))
        self._held = {each.key: records.load(DesiredSet, each.value) for each in await store.scan(DESIRED)}
        await store.close()

    async def end(self) -> None:
        store = await self._open()
        await store.commit(Transaction({_MARK: b"end"}))
        revision = 0
        changes = store.watch("desired", self._begun)
        async for change in changes:
            if change.revision != revision:
                self._judge(revision)
                revision = change.revision
            if change.key == _MARK:
                break
            self._take(change)
        await store.close()

    async def _open(self) -> EtcdStore:
        return await self.cluster.open(self.folder, f"region/{REGION}")

    def _take(self, change: Change) -> None:
        if change.value is None:
            self._held.pop(change.key, None)
            return
        desired, before = records.load(DesiredSet, change.value), self._held.get(change.key)
        self.sets += 1
        self.terms.add(desired.version.term)
        if before is not None and not _follows(before.version, desired.version):
            self.violations.append(f"{change.key}: {desired.version} after {before.version}")
        self._held[change.key] = desired

    def _judge(self, revision: int) -> None:
        held = [(desired.node, each) for desired in self._held.values() for each in desired.assignments]
        for name, count in Counter(each.id for _, each in held).items():
            if count > 1:
                self.violations.append(f"revision {revision}: {name} in {count} sets")
        serving = [(node, each) for node, each in held if not each.draining]
        for (key, model), count in Counter((each.workload, each.model) for _, each in serving).items():
            if count > self.most:
                self.violations.append(f"revision {revision}: {count} replicas of {key} with {model:.15}")
        for (node, key, model), count in Counter((node, each.workload, each.model) for node, each in serving).items():
            if count > 1:
                self.violations.append(f"revision {revision}: {key} {count} times with {model:.15} on {node}")


_MARK = "desired-"
"""Beside the sets, under the same first letters: where reading them begins and ends."""


def _follows(before: Version, after: Version) -> bool:
    return before.history == after.history and before.term <= after.term and before.generation < after.generation
