"""A60: what a revoked identity made or is bound to (tokens, certificates, held bids) ends with it, on real
coordinators."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.clients.oip import GrpcClient, InferenceError
from harness.cluster.agents import api
from harness.cluster.coordinator import CoordinatorServer, channel
from harness.cluster.federation import federation_of
from harness.cluster.stack import DevStack
from harness.measure.contention import RunDelay
from harness.report import record
from harness.wait import until, wait_until
from shoal.client import Context, RegionClient
from shoal.coordinator.clock import CoordinatorClock
from shoal.types.codes import Code, ShoalError
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.enrol import redeem
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.member_files import Enrolled

WITHIN_S = 1.0


def operator_of(coordinator: CoordinatorServer, folder: Path) -> RegionClient:
    return RegionClient(Context("test", coordinator.region, coordinator.link, str(folder)))


def enrol(coordinator: CoordinatorServer, maker: RegionClient, role: str, name: str, folder: Path) -> Enrolled:
    found = redeem(coordinator.enrol, maker.create_token(role, name, 60.0).token, name)
    found.write(folder)
    return found


def code_of(coordinator: CoordinatorServer, who: Enrolled) -> Code | None:
    """Why the coordinator refuses a certificate; None where it does not."""
    with channel(coordinator.link, who) as opened:
        try:
            operator_pb2_grpc.OperatorStub(opened).WhoAmI(operator_pb2.WhoAmIRequest(), timeout=5)
        except grpc.RpcError as error:
            return refusal_of(error).code
    return None


def test_a60_all_that_a_revoked_operator_made_is_unusable_within_a_second(
    coordinator: CoordinatorServer, tmp_path: Path
) -> None:
    clock = CoordinatorClock()
    with api(coordinator) as admin:
        ann = enrol(coordinator, admin, "operator", "ann", tmp_path / "ann")
        with operator_of(coordinator, tmp_path / "ann") as by_ann:
            ben = enrol(coordinator, by_ann, "operator", "ben", tmp_path / "ben")
            unused = by_ann.create_token("operator", "", 30 * 86400.0)
            bearer = by_ann.create_token("bearer", "shop", 3600.0)
        with operator_of(coordinator, tmp_path / "ben") as by_ben:
            later = by_ben.create_token("operator", "eve", 30 * 86400.0)
        with channel(coordinator.link, ben) as opened:
            stream: Any = operator_pb2_grpc.OperatorStub(opened).Events(operator_pb2.EventsRequest(follow=True))
            next(stream)
            planned = admin.revoke("ann", role="operator", reason="left", dry_run=True)
            assert code_of(coordinator, ann) is None, "a look ends nothing"
            asked_at = clock.wall()
            reply = admin.revoke("ann", role="operator", reason="left")
            with pytest.raises(grpc.RpcError) as ended:
                for _ in stream:
                    pass
            closed_after_s = clock.wall() - asked_at
        assert refusal_of(ended.value).code is Code.CERT_REVOKED
        assert closed_after_s <= WITHIN_S, "the open stream of whom ann let in"
        named = {(each.kind, each.name) for each in reply.ended}
        assert named == {
            ("identity", "shoal://eu/operator/ann"),
            ("identity", "shoal://eu/operator/ben"),
            ("token", unused.id),
            ("token", later.id),
            ("bearer", bearer.id),
        }
        assert named == {(each.kind, each.name) for each in planned.ended}
        assert len(reply.serials) == 2
        for who in (ann, ben):
            assert code_of(coordinator, who) is Code.CERT_REVOKED
        for token in (unused, later):
            with pytest.raises(ShoalError) as refused:
                redeem(coordinator.enrol, token.token, "eve")
            assert refused.value.code is Code.TOKEN_INVALID
        left = {each.id for each in admin.get("tokens").tokens if not each.used_at}
        assert not left & {unused.id, later.id, bearer.id}
        unusable_after_s = clock.wall() - asked_at
    record("A60", "P", 1, ended=len(named), closed_after_s=round(closed_after_s, 3), usable_after_1_s=0,
           all_asked_after_s=round(unusable_after_s, 3))  # fmt: skip


def test_a60_the_first_operator_is_revoked_and_comes_back_by_the_machines_owner_alone(tmp_path: Path) -> None:
    coordinator = CoordinatorServer(tmp_path)
    coordinator.start()
    folder = coordinator.data / "operator"
    first = (folder / "cert.pem").read_bytes()
    with api(coordinator) as admin:
        with pytest.raises(ShoalError) as refused:
            admin.revoke("admin", role="operator", reason="stolen")
        assert refused.value.code is Code.LAST_OPERATOR
        assert "shoal-coordinator operator" in refused.value.refusal.remedy
        reply = admin.revoke("admin", role="operator", reason="stolen", force=True)
        assert len(reply.serials) == 1
        with pytest.raises(ShoalError) as ended:
            admin.get("nodes")
        assert ended.value.code is Code.CERT_REVOKED
    assert coordinator.end() == 0
    coordinator.start()
    assert (folder / "cert.pem").read_bytes() == first, "nobody gets another by a restart"
    with api(coordinator) as admin, pytest.raises(ShoalError) as ended:
        admin.get("nodes")
    assert ended.value.code is Code.CERT_REVOKED
    command = [
        sys.executable,
        "-c",
        "from shoal.coordinator.main import main; main()",
        "operator",
        "--data-dir",
        str(coordinator.data),
    ]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert json.loads(said) == {"event": "written", "operator_dir": str(folder.resolve())}
    assert (folder / "cert.pem").read_bytes() != first
    with api(coordinator) as admin:  # at once: whoever types the next command has the new files
        admin.get("nodes")
    record("A60", "P", 1, role="first operator", back_by="shoal-coordinator operator")
    assert coordinator.end() == 0


async def test_a60_a_tenants_bearer_tokens_end_at_every_front(pair: DevStack) -> None:
    """On the connection that is open, within a second; another tenant's go on."""
    clock = CoordinatorClock()
    files, bearer = pair.tenant("shop")
    _, other = pair.tenant("bakery")
    port, authority = pair.port("gateway", "data"), files.authority.read_bytes()

    async def code_of_call(client: GrpcClient) -> str:
        try:
            await client.model("nothing")
        except InferenceError as error:
            return error.code or str(error.status)
        return ""

    async def knows(client: GrpcClient) -> bool:
        return await code_of_call(client) == Code.MODEL_NOT_FOUND

    shop, bakery = (GrpcClient(port, authority, bearer=each) for each in (bearer, other))

    async def knows_both() -> bool:
        return await knows(shop) and await knows(bakery)

    await until(knows_both, 20.0, "the front to know both tokens")
    with pair.api() as admin:
        asked_at = clock.wall()
        reply = admin.revoke("shop", role="tenant", reason="left")
    assert sorted(each.kind for each in reply.ended) == ["bearer", "identity"]

    async def is_refused() -> bool:
        return await code_of_call(shop) == Code.TOKEN_INVALID

    await until(is_refused, 10.0, "the front to refuse it")
    refused_after_s = clock.wall() - asked_at
    assert refused_after_s <= WITHIN_S
    assert await knows(bakery)
    record("A60", "P", 1, role="tenant", bearer_refused_after_s=round(refused_after_s, 3))
    await shop.close()
    await bakery.close()


