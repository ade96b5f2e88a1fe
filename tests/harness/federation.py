"""A federation of real processes: its service, and coordinators of regions that may join it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.coordinator import Coordinator, operator
from harness.wait import wait_until
from shoal.types.device import Role
from shoal.v1 import operator_pb2, operator_pb2_grpc

NAME = "fed"


@dataclass(frozen=True, slots=True)
class Federated:
    """federation: the process of the service. regions: of coordinators, by name."""

    federation: Coordinator
    regions: Mapping[str, Coordinator]

    def operator(self, name: str = NAME) -> operator_pb2_grpc.OperatorStub:
        process = self.federation if name == NAME else self.regions[name]
        return operator(process.link, process.certificate(Role.OPERATOR, "op"))

    def token(self, region: str = "") -> str:
        request = operator_pb2.CreateTokenRequest(role="region", name=region, valid_s=600.0)
        return str(self.operator().CreateToken(request, timeout=10.0).token)

    def join(self, region: str) -> operator_pb2.FederationView:
        request = operator_pb2.JoinFederationRequest(address=self.federation.enrol, token=self.token(region))
        return self.operator(region).JoinFederation(request, timeout=20.0).federation

    def shown(self, region: str) -> operator_pb2.FederationView | None:
        """What a region knows of the federation."""
        reply = self.operator(region).GetFederation(operator_pb2.GetFederationRequest(), timeout=10.0)
        return reply.federation if reply.HasField("federation") else None

    def wait_for_everybody(self, deadline_s: float = 40.0) -> None:
        """Until each region lists each other one, reachable and with an advertisement."""

        def known() -> bool:
            for region in self.regions:
                view = self.shown(region)
                others = [] if view is None else [one for one in view.members if one.region != region]
                if {one.region for one in others} != self.regions.keys() - {region}:
                    return False
                if not all(one.advertises and one.rtt_s > 0 for one in others):
                    return False
            return True

        wait_until(known, deadline_s, "every region knows every other one")


@contextmanager
def federated(folder: Path, *regions: str) -> Iterator[Federated]:
    """Started, and not joined."""
    processes = [Coordinator(folder / NAME, region=NAME, role="federation")]
    processes += [Coordinator(folder / name, region=name) for name in regions]
    try:
        for each in processes:
            each.folder.mkdir(parents=True)
            each.start(flags=("--peers", "127.0.0.1:0") if each.role == "region" else ())
        yield Federated(processes[0], {each.region: each for each in processes[1:]})
    finally:
        for each in processes:
            if each.process is not None:
                each.end()
