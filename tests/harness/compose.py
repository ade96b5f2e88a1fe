"""The containers of `docker-compose.yml`, as a person starts them, in a project and on ports of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from harness.pki import Files
from harness.stack import files_of
from harness.wait import wait_until
from shoal.client import Context, Contexts, Region
from shoal.devstack.compose import outside
from shoal.v1 import operator_pb2

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = "shoal-test"
PORTS: Final = "17"
"""Before the last three digits of every published port."""
REGIONS: Final = {"edge": 100, "cloud": 200, "datacenter": 300}
NODES: Final = {
    "edge": ("edge-npu", "edge-gpu", "edge-arm"),
    "cloud": ("cloud-gpu",),
    "datacenter": ("datacenter-cpu",),
}
"""Agents by region."""
UP_WITHIN_S: Final = 240.0
PATIENCE_S: Final = 90.0


def compose_command() -> list[str]:
    """`docker compose`, or the older program. Fails where there is neither: a missing engine is a failure, no skip."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    found = shutil.which("docker-compose")
    assert found is not None, "no `docker compose`: tests/compose/engine.sh installs one"
    return [found]


class Compose:
    """home: where `setup` writes contexts and files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._command = compose_command()
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "COMPOSE_"))}
        self._environment = {**plain, "SHOAL_HOME": str(home), "SHOAL_PORTS": PORTS, "COLUMNS": "300"}

    # the engine

    def compose(self, *arguments: str, timeout: float = PATIENCE_S) -> str:
        """What it prints. An assertion fails when it does."""
        done = subprocess.run(
            [*self._command, "-p", PROJECT, "-f", str(ROOT / "docker-compose.yml"), *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def containers(self) -> Mapping[str, dict[str, Any]]:
        """What the engine knows of each, by service."""
        label = f"label=com.docker.compose.project={PROJECT}"
        ids = _docker("ps", "--all", "--quiet", "--filter", label).split()
        found = json.loads(_docker("inspect", *ids)) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def up(self) -> None:
        """Every container is healthy, every node ready and measured when this returns."""
        self.compose("up", "-d", "--no-build", timeout=UP_WITHIN_S)
        wait_until(self.healthy, PATIENCE_S, "every container to be healthy", every_s=0.5)
        for region, nodes in NODES.items():
            wait_until(lambda region=region, nodes=nodes: self.measured(region, nodes), PATIENCE_S, f"{nodes}")  # type: ignore[misc]

    def down(self) -> None:
        self.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "5", "--remove-orphans")

    def healthy(self) -> bool:
        """Whether all that run say so."""
        states = [one["State"] for one in self.containers().values()]
        return all(state["Health"]["Status"] == "healthy" for state in states if "Health" in state)

    # as an operator outside

    def shoal(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """The real command line, with the contexts that `setup` made."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("shoal")), *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def api(self, region: str = "edge") -> Region:
        return Region(Contexts(self.home).get(region))

    def client(self, region: str = "edge") -> Context:
        """Of the default tenant."""
        return replace(Contexts(self.home).get(region), name="client", folder=str(self.home / region / "client"))

    def client_files(self, region: str = "edge") -> Files:
        return files_of(self.client(region))

    def port(self, use: str, region: str = "edge") -> int:
        """Published; use: link, enrol, grpc, rest, token."""
        address = outside(region, f"127.0.0.1:{int(PORTS) * 1000 + REGIONS[region]}")[use]
        return int(address.rpartition(":")[2])

    def measured(self, region: str, nodes: tuple[str, ...]) -> bool:
        with self.api(region) as api:
            ready = {view.node.name for view in api.get("nodes").nodes if view.liveness == "ready" and view.front_ready}
            known = {device.node for device in api.get("devices").devices if device.receipt.node}
        return {*nodes, f"{region}-gateway"} <= ready and set(nodes) <= known

    def apply(self, text: str, region: str = "edge") -> None:
        with self.api(region) as api:
            reply = api.apply([operator_pb2.Document(name="test.yaml", text=text)])
        assert not reply.problems, reply.problems

    def placements(self, name: str, region: str = "edge") -> list[operator_pb2.PlacementView]:
        """Of a workload, once all of them serve and nothing is on its way."""

        def settled() -> list[operator_pb2.PlacementView]:
            with self.api(region) as api:
                rows = [row for row in api.get("placements").placements if row.assignment.workload.name == name]
            return rows if all(row.routed and not row.assignment.draining for row in rows) else []

        return wait_until(settled, PATIENCE_S, f"{name} to serve in {region}", every_s=0.2)


@contextmanager
def federation(home: Path) -> Iterator[Compose]:
    """Up; nothing is left of it afterwards. What its containers said last is told when something fails."""
    found = Compose(home)
    found.down()  # what a run that was cut off has left
    try:
        found.up()
        yield found
    except BaseException:
        print(found.compose("ps"), found.compose("logs", "--no-color", "--tail=15"))
        raise
    finally:
        found.down()


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