def test_a60_regions_end_with_the_operator_of_the_federation_who_let_them_in(tmp_path: Path) -> None:
    """Within a second no other region knows them; those that another one let in stay."""
    clock = CoordinatorClock()
    with federation_of(tmp_path / "federation", "alpha", "beta", "gamma") as found:
        federation = found.federation
        with operator_of(federation, Path(federation.ready["operator_dir"])) as admin:
            ann = enrol(federation, admin, "operator", "ann", tmp_path / "ann")
            with operator_of(federation, tmp_path / "ann") as by_ann:
                found.join("beta", by_ann.create_token("region", "beta", 600.0).token)
                unused = by_ann.create_token("region", "delta", 600.0)
            for region in ("alpha", "gamma"):
                found.join(region)
            found.wait_all_known()
            servers = (federation, *found.regions.values())
            delay = RunDelay(os.getpid(), *(each.process.pid for each in servers if each.process is not None))
            asked_at = clock.wall()
            reply = admin.revoke("ann", role="operator", reason="left")
            assert [(each.kind, each.name) for each in reply.ended] == [
                ("identity", "shoal://fed/operator/ann"),
                ("token", unused.id),
                ("region", "beta"),
            ]

            def is_alone() -> bool:
                views = [found.federation_view(region) for region in ("alpha", "gamma")]
                return all(view is not None and "beta" not in {each.region for each in view.members} for view in views)

            wait_until(is_alone, 30.0, "the other regions to know")
            unknown_after_s, delayed_s = clock.wall() - asked_at, delay.seconds()
            assert unknown_after_s - delayed_s <= WITHIN_S, f"of which {delayed_s:.2f} s others hold the cores"
            assert code_of(federation, ann) is Code.CERT_REVOKED
            view = found.federation_view("alpha")
            assert view is not None
            assert {each.region for each in view.members} == {"alpha", "gamma"}
    record("A60", "P", 1, role="region", unknown_after_s=round(unknown_after_s, 3))
