"""A region's side of a federation: its membership, its port for peers, its calls to them.

The port opens when the region joins, or starts as a member: one that is in no federation listens to nobody.
"""

import asyncio
from typing import Any, Final

import grpc.aio
import structlog

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.controllers.membership import LedgerHeads, Membership
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.negotiation.advertise import classes
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.main.options import Address
from shoal.coordinator.main.serving import listen
from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.peers.federation import GrpcFederation
from shoal.coordinator.peers.grpc import GrpcPeers
from shoal.coordinator.peers.server import PeerService
from shoal.coordinator.ports import Blobs, Clock, Meter, Store
from shoal.types.offer import Member
from shoal.v1 import federation_pb2_grpc
from shoal.wire.limits import LINK_BYTES, server_options
from shoal.wire.said import Signer

log: Final = structlog.get_logger("shoal.coordinator.trading")


class Trading:
    """listens: where peers call. advertise: the host that they dial."""

    def __init__(
        self,
        region: Region,
        store: Store,
        blobs: Blobs,
        listens: Address,
        advertise: str,
        *,
        authority: FileAuthority,
        identity: ServerIdentity,
        audit: AuditTrail,
        clock: Clock,
        meter: Meter,
    ) -> None:
        self._region = region
        self._name = region.config.name
        self._blobs = blobs
        self._listens = listens
        self._advertise = advertise
        self._authority = authority
        self._identity = identity
        self._audit = audit
        self._clock = clock
        self._meter = meter
        self._server: Any = None
        self._opening = asyncio.Lock()
        self._made_with = b""
        self._signer: Signer | None = None
        self.channels = Channels(lambda: identity.enrolled)
        self.federation = GrpcFederation(self.channels, self.signer, lambda: self.membership.joined, clock, meter)
        self.peers = GrpcPeers(self.channels, self.signer, lambda: self.membership.directory, clock)
        self.membership = Membership(
            store,
            region.truth,
            clock,
            meter,
            link=self.federation,
            door=self.federation,
            peers=self.peers,
            own=self._own,
            capacity=lambda: classes(region.workloads.inputs()),
            heads=lambda: LedgerHeads(region.ledger.head, region.ledger.heads),
        )

    async def start(self) -> None:
        """After the region's start and before it runs. Raises ShoalError(STATE_CORRUPT | STORE_* | FIELD_INVALID)."""
        await self.membership.start()
        await self._region.federate(
            self.peers,
            federation=self.federation,
            directory=lambda: self.membership.directory,
            rtt=lambda: self.membership.rtt,
        )
        if self.membership.joined is not None:
            await self._open()

    async def join(self, address: str, token: str, actor: str) -> None:
        await self._open()
        await self.membership.join(address, token, actor)

    async def run(self) -> None:
        await self.membership.run()

    async def stop(self, grace_s: float | None) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
        await self.channels.close()

    def signer(self) -> Signer:
        """With the region's newest certificate."""
        own = self._identity.enrolled
        if self._signer is None or self._made_with != own.certificate_pem:
            self._signer = Signer(self._name, own.certificate_pem, own.key_pem)
            self._made_with = own.certificate_pem
        return self._signer

    def roots_of(self, region: str) -> tuple[str, ...]:
        """Of the federation, and of its other members: whose members may call."""
        joined = self.membership.joined
        if joined is not None and region == joined.federation:
            return joined.roots
        return self.membership.roots_of(region)

    async def _open(self) -> None:
        async with self._opening:
            if self._server is not None:
                return
            bids = self._region.bids
            assert bids is not None, "started"
            guard = Authorisation(self._name, self._clock, self._meter, self._audit, roots_of=self.roots_of)
            server = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
            service = PeerService(
                self._name, bids, self._blobs, self.signer, self.membership.roots_of, self._clock,
                self._region.workloads.fetches,
            )  # fmt: skip
            federation_pb2_grpc.add_PeerServicer_to_server(service, server)
            credentials = self._identity.credentials(client_certificates=True, others=self._others)
            self._listens = listen(server, self._listens, credentials)
            await server.start()
            self._server = server
            log.info("peers may call", at=str(self._listens))

    def _others(self) -> str:
        """CAs of whoever may shake hands."""
        joined = self.membership.joined
        if joined is None:
            return ""
        members = (root for member in joined.directory.members for root in member.roots)
        return "".join(dict.fromkeys((*joined.roots, *members)))

    def _own(self) -> Member:
        address = str(Address(self._advertise, self._listens.port))
        residency = self._region.workloads.catalog.facts(self._name).residency
        return Member(self._name, address, self._authority.roots, residency)
