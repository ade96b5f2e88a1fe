"""Workloads of a local federation that another region runs, and what is agreed about them."""

import asyncio
from typing import Protocol

from harness.oip import GrpcClient
from harness.stack import PATIENCE_S, Load, Stack, documents, policy, workload
from harness.wait import wait_until
from shoal.client import Region
from shoal.v1 import operator_pb2

HOME, NEAR, FAR = "home", "home-2", "home-3"
LEASE_S = 30.0
RENEWED_WITHIN_S = 6.0
"""Of a lease that is renewed every 1.5 s, on a busy machine."""


class Regions(Protocol):
    """Of processes or of containers."""

    def api(self, region: str = "") -> Region:
        """region: by default the first."""
        ...


def in_regions(name: str, *regions: str) -> str:
    """Documents of a workload of that name which may run there alone."""
    spec = f"  require: {{residency: [{', '.join(regions)}]}}\n  federation: {{delegate: when-infeasible}}\n"
    return documents(policy(name, spec), workload(name, "relu", name))


def agreements(stack: Regions, name: str, region: str = "") -> list[operator_pb2.AgreementView]:
    with stack.api(region) as api:
        return [view for view in api.get("agreements").agreements if view.workload.name == name]


def delegated(stack: Stack, name: str) -> operator_pb2.AgreementView:
    """Its agreement, once the other region serves it and home's gateway says so."""

    def serves() -> list[operator_pb2.AgreementView]:
        found = [view for view in agreements(stack, name) if (view.state, view.service) == ("active", "ready")]
        routed: bool = asyncio.run(ready(stack, name)) if found else False
        return found if routed else []

    return wait_until(serves, PATIENCE_S, f"{name} to be served elsewhere", every_s=0.1)[0]


async def ready(stack: Stack, name: str) -> bool:
    files = stack.client_files
    client = GrpcClient(stack.port("gateway", "grpc"), files.authority.read_bytes(), files)
    try:
        return await client.model_ready(name)
    finally:
        await client.close()


def forget(stack: Stack, *names: str) -> None:
    """The workloads, and what was agreed about them."""
    stack.forget(*names)
    wait_until(lambda: not any(agreements(stack, name) for name in names), PATIENCE_S, "the agreements to be over")


def renewed(stack: Regions, name: str) -> bool:
    """Whether both sides hold its agreement and have just renewed it."""
    (own,) = agreements(stack, name)
    theirs = [view for view in agreements(stack, name, own.counterpart) if view.agreement == own.agreement]
    return all(view.lease_s > LEASE_S - RENEWED_WITHIN_S for view in (own, *theirs)) and len(theirs) == 1


def acquainted(stack: Regions, region: str) -> bool:
    """Whether the federation answers it, and every region has told what it has free."""
    with stack.api(region) as api:
        view = api.federation()
    assert view is not None
    return view.reason.code == "" and all(one.advertises for one in view.members)


def wait_whole(stack: Stack) -> None:
    """Until every region is heard by the federation and knows the others again."""
    regions = stack.info.stack.regions
    wait_until(lambda: all(acquainted(stack, region) for region in regions), PATIENCE_S, "regions to be acquainted")


def through_gateway(stack: Stack, name: str) -> Load:
    return Load(stack.port("gateway", "grpc"), stack.client_files, name, clients=2)
