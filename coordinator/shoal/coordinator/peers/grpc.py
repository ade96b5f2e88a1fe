"""ports.Peers over gRPC: direct calls to other regions' coordinators."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import grpc

from shoal.coordinator.peers.channels import Channels, await_answer, call_error
from shoal.coordinator.peers.messages import check_reply, verify_answer, verify_message
from shoal.coordinator.ports import Clock, VerifiedMessage
from shoal.types.agreement import Award, Grant, Notice, Release, Renewal, Renewed
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.offer import Answer, Directory, Member, Solicitation, member_of, roots_of
from shoal.types.units import Seconds
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import grpc_cancellation, signed_envelope
from shoal.wire.identity import dns_of

Noun = TypeVar("Noun")

CALL_S: Final = 3.0
FETCH_S: Final = 600.0
COORDINATOR: Final = "coordinator"


class GrpcPeers:
    """directory: the federation's latest; a region that it does not list is REGION_UNKNOWN. signer: this region's, with
    its newest certificate."""

    def __init__(
        self,
        channels: Channels,
        signer: Callable[[], signed_envelope.RegionSigner],
        directory: Callable[[], Directory | None],
        clock: Clock,
    ) -> None:
        self._channels = channels
        self._signer = signer
        self._directory = directory
        self._clock = clock

    async def request_bid(self, region: str, solicitation: Solicitation) -> VerifiedMessage[Answer]:
        asked = self._signer().sign(solicitation, signed_envelope.ANYONE)
        reply = await self._call(region, "Bid", asked, solicitation.answer_s)
        return verify_answer(reply, region, solicitation, self.roots_of, self._clock.wall())

    async def award(self, region: str, award: Award) -> VerifiedMessage[Grant]:
        return self._verify(await self._send_signed(region, "Award", award), region, Grant)

    async def release(self, region: str, release: Release) -> None:
        await self._send_signed(region, "Release", release)

    async def renew(self, region: str, renewal: Renewal) -> VerifiedMessage[Renewed]:
        return self._verify(await self._send_signed(region, "Renew", renewal), region, Renewed)

    async def notify(self, region: str, notice: Notice) -> None:
        await self._send_signed(region, "Notify", notice)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        request = federation_pb2.PeerFetch(agreement=agreement, digest=digest, offset=offset)
        try:
            with grpc_cancellation.as_refusal():
                async for chunk in self._stub(region).Fetch(request, timeout=FETCH_S):
                    yield chunk.data
        except (grpc.RpcError, ShoalError) as cause:
            raise call_error(cause, Code.PEER_UNREACHABLE, region) from cause

    async def measure(self, region: str) -> Seconds:
        """RTT on an open connection; a call before the measurement opens it."""
        await self._measure_once(region)
        return await self._measure_once(region)

    def roots_of(self, region: str) -> tuple[str, ...]:
        return roots_of(self._directory(), region)

    async def _measure_once(self, region: str) -> Seconds:
        began = self._clock.now()
        await self._call(region, "Measure", federation_pb2.MeasureRequest(), CALL_S)
        return Seconds(self._clock.now() - began)

    async def _send_signed(self, region: str, method: str, noun: object) -> Any:
        return await self._call(region, method, self._signer().sign(noun, region), CALL_S)

    async def _call(self, region: str, method: str, message: Any, timeout_s: float) -> Any:
        call = getattr(self._stub(region), method)(message, timeout=timeout_s)
        return await await_answer(call, Code.PEER_UNREACHABLE, region)

    def _stub(self, region: str) -> Any:
        return stub_of(self._channels, self._member(region))

    def _member(self, region: str) -> Member:
        member = member_of(self._directory(), region)
        if member is not None:
            return member
        raise refuse(
            Code.REGION_UNKNOWN, f"region {region!r:.80}", "a member of the federation", "see shoal federation regions"
        )

    def _verify(self, reply: federation_pb2.Said, region: str, kind: type[Noun]) -> VerifiedMessage[Noun]:
        check_reply(reply, region)
        to, wall = self._signer().region, self._clock.wall()
        return verify_message(reply, kind, to=to, roots_of=self.roots_of, wall=wall)


def stub_of(channels: Channels, member: Member) -> Any:
    server = dns_of(member.region, Role.COORDINATOR, COORDINATOR)
    return federation_pb2_grpc.PeerStub(channels.to(member.address, member.roots, server))
