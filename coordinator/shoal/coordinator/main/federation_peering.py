"""A region's side of a federation: its membership, its port for peers, and its calls to them.

The port opens when the region joins, or starts as a member. A region without a federation does not listen.
"""

import asyncio
import socket
from typing import Any, Final

import structlog

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.controllers.federation.membership import FederationMembership, LedgerHeads
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.runner import Compute
from shoal.coordinator.core.negotiation.advertise import capacity_classes
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.main.serving import listen, reserve_port, server_for_members
from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.peers.federation import GrpcFederation
from shoal.coordinator.peers.grpc import GrpcPeers
from shoal.coordinator.peers.server import PeerService
from shoal.coordinator.ports import Blobs
from shoal.types.address import HostPort
from shoal.types.offer import Member
from shoal.v1 import federation_pb2_grpc
from shoal.wire.signed_envelope import RegionSigner
from shoal.wire.trust import authority_fingerprints, bundle_of_authorities

log: Final = structlog.get_logger("shoal.coordinator.trading")


class FederationPeering:
    """listen_address: where peers call. advertise: the host that they dial."""

    def __init__(
        self,
        region: RegionalCoordinator,
        blobs: Blobs,
        listen_address: HostPort,
        advertise: str,
        *,
        authority: FileAuthority,
        identity: ServerIdentity,
        audit: AuditTrail,
        compute: Compute,
    ) -> None:
        """compute: as of `RegionalCoordinator.federate`."""
        self._region = region
        self._name = region.config.name
        self._blobs = blobs
        self._listen_address = listen_address
        self._advertise = advertise
        self._authority = authority
        self._identity = identity
        self._audit = audit
        self._compute = compute
        self._clock = clock = region.context.clock
        self._meter = meter = region.context.meter
        self._server: Any = None
        self._reserved_port: socket.socket | None = None
        self._open_lock = asyncio.Lock()
        self._signer_pem = b""
        self._signer: RegionSigner | None = None
        self.channels = Channels(lambda: identity.current)
        self.federation = GrpcFederation(self.channels, self.signer, lambda: self.membership.current, clock, meter)
        self.peers = GrpcPeers(self.channels, self.signer, lambda: self.membership.directory, clock)
        self.membership = FederationMembership(
            region.context,
            link=self.federation,
            registry=self.federation,
            peers=self.peers,
            own=self._own_member,
            capacity=lambda: capacity_classes(region.workloads.inputs()),
            fingerprints_of=authority_fingerprints,
            heads=lambda: LedgerHeads(region.ledger.head, region.ledger.heads),
        )

    async def start(self) -> None:
        """Call after the region's start and before it runs. Raises ShoalError(STATE_CORRUPT | STORE_* |
        FIELD_INVALID)."""
        await self.membership.start()
        await self._region.federate(
            self.peers,
            federation=self.federation,
            directory=lambda: self.membership.directory,
            rtt=lambda: self.membership.rtt,
            compute=self._compute,
        )
        if self.membership.current is not None:
            await self._open()

    def is_listed(self) -> bool:
        """Whether the federation, where there is one, knows this region as it is, with all its CAs."""
        return self.membership.current is None or self.membership.is_listed

    async def join(self, address: str, token: str, actor: str) -> None:
        await self._open()
        await self.membership.join(address, token, actor)

    async def run(self) -> None:
        await self.membership.run()

    async def stop(self, grace_s: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
        self._release_port()
        await self.channels.close()

    def signer(self) -> RegionSigner:
        """A signer with the region's newest certificate."""
        own = self._identity.current
        if self._signer is None or self._signer_pem != own.certificate_pem:
            self._signer = RegionSigner(self._name, own.certificate_pem, own.key_pem)
            self._signer_pem = own.certificate_pem
        return self._signer

    def roots_of(self, region: str) -> tuple[str, ...]:
        """CAs of the federation or of one of its other members, whose certificates may call."""
        joined = self.membership.current
        if joined is not None and region == joined.federation:
            return joined.roots
        return self.membership.roots_of(region)

    async def _open(self) -> None:
        async with self._open_lock:
            if self._server is not None:
                return
            bids = self._region.delegate
            assert bids is not None, "started"
            guard = Authorisation(self._name, self._clock, self._meter, self._audit, roots_of=self.roots_of)
            server = server_for_members(guard)
            service = PeerService(
                self._name, bids, self._blobs, self.signer, self.membership.roots_of, self._clock,
                self._region.workloads.fetches,
            )  # fmt: skip
            federation_pb2_grpc.add_PeerServicer_to_server(service, server)
            credentials = self._identity.credentials(client_certificates=True, others=self._trusted_cas)
            # Here, where it opens: a region without a federation leaves the port to others.
            self._listen_address, self._reserved_port = reserve_port(self._listen_address, "--peers")
            try:
                listen(server, self._listen_address, credentials, "--peers")
                await server.start()
            except BaseException:
                self._release_port()
                raise
            self._server = server
            log.info("peer_server_listening", address=str(self._listen_address))

    def _release_port(self) -> None:
        if self._reserved_port is not None:
            self._reserved_port.close()

    def _trusted_cas(self) -> str:
        """CAs whose certificates may complete a TLS handshake."""
        joined = self.membership.current
        if joined is None:
            return ""
        own = ((joined.federation, root) for root in joined.roots)
        members = ((member.region, root) for member in joined.directory.members for root in member.roots)
        return bundle_of_authorities((*own, *members))

    def _own_member(self) -> Member:
        address = str(HostPort(self._advertise, self._listen_address.port))
        residency = self._region.workloads.catalog.facts(self._name).residency
        return Member(self._name, address, self._authority.roots, residency)
