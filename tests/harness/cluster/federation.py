"""A federation of real processes: its service, and coordinators of regions that may join it."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from harness.builders.federation_members import advertisement
from harness.cluster.coordinator import CoordinatorServer, operator
from harness.ports import free_ports
from harness.servers.etcd import Etcd
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.core.federation.rules import ADVERTISEMENT_LEASE_MOST_S
from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.v1 import federation_pb2_grpc, operator_pb2, operator_pb2_grpc
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options
from shoal.wire.signed_envelope import RegionSigner

NAME = "fed"


def advertise_in_place_of(region: FileAuthority, federation: FileAuthority, link: str) -> None:
    """As the coordinator of `region` would, whose process was stopped: its federation waits for it then, for longer
    than anything takes on a busy machine."""
    wall = CoordinatorClock().wall()
    own = region.enrol_self(Role.COORDINATOR, "coordinator", lifetime_s=Seconds(600.0), wall=wall)
    said = advertisement(
        region.region, int(wall * 1000), classes=(), lease_s=Seconds(ADVERTISEMENT_LEASE_MOST_S),
        trusted_roots=federation.fingerprints,
    )  # fmt: skip
    message = RegionSigner(region.region, own.certificate_pem, own.key_pem).sign(said, federation.region)
    credentials = grpc.ssl_channel_credentials(federation.ca_pem, own.key_pem, own.certificate_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of(federation.region, Role.FEDERATION, "federation"))
    with grpc.secure_channel(link, credentials, options) as opened:
        federation_pb2_grpc.FederationStub(opened).Advertise(message, timeout=10.0)


@dataclass(frozen=True, slots=True)
class FederationProcesses:
    """federation: the process of the service, or of its first replica; replicas: of all; flags: of each. regions: of
    coordinators, by name."""

    federation: CoordinatorServer
    regions: Mapping[str, CoordinatorServer]
    replicas: tuple[CoordinatorServer, ...] = ()
    flags: tuple[str, ...] = ()

    def operator(self, name: str = NAME) -> operator_pb2_grpc.OperatorStub:
        process = self.federation if name == NAME else self.regions[name]
        return operator(process.link, process.certificate(Role.OPERATOR, "op"))

    def token(self, region: str = "") -> str:
        request = operator_pb2.CreateTokenRequest(role="region", name=region, valid_s=600.0)
        return str(self.operator().CreateToken(request, timeout=10.0).token)

    def join(self, region: str, token: str = "") -> operator_pb2.FederationView:
        doors = ",".join(each.enrol for each in self.replicas or (self.federation,))
        request = operator_pb2.JoinFederationRequest(address=doors, token=token or self.token(region))
        return self.operator(region).JoinFederation(request, timeout=20.0).federation

    def federation_view(self, region: str) -> operator_pb2.FederationView | None:
        """What a region knows of the federation."""
        reply = self.operator(region).GetFederation(operator_pb2.GetFederationRequest(), timeout=10.0)
        return reply.federation if reply.HasField("federation") else None

    def wait_all_known(self, deadline_s: float = 40.0) -> None:
        """Until each region lists each other one, reachable and with an advertisement."""

        def all_known() -> bool:
            for region in self.regions:
                view = self.federation_view(region)
                others = [] if view is None else [one for one in view.members if one.region != region]
                if {one.region for one in others} != self.regions.keys() - {region}:
                    return False
                if not all(one.advertises and one.rtt_s > 0 for one in others):
                    return False
            return True

        wait_until(all_known, deadline_s, "every region knows every other one")


def _start(process: CoordinatorServer) -> None:
    process.start(flags=("--peers", "127.0.0.1:0") if process.role == "region" else ())


@contextmanager
def replicated_federation(folder: Path, store: Etcd, *regions: str) -> Iterator[FederationProcesses]:
    """As `federation_of`, with two replicas on one store; each member knows the addresses of both."""
    first, second, *enrols = (f"127.0.0.1:{port}" for port in free_ports(4))
    replicas = tuple(
        CoordinatorServer(folder / f"{NAME}-{number}", region=NAME, role="federation", link=link, enrol=enrol)
        for number, (link, enrol) in enumerate(zip((first, second), enrols, strict=True))
    )
    shared = ("--shared-dir", str(replicas[0].data))
    flags = (*store.flags, *shared, "--links", f"{first},{second}", "--enrols", ",".join(enrols))
    others = [CoordinatorServer(folder / name, region=name) for name in regions]
    try:
        for each in (*replicas, *others):
            each.folder.mkdir(parents=True)
            each.start(flags=("--peers", "127.0.0.1:0") if each.role == "region" else flags)
        yield FederationProcesses(replicas[0], {each.region: each for each in others}, replicas, flags)
    finally:
        for each in (*replicas, *others):
            if each.process is not None:
                each.end()


@contextmanager
def federation_of(folder: Path, *regions: str) -> Iterator[FederationProcesses]:
    """Started, but not joined."""
    processes = [CoordinatorServer(folder / NAME, region=NAME, role="federation")]
    processes += [CoordinatorServer(folder / name, region=name) for name in regions]
    try:
        for each in processes:
            each.folder.mkdir(parents=True)
        with ThreadPoolExecutor(4) as together:
            list(together.map(_start, processes))
        yield FederationProcesses(processes[0], {each.region: each for each in processes[1:]})
    finally:
        for each in processes:
            if each.process is not None:
                each.end()
