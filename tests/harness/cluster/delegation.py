"""Workloads of a local federation that another region runs, and their agreements."""

import asyncio
from typing import Protocol

from harness.clients.oip import GrpcClient
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, documents, policy, workload
from harness.wait import wait_until
from shoal.client import RegionClient
from shoal.v1 import operator_pb2

HOME, NEAR, FAR = "home", "home-2", "home-3"
LEASE_S = 30.0
RENEWED_WITHIN_S = 6.0
"""Most seconds since the last renewal of a lease that is renewed every 1.5 s, on a busy machine."""


class MultiRegionStack(Protocol):
    """A stack of processes or of containers."""

    def api(self, region: str = "") -> RegionClient:
        """region: by default the first."""
        ...


def in_regions(name: str, *regions: str) -> str:
    """Documents of a workload that may run only in these regions."""
    spec = f"  require: {{residency: [{', '.join(regions)}]}}\n  federation: {{delegate: when-infeasible}}\n"
    return documents(policy(name, spec), workload(name, "relu", name))


def agreements(stack: MultiRegionStack, name: str, region: str = "") -> list[operator_pb2.AgreementView]:
    with stack.api(region) as api:
        return [view for view in api.get("agreements").agreements if view.workload.name == name]


def wait_delegated(stack: DevStack, name: str) -> operator_pb2.AgreementView:
    """Its agreement, once the other region serves it and the local gateway reports so."""

    def serves() -> list[operator_pb2.AgreementView]:
        found = [view for view in agreements(stack, name) if (view.state, view.service) == ("active", "ready")]
        routed: bool = asyncio.run(is_ready(stack, name)) if found else False
        return found if routed else []

    return wait_until(serves, WAIT_TIMEOUT_S, f"{name} to be served elsewhere", every_s=0.1)[0]


async def is_ready(stack: DevStack, name: str) -> bool:
    files = stack.client_files
    client = GrpcClient(stack.port("gateway", "data"), files.authority.read_bytes(), files)
    try:
        return await client.model_ready(name)
    finally:
        await client.close()


def delete_delegated(stack: DevStack, *names: str) -> None:
    """Delete the workloads and wait until their agreements are gone."""
    stack.delete_workloads(*names)
    wait_until(lambda: not any(agreements(stack, name) for name in names), WAIT_TIMEOUT_S, "the agreements to be over")


def is_renewed(stack: MultiRegionStack, name: str) -> bool:
    """Whether both sides hold its agreement and renewed it recently."""
    (own,) = agreements(stack, name)
    theirs = [view for view in agreements(stack, name, own.counterpart) if view.agreement == own.agreement]
    return all(view.lease_s > LEASE_S - RENEWED_WITHIN_S for view in (own, *theirs)) and len(theirs) == 1


def knows_all_regions(stack: MultiRegionStack, region: str) -> bool:
    """Whether the federation answers it, and every region has advertised its free capacity."""
    with stack.api(region) as api:
        view = api.federation()
    assert view is not None
    return view.reason.code == "" and all(one.advertises for one in view.members)


def wait_all_acquainted(stack: DevStack) -> None:
    """Wait until the federation hears every region and the regions list each other again."""
    regions = stack.info.stack.regions
    wait_until(
        lambda: all(knows_all_regions(stack, region) for region in regions), WAIT_TIMEOUT_S, "regions to be acquainted"
    )


def gateway_load(stack: DevStack, name: str) -> InferenceLoad:
    return InferenceLoad(stack.port("gateway", "data"), stack.client_files, name, clients=2)
