"""`docker compose up`, seen from outside of the containers; `test_tutorial.py` has what a user does then."""

import json
import urllib.request
from typing import Any

import numpy as np
import pytest

from harness.cluster.compose import IMAGE_USER, NODES, PORTS, REGIONS, WAIT_TIMEOUT_S, Compose, X
from harness.cluster.stack import documents, on_nodes, policy, workload
from harness.wait import wait_until
from shoal.client import InferenceClient

pytestmark = [pytest.mark.compose, pytest.mark.alone, pytest.mark.timeout(600)]

ONCE = {"etcd-files", "etcd-users", "edge-broker-files", "setup", "ready"}
"""What ends when it is done."""
ROOTS = {"setup", "etcd-files"}
"""Who gives files away."""


def test_everything_is_confined_and_nothing_is_published_beyond_this_machine(compose: Compose) -> None:
    containers = compose.containers()
    assert len(containers) == 3 + 1 + 1 + 3 + 4 + 5 + len(ONCE), sorted(containers)
    for name, found in containers.items():
        host = found["HostConfig"]
        assert found["State"]["Running"] is (name not in ONCE), name
        assert found["State"]["ExitCode"] == 0, name
        assert (found["Config"]["User"] == "shoal") is (name not in ROOTS), name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        assert host["Memory"] > 0, name
        assert host["PidsLimit"] > 0, name
        published = {each["HostIp"] for bound in (host["PortBindings"] or {}).values() for each in bound}
        assert published <= {"127.0.0.1"}, name


def test_a_coordinator_sees_the_key_of_its_own_user_of_etcd_and_uses_no_other(compose: Compose) -> None:
    """Item 28: one certificate opened every region's state, and the members' key lay beside it."""
    for name in ("federation", *(f"{region}-coordinator" for region in REGIONS)):
        assert compose.run_in(name, "ls", "/srv/etcd").split() == ["ca.pem", "cert.pem", "key.pem"], name
    assert compose.run_in("etcd-1", "ls", "/srv/etcd").split() == ["ca.pem", "member-cert.pem", "member-key.pem"]
    owners = compose.run_in("edge-coordinator", "stat", "-c", "%a %u %n", "/srv/etcd", "/srv/etcd/key.pem")
    assert owners.splitlines() == [f"700 {IMAGE_USER} /srv/etcd", f"600 {IMAGE_USER} /srv/etcd/key.pem"]
    anywhere = (f"--{use}=127.0.0.1:0" for use in ("link", "enrol", "metrics", "models", "peers"))
    flags = ("--region=edge", "--data-dir=/tmp/edge", *anywhere)
    done = compose.run_in_unchecked("cloud-coordinator", "shoal-coordinator", "run", *flags)
    assert done.returncode == 1
    assert "refuses its user 'region-cloud'" in done.stderr
    assert "(STORE_DENIED)" in done.stderr


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
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict


def test_what_edge_may_not_run_another_region_runs_and_edge_s_gateway_answers(fleet: Compose) -> None:
    spec = "  require: {residency: [cloud]}\n  federation: {delegate: when-infeasible}\n"
    fleet.apply(documents(policy("abroad", spec), workload("guest", "relu", "abroad")))

    def infer_guest() -> Any:
        with InferenceClient(fleet.client()) as client:
            return client.infer("guest", {"x": X})

    found = wait_until(infer_guest, WAIT_TIMEOUT_S, "an answer from another region", every_s=0.2)
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

    wait_until(read, WAIT_TIMEOUT_S, "every target to be read", every_s=1.0)
