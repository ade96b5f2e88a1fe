"""Real agents and a gateway of a region with one or several coordinators, and every desired set written for them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.cluster.agents import AgentProcess
from harness.cluster.coordinator import REGION, CoordinatorServer
from harness.cluster.stack import InferenceLoad, documents, on_nodes, policy, workload
from harness.crypto.pki import CertificateFiles
from harness.models.synthetic import digest_of, padded_model, relu
from harness.servers.etcd import Etcd
from harness.wait import wait_until
from shoal.client import Context, RegionClient
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.desired_sets import DESIRED
from shoal.coordinator.ports import StoreChange, Transaction
from shoal.coordinator.store.etcd.store import EtcdStore
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2
from shoal.wire.enrol import redeem

WAIT_TIMEOUT_S = 60.0
MODELS: Mapping[str, bytes] = {"relu": relu().SerializeToString(), "relu-2": padded_model(1000)}
"""Two models that answer alike."""
RETRYABLE_CODES = (Code.NOT_LEADER, Code.STORE_UNAVAILABLE, Code.COORDINATOR_UNREACHABLE, Code.DEADLINE_EXCEEDED)
"""What an operator gets while a leader is elected, and then retries."""

Running = dict[str, tuple[str, int, float]]
"""Assignment -> (node, pid, start time) of its worker, for all that are loaded."""


class AgentFleet:
    """`agents` nodes and a gateway, the models, and a workload `reader` with a given number of replicas."""

    name = "reader"

    def __init__(self, coordinators: Sequence[CoordinatorServer], folder: Path, agents: int = 2) -> None:
        """coordinators: of one region; they are running."""
        self.folder = folder
        self.nodes = tuple(f"edge-{number + 1}" for number in range(agents))
        links, enrols = (",".join(getattr(each, use) for each in coordinators) for use in ("link", "enrol"))
        self.endpoint = CoordinatorServer(folder, link=links, enrol=enrols, ready=coordinators[0].ready)
        self.members = [AgentProcess(self.endpoint, folder / name, name, "node") for name in self.nodes]
        self.gateway = AgentProcess(self.endpoint, folder / "gateway", "gateway")
        self.files = CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        self.desired = (1, "relu")

    def start(self) -> None:
        """Returns when every node has joined, is measured and connected, and the models are pushed."""
        with ThreadPoolExecutor() as together:
            for done in together.map(AgentProcess.join, self.all_members):
                assert done.returncode == 0, done.stderr
        for each in self.all_members:
            each.start()
        with self.api() as api:
            token = api.create_token("tenant", "default", 300.0).token
            redeem(self.endpoint.enrol, token, "default").write(self.folder)
            for name, content in MODELS.items():
                path = self.folder / f"{name}.onnx"
                path.write_bytes(content)
                api.push(path, name)
        wait_until(self._is_ready, WAIT_TIMEOUT_S, "the nodes to be measured", every_s=0.1)

    def stop(self) -> None:
        for each in self.all_members:
            each.end()

    @property
    def all_members(self) -> Sequence[AgentProcess]:
        return (*self.members, self.gateway)

    def api(self) -> RegionClient:
        """A client of whichever coordinator leads."""
        return RegionClient(Context("test", REGION, self.endpoint.link, str(self.endpoint.ready["operator_dir"])))

    def load(self) -> InferenceLoad:
        """Load on the gateway. Start it once something serves."""
        with self.api() as api:
            view = next(each for each in api.get("nodes").nodes if each.node.name == self.gateway.name)
        return InferenceLoad(int(view.node.data_address.rpartition(":")[2]), self.files, self.name)

    def apply_workload(self, replicas: int, model: str, nodes: Sequence[str] = ()) -> int:
        """One attempt to apply. nodes: the only ones allowed; empty: any. Raises ShoalError."""
        self.desired = (replicas, model)
        text = documents(policy("here", on_nodes(nodes or self.nodes, replicas)), workload(self.name, model, "here"))
        with self.api() as api:
            reply = api.apply([operator_pb2.Document(name="test.yaml", text=text)])
        assert not reply.problems, reply.problems
        return reply.revision

    def apply_until_acknowledged(self) -> None:
        """Repeat the last attempt until it is acknowledged, as an operator would without an answer."""

        def try_apply() -> bool:
            try:
                self.apply_workload(*self.desired)
            except ShoalError as error:
                if error.code not in RETRYABLE_CODES:
                    raise
                return False
            return True

        wait_until(try_apply, WAIT_TIMEOUT_S, "a document to be taken", every_s=0.1)

    def wait_settled(self) -> list[operator_pb2.PlacementView]:
        """Wait until exactly the wanted replicas serve, every front knows it, and no node has anything else."""
        replicas, model = self.desired

        def rows_if_settled() -> list[operator_pb2.PlacementView]:
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
            running = self.running_workers()
            return rows if whole and {name: at[0] for name, at in running.items()} == _places(rows) else []

        return wait_until(
            rows_if_settled, WAIT_TIMEOUT_S, f"{replicas} replicas of {model} and nothing else", every_s=0.1
        )

    def running_workers(self) -> Running:
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

    def _is_ready(self) -> bool:
        with self.api() as api:
            ready = {each.node.name for each in api.get("nodes").nodes if each.liveness == "ready" and each.front_ready}
            measured = {each.node for each in api.get("devices").devices if each.receipt.node}
        return ready == {*self.nodes, self.gateway.name} and measured == set(self.nodes)


def _places(rows: Sequence[operator_pb2.PlacementView]) -> dict[str, str]:
    return {row.assignment.id: row.node for row in rows}


@dataclass
class DesiredSetAudit:
    """Checks every desired set written to the store between `begin` and `end`, at each revision."""

    # The store.
    cluster: Etcd
    # For the client certificate's files.
    folder: Path
    # Most replicas of one model that may be wanted at once.
    max_replicas: int
    # Desired sets checked so far.
    sets: int = 0
    # Leader terms that wrote them.
    terms: set[int] = field(default_factory=set)
    # What must never be; empty: the audit passed.
    violations: list[str] = field(default_factory=list)
    # Store revision of the mark that `begin` wrote.
    _begin_revision: int = 0
    # Store key -> the desired set at the revision being read.
    _current_sets: dict[str, DesiredSet] = field(default_factory=dict)

    async def begin(self) -> None:
        store = await self._open()
        self._begin_revision = await store.commit(Transaction({_MARK: b"begin"}))
        self._current_sets = {each.key: codec.load(DesiredSet, each.value) for each in await store.scan(DESIRED)}
        await store.close()

    async def end(self) -> None:
        store = await self._open()
        await store.commit(Transaction({_MARK: b"end"}))
        revision = 0
        changes = store.watch("desired", self._begin_revision)
        async for change in changes:
            if change.revision != revision:
                self._check_revision(revision)
                revision = change.revision
            if change.key == _MARK:
                break
            self._take(change)
        await store.close()

    async def _open(self) -> EtcdStore:
        return await self.cluster.open(self.folder, f"region/{REGION}")

    def _take(self, change: StoreChange) -> None:
        if change.value is None:
            self._current_sets.pop(change.key, None)
            return
        desired, before = codec.load(DesiredSet, change.value), self._current_sets.get(change.key)
        self.sets += 1
        self.terms.add(desired.version.term)
        if before is not None and not _follows(before.version, desired.version):
            self.violations.append(f"{change.key}: {desired.version} after {before.version}")
        self._current_sets[change.key] = desired

    def _check_revision(self, revision: int) -> None:
        held = [(desired.node, each) for desired in self._current_sets.values() for each in desired.assignments]
        for name, count in Counter(each.id for _, each in held).items():
            if count > 1:
                self.violations.append(f"revision {revision}: {name} in {count} sets")
        serving = [(node, each) for node, each in held if not each.draining]
        for (key, model), count in Counter((each.workload, each.model) for _, each in serving).items():
            if count > self.max_replicas:
                self.violations.append(f"revision {revision}: {count} replicas of {key} with {model:.15}")
        for (node, key, model), count in Counter((node, each.workload, each.model) for node, each in serving).items():
            if count > 1:
                self.violations.append(f"revision {revision}: {key} {count} times with {model:.15} on {node}")


_MARK = "desired-"
"""A key with the same prefix as the desired sets: marks where reading them begins and ends."""


def _follows(before: Version, after: Version) -> bool:
    return before.history == after.history and before.term <= after.term and before.generation < after.generation
