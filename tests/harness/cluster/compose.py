"""The containers of `docker-compose.yml` as a user starts them, in a project and on ports of their own.

Tests inject faults with the engine's commands and, as root, in the containers' networks.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from harness.cluster.stack import InferenceLoad, files_of
from harness.crypto.pki import CertificateFiles
from harness.faults import delay
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Context, Contexts, InferenceClient, RegionClient
from shoal.devstack.compose import published_addresses
from shoal.v1 import operator_pb2

ROOT: Final = Path(__file__).parents[3]
PROJECT: Final = "shoal-test"
PORTS: Final = "17"
"""Leading digits of every published port, before its last three."""
SECOND_GATEWAY_OFFSET: Final = 3
"""Offset of the ports of edge's second gateway from those of its first."""
REGIONS: Final = {"edge": 100, "cloud": 200, "datacenter": 300}
NODES: Final = {
    "edge": ("edge-npu", "edge-gpu", "edge-arm"),
    "cloud": ("cloud-gpu",),
    "datacenter": ("datacenter-cpu",),
}
"""Agents by region."""
GATEWAYS: Final = {
    "edge": ("edge-gateway", "edge-gateway-2"),
    "cloud": ("cloud-gateway",),
    "datacenter": ("datacenter-gateway",),
}
ETCD: Final = ("etcd-1", "etcd-2", "etcd-3")
ETCD_QUOTA: Final = 48 * 2**20
"""Bytes of each member's database: enough for the tests, and quickly filled."""
UP_WITHIN_S: Final = 240.0
WAIT_TIMEOUT_S: Final = 90.0
STATE: Final = "/var/lib/shoal"
"""State directory in each of our containers."""
IMAGE_USER: Final = 10001
"""User id in each of our images."""
RETRY_FOR_S: Final = 30.0
STEADY, AWAY = "steady", "away"
"""Workloads of all tests that hurt: of edge's own, and one that cloud runs for it."""
X: Final = np.array([[-1, 2, -3, 4]], np.float32)


