"""`docker compose up`, seen from outside of the containers; `test_readme.py` has what the README does then."""

import json
import urllib.request
from typing import Any

import numpy as np
import pytest

from harness.compose import NODES, PATIENCE_S, PORTS, REGIONS, Compose, X
from harness.stack import documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.client import Inference

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(600)]

ONCE = {"etcd-files", "edge-broker-files", "setup", "ready"}
"""What ends when it is done."""


def test_everything_is_confined_and_nothing_is_published_beyond_this_machine(compose: Compose) -> None:
    containers = compose.containers()
    assert len(containers) == 3 + 1 + 1 + 3 + 4 + 5 + len(ONCE), sorted(containers)
    for name, found in containers.items():
        host = found["HostConfig"]
        assert found["State"]["Running"] is (name not in ONCE), name
        assert found["State"]["ExitCode"] == 0, name
        assert (found["Config"]["User"] == "shoal") is (name != "setup"), name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert host["Memory"] > 0, name
        assert host["PidsLimit"] > 0, name
        published = {each["HostIp"] for bound in (host["PortBindings"] or {}).values() for each in bound}
        assert published <= {"127.0.0.1"}, name


def test_an_operator_outside_sees_every_region_by_the_contexts_that_setup_made(compose: Compose) -> None:
    names = {row["name"] for row in json.loads(compose.shoal("context", "ls", "-o", "json").stdout)}
    assert names == {*REGIONS, "federation"}
    shown = compose.shoal("get", "nodes")
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in (*NODES["edge"], "edge-gateway")), shown.stdout
    devices = json.loads(compose.shoal("get", "devices", "-o", "json").stdout)
    assert {one["node"]: one["device"]["emulated"] for one in devices} == dict.fromkeys(NODES["edge"], True)
    seen = compose.shoal("federation", "regions")
    assert all(name in seen.stdout for name in REGIONS), seen.stdout + seen.stderr


def test_a_replica_moves_live_under_load_without_a_lost_or_wrong_answer(fleet: Compose) -> None:
    nodes = ["edge-npu", "edge-gpu"]
    fleet.apply(documents(policy("either", on_nodes(nodes)), workload("mover", "relu", "either")))
    (before,) = fleet.placements("mover")
    (other,) = set(nodes) - {before.node}
    with fleet.load("mover") as load:
        moved = fleet.shoal("migrate", "mover", "--to", other, "--watch")
        assert moved.returncode == 0, moved.stdout + moved.stderr
        load.wait_for(10)
    (after,) = fleet.placements("mover")
    assert after.node == other
    verdict = load.verdict()
    assert (verdict.lost, verdict.violations) == (0, ()), verdict


def test_what_edge_may_not_run_another_region_runs_and_edge_s_gateway_answers(fleet: Compose) -> None:
    spec = "  require: {residency: [cloud]}\n  federation: {delegate: when-infeasible}\n"
    fleet.apply(documents(policy("abroad", spec), workload("guest", "relu", "abroad")))

    def answered() -> Any:
        with Inference(fleet.client()) as client:
            return client.infer("guest", {"x": X})

    found = wait_until(answered, PATIENCE_S, "an answer from another region", every_s=0.2)
    assert np.array_equal(found.outputs["y"], np.maximum(X, 0))
    with fleet.api() as api:
        (agreed,) = (one for one in api.get("agreements").agreements if one.workload.name == "guest")
    assert (agreed.counterpart, agreed.service) == ("cloud", "ready")


def test_the_invariants_hold_in_every_region(fleet: Compose) -> None:
    for region in REGIONS:
        told = fleet.shoal("doctor", "--context", region)
        assert told.returncode == 0, told.stdout + told.stderr


def test_up_again_changes_nothing(compose: Compose) -> None:
    before = {name: one["State"]["StartedAt"] for name, one in compose.containers().items() if name not in ONCE}
    contexts = (compose.home / "edge" / "operator" / "cert.pem").read_bytes()
    compose.up()
    after = {name: one["State"]["StartedAt"] for name, one in compose.containers().items() if name not in ONCE}
    assert after == before
    assert (compose.home / "edge" / "operator" / "cert.pem").read_bytes() == contexts


def test_prometheus_reads_every_page(compose: Compose) -> None:
    compose.compose("--profile", "monitoring", "up", "-d", "--no-build", "prometheus")

    def read() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS}090/api/v1/targets", timeout=5) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
        ill = [f"{one['scrapeUrl']}: {one['lastError']}" for one in targets if one["health"] != "up"]
        assert (len(targets), ill) == (22, [])
        return True

    wait_until(read, PATIENCE_S, "every target to be read", every_s=1.0)