def compose_command() -> list[str]:
    """`docker compose`, or the older program. Fails without either: a missing engine is a failure, never a skip."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    found = shutil.which("docker-compose")
    assert found is not None, "no `docker compose`: tests/compose/engine.sh installs one"
    return [found]


class Compose:
    """All containers. home: where `setup` writes contexts and files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._command = compose_command()
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "COMPOSE_"))}
        self.environment = {
            **plain,
            "SHOAL_HOME": str(home),
            "SHOAL_PORTS": PORTS,
            "SHOAL_ETCD_QUOTA": str(ETCD_QUOTA),
            "COLUMNS": "300",
        }
        self.up_s = 0.0
        """Seconds from nothing to every node measured."""

    # the engine

    def compose(self, *arguments: str, timeout: float = WAIT_TIMEOUT_S, tag: str = "latest") -> str:
        """The command's output. An assertion fails if it fails. tag: of the images."""
        done = subprocess.run(
            [*self._command, "-p", PROJECT, "-f", str(ROOT / "docker-compose.yml"), *arguments],
            cwd=ROOT,
            env={**self.environment, "SHOAL_TAG": tag},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def containers(self) -> Mapping[str, dict[str, Any]]:
        """Service -> what the engine reports of its container."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def up(self) -> None:
        """Returns when every container is healthy and every node is ready and measured."""
        self.compose("up", "-d", "--no-build", timeout=UP_WITHIN_S)
        wait_until(self.is_healthy, WAIT_TIMEOUT_S, "every container to be healthy", every_s=0.5)
        for region, nodes in NODES.items():
            wait_until(lambda region=region, nodes=nodes: self.is_measured(region, nodes), WAIT_TIMEOUT_S, f"{nodes}")  # type: ignore[misc]

    def down(self) -> None:
        self.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "5", "--remove-orphans")

    def is_healthy(self) -> bool:
        """Whether all running containers report that they are healthy."""
        states = [one["State"] for one in self.containers().values()]
        return all(state["Health"]["Status"] == "healthy" for state in states if "Health" in state)

    def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` reports."""
        return self.containers()[service]

    def start_times(self) -> dict[str, str]:
        """Service -> when its container was last started."""
        return {name: one["State"]["StartedAt"] for name, one in self.containers().items()}

    def run_in(self, service: str, *command: str, timeout: float = WAIT_TIMEOUT_S) -> str:
        """Run a command inside and return its output. An assertion fails if it fails."""
        return docker("exec", self._id(service), *command, timeout=timeout)

    def run_in_unchecked(
        self, service: str, *command: str, timeout: float = WAIT_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, whatever its exit status."""
        return subprocess.run(
            ["docker", "exec", self._id(service), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @contextmanager
    def etcd_root_shell(self) -> Iterator[Callable[..., str]]:
        """Runs commands as etcd's root in a container of the service `etcdctl`; returns their output."""
        name = f"{PROJECT}-etcdctl"
        flags = ("--detach", "--no-deps", "--name", name, "--entrypoint", "sleep")
        self.compose("run", *flags, "etcdctl", "infinity")
        try:
            yield lambda *command: docker("exec", name, *command, timeout=WAIT_TIMEOUT_S)
        finally:
            docker("rm", "--force", name)

    @contextmanager
    def extra_agent(self, name: str, like: str, state: Path, *arguments: str) -> Iterator[None]:
        """One more agent, confined like `like` and on its network, with its state in a folder here."""
        with self.api() as api:
            (state / "token").write_text(api.create_token("agent", name, 600.0, allow_labels=["price"]).token)
        with self.similar_container(name, like, [f"--volume={state}:{STATE}"], "run", *arguments):
            yield

    @contextmanager
    def similar_container(
        self, name: str, like: str, flags: Sequence[str], *command: str, network: str = "edge"
    ) -> Iterator[None]:
        """A container of the same image, settings and limits. flags: further flags of `docker run`; mounted folders get
        the images' user as owner."""
        found = self.container(like)
        host = found["HostConfig"]
        for mounted in (flag.removeprefix("--volume=").partition(":")[0] for flag in flags if "--volume=/" in flag):
            for path in (Path(mounted), *Path(mounted).rglob("*")):
                os.chown(path, IMAGE_USER, IMAGE_USER)
                path.chmod(0o700 if path.is_dir() else 0o600)
        given = [
            *("--init", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", f"--memory={host['Memory']}"),
            *("--security-opt=no-new-privileges:true", f"--security-opt=seccomp={ROOT}/deploy/seccomp.json"),
            *(f"--env={one}" for one in found["Config"]["Env"]),
            *(f"--network={PROJECT}_{network}", f"--network-alias={name}"),
            *(f"--hostname={name}", f"--name={PROJECT}-{name}"),
        ]
        docker("run", "--detach", *given, *flags, found["Image"], *command)
        try:
            yield
        except BaseException:
            print(docker("logs", "--tail", "20", f"{PROJECT}-{name}"))
            raise
        finally:
            docker("rm", "--force", f"{PROJECT}-{name}")

    def memory_bytes(self, *services: str) -> dict[str, int]:
        """Memory in use without reclaimable cache, as `docker stats` counts it."""
        ids = {self._id(service): service for service in services}
        rows = docker("stats", "--no-stream", "--no-trunc", "--format", "{{.ID}} {{.MemUsage}}", *ids).splitlines()
        return {ids[row.split()[0]]: _bytes(row.split()[1]) for row in rows}

    # faults

    def kill(self, *services: str) -> None:
        """SIGKILL for everything inside; the engine does not restart it."""
        docker("kill", *(self._id(service) for service in services))
        assert not any(self.container(service)["State"]["Running"] for service in services)

    def start(self, *services: str) -> None:
        docker("start", *(self._id(service) for service in services))

    @contextmanager
    def outage(self, *services: str) -> Iterator[None]:
        """Kill the services for the duration of the context; they run again afterwards."""
        try:
            self.kill(*services)
            yield
        finally:
            self.start(*services)

    @contextmanager
    def pause(self, *services: str) -> Iterator[None]:
        ids = [self._id(service) for service in services]
        docker("pause", *ids)
        try:
            yield
        finally:
            docker("unpause", *ids)

    @contextmanager
    def network_cut(self, network: str, *services: str) -> Iterator[None]:
        """Disconnect the services from that network: nothing is notified, nothing is reset. Their addresses differ
        afterwards."""
        whole, ids = f"{PROJECT}_{network}", {service: self._id(service) for service in services}
        try:
            for service, found in ids.items():
                docker("network", "disconnect", whole, found)
                assert whole not in self.container(service)["NetworkSettings"]["Networks"]
            yield
        finally:
            for service, found in ids.items():
                if whole not in self.container(service)["NetworkSettings"]["Networks"]:
                    docker("network", "connect", "--alias", service, whole, found)

    def address(self, service: str, network: str) -> str:
        return str(self.container(service)["NetworkSettings"]["Networks"][f"{PROJECT}_{network}"]["IPAddress"])

    @contextmanager
    def bandwidth_limit(self, service: str, network: str, rate: str) -> Iterator[None]:
        """Limit what it sends there to that rate (of tc: `512kbit`) by a token bucket; on exit, assert that packets had
        to wait."""
        leg = self._interface(service, network)
        # A packet at a time, and room for two seconds: what is more than that is lost, and TCP sends less.
        bucket = ("tbf", "rate", rate, "burst", "2kb", "latency", "2s")
        self._inside(service, "tc", "qdisc", "add", "dev", leg, "root", *bucket)
        try:
            yield
            told = json.loads(self._inside(service, "tc", "-s", "-j", "qdisc", "show", "dev", leg))
            assert sum(one.get("overlimits", 0) for one in told) > 0, "nothing had to wait"
        finally:
            self._inside(service, "tc", "qdisc", "del", "dev", leg, "root")

    @contextmanager
    def latency(self, service: str, to: str, network: str, delay_s: float) -> Iterator[None]:
        """Delay each packet that it sends to that other container, in a process that holds it for `delay_s`."""
        leg, near, far = self._interface(service, network), self.address(service, network), self.address(to, network)
        keys = ("ip_forward=1", "conf.all.rp_filter=0", "conf.all.accept_local=1")
        try:
            with delay.delay_device(self._nsenter(service), delay_s):
                self._inside(service, "sysctl", "-qw", *(f"net.ipv4.{key}" for key in keys))
                self._inside(service, "sysctl", "-qw", f"net.ipv4.conf.{delay.DEVICE}.rp_filter=0")
                self._inside(service, "ip", "route", "add", far, "dev", leg, "table", "100")
                self._inside(service, "ip", "rule", "add", "iif", delay.DEVICE, "lookup", "100")
                self._inside(service, "ip", "route", "add", far, "dev", delay.DEVICE, "src", near)
                yield
        finally:  # once the device is gone; otherwise its output would enter it again
            for undo in (("rule", "del", "iif", delay.DEVICE), ("route", "flush", "table", "100")):
                subprocess.run([*self._nsenter(service), "ip", *undo], capture_output=True, check=False)

    def processes(self, service: str) -> dict[int, str]:
        """Pid on this machine -> command line."""
        rows = docker("top", self._id(service), "-eo", "pid,args").splitlines()[1:]
        return {int(pid): line for pid, line in (row.split(None, 1) for row in rows)}

    def _id(self, service: str) -> str:
        return str(self.container(service)["Id"])

    def _nsenter(self, service: str) -> list[str]:
        return ["nsenter", "-t", str(self.container(service)["State"]["Pid"]), "--net", "--"]

    def _inside(self, service: str, *command: str) -> str:
        """Run a program of this machine in the service's network. Fails without privileges."""
        done = subprocess.run([*self._nsenter(service), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _interface(self, service: str, network: str) -> str:
        address = self.address(service, network)
        for link in json.loads(self._inside(service, "ip", "-j", "-4", "addr")):
            if any(one.get("local") == address for one in link.get("addr_info", ())):
                return str(link["ifname"])
        raise AssertionError(f"{service} has no {address}")

    # as an operator outside

    def shoal(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """The real command line, with the contexts that `setup` made."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("shoal")), *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def api(self, region: str = "") -> RegionClient:
        """region: by default edge."""
        return RegionClient(Contexts(self.home).get(region or "edge"))

    def client(self, region: str = "edge") -> Context:
        """A context of the default tenant."""
        return replace(Contexts(self.home).get(region), name="client", folder=str(self.home / region / "client"))

    def client_files(self, region: str = "edge") -> CertificateFiles:
        return files_of(self.client(region))

    def port(self, use: str, region: str = "edge", *, second: bool = False) -> int:
        """A published port. use: link, enrol, data. second: of edge's other gateway."""
        address = published_addresses(region, f"127.0.0.1:{int(PORTS) * 1000 + REGIONS[region]}")[use]
        return int(address.rpartition(":")[2]) + (SECOND_GATEWAY_OFFSET if second else 0)

    def load(self, workload: str, **more: Any) -> InferenceLoad:
        """Load on edge's two gateways: clients retry at the other one."""
        others = (self.port("data", second=True),)
        given = {"clients": 2, "rate": 10.0, "other_ports": others, "retry_for_s": RETRY_FOR_S, **more}
        return InferenceLoad(self.port("data"), self.client_files(), workload, **given)

    def ask(self, workload: str, *, second: bool = False) -> bool:
        """Send one request for a workload of `relu` to edge's gateway; whether it is right. Raises ShoalError."""
        context = replace(self.client(), gateway=f"127.0.0.1:{self.port('data', second=second)}")
        with InferenceClient(context) as client:
            return np.array_equal(client.infer(workload, {"x": X}).outputs["y"], np.maximum(X, 0))

    def nodes(self, region: str = "") -> dict[str, operator_pb2.NodeView]:
        with self.api(region) as api:
            return {view.node.name: view for view in api.get("nodes").nodes}

    def are_back(self, before: Mapping[str, operator_pb2.NodeView]) -> bool:
        """Whether each of these edge nodes is ready in a newer session."""
        now = self.nodes()
        return all(now[name].liveness == "ready" and now[name].epoch > was.epoch for name, was in before.items())

    def is_measured(self, region: str, nodes: tuple[str, ...]) -> bool:
        with self.api(region) as api:
            ready = {view.node.name for view in api.get("nodes").nodes if view.liveness == "ready" and view.front_ready}
            known = {device.node for device in api.get("devices").devices if device.receipt.node}
        return {*nodes, *GATEWAYS[region]} <= ready and set(nodes) <= known

    def wait_healthy(self) -> None:
        """Returns when every container runs, every node is ready and measured, and `shoal doctor` finds no invariant
        broken in any region."""
        for region, nodes in NODES.items():
            measured = partial(self.is_measured, region, nodes)
            wait_until(measured, WAIT_TIMEOUT_S, f"{nodes}", every_s=0.1)
        states = {name: one["State"] for name, one in self.containers().items()}
        ill = [name for name, state in states.items() if state.get("Health", {}).get("Status") == "unhealthy"]
        assert not ill, ill
        wait_until(lambda: not self.doctor_failures(), WAIT_TIMEOUT_S, "the invariants to hold", every_s=0.5)

    def doctor_failures(self) -> list[str]:
        """The output of `shoal doctor` where it reports a problem."""
        with ThreadPoolExecutor() as together:
            told = together.map(lambda region: self.shoal("doctor", "--context", region), REGIONS)
        return [one.stdout + one.stderr for one in told if one.returncode != 0]

    def apply(self, text: str, region: str = "edge") -> None:
        with self.api(region) as api:
            reply = api.apply([operator_pb2.Document(name="test.yaml", text=text)])
        assert not reply.problems, reply.problems

    def placements(self, name: str, region: str = "edge", replicas: int = 0) -> list[operator_pb2.PlacementView]:
        """Placements of a workload, once all (`replicas` of them, if given) serve and none starts or drains."""

        def rows_if_settled() -> list[operator_pb2.PlacementView]:
            rows = self.placement_rows(name, region)
            still = all(row.routed and not row.assignment.draining for row in rows)
            return rows if still and replicas in (0, len(rows)) else []

        return wait_until(rows_if_settled, WAIT_TIMEOUT_S, f"{name} to serve in {region}", every_s=0.1)

    def placement_rows(self, name: str, region: str = "edge") -> list[operator_pb2.PlacementView]:
        """Current placements."""
        with self.api(region) as api:
            return [row for row in api.get("placements").placements if row.assignment.workload.name == name]

    def serving(self, name: str) -> set[str]:
        """Nodes of edge where it serves, as the coordinator sees it."""
        return {row.node for row in self.placement_rows(name) if row.routed and row.liveness == "ready"}

    def events(self, after: int = 0, region: str = "edge") -> list[operator_pb2.Event]:
        with self.api(region) as api:
            return list(api.events(after))

    def agreements(self, region: str = "edge") -> list[operator_pb2.AgreementView]:
        with self.api(region) as api:
            return list(api.get("agreements").agreements)

    def delete_workloads(self, *names: str, region: str = "edge") -> None:
        """Delete workloads; nothing of them is left on return."""

        def remaining() -> list[str]:
            with self.api(region) as api:
                found = {view.workload.name for view in api.get("workloads").workloads}
                agreed = {view.workload.name for view in api.get("agreements").agreements}
            return [name for name in names if name in found | agreed]

        with self.api(region) as api:
            for name in names:
                api.delete("workload", name, "default")
        wait_until(lambda: not remaining(), WAIT_TIMEOUT_S, f"{names} to be gone", every_s=0.2)


@contextmanager
def federation(home: Path) -> Iterator[Compose]:
    """Start everything; nothing is left afterwards. On a failure, prints the containers' last log lines."""
    found = Compose(home)
    found.down()  # remains of an aborted run
    clock = SystemClock()
    try:
        began = clock.now()
        found.up()
        found.up_s = clock.now() - began
        yield found
    except BaseException:
        print(found.compose("ps"), found.compose("logs", "--no-color", "--tail=15"))
        raise
    finally:
        found.down()


def docker(*arguments: str, timeout: float = 60.0, stdin: str | None = None) -> str:
    """The command's output. An assertion fails if it fails. stdin: its input."""
    done = subprocess.run(
        ["docker", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


_UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(text: str) -> int:
    """Of what `docker stats` prints: `83.4MiB`."""
    unit = text.lstrip("0123456789.")
    return int(float(text.removesuffix(unit)) * _UNITS[unit])
