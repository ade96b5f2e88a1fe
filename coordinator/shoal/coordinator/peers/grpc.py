"""ports.Peers over gRPC: other regions' coordinators, called directly."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import grpc

from shoal.coordinator.peers.channels import Channels, answered, failed
from shoal.coordinator.ports import Clock, Heard
from shoal.types.agreement import Award, Grant, Notice, Release, Renewal, Renewed
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.offer import Answer, Decline, Directory, Member, Offer, Solicitation, member_of, roots_of
from shoal.types.units import Seconds
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import cancelled, said
from shoal.wire.identity import dns_of

Noun = TypeVar("Noun")

CALL_S: Final = 3.0
FETCH_S: Final = 600.0
COORDINATOR: Final = "coordinator"


class GrpcPeers:
    """directory: as the federation last told; a region that it does not list is REGION_UNKNOWN. signer: this region's,
    with its newest certificate."""

    def __init__(
        self,
        channels: Channels,
        signer: Callable[[], said.Signer],
        directory: Callable[[], Directory | None],
        clock: Clock,
    ) -> None:
        self._channels = channels
        self._signer = signer
        self._directory = directory
        self._clock = clock

    async def bid(self, region: str, solicitation: Solicitation) -> Heard[Answer]:
        asked = self._signer().say(solicitation, said.ANYONE)
        reply = await self._call(region, "Bid", asked, solicitation.answer_s)
        return answer_of(reply, region, solicitation, self.roots_of, self._clock)

    async def award(self, region: str, award: Award) -> Heard[Grant]:
        return self._heard(await self._say(region, "Award", award), region, Grant)

    async def release(self, region: str, release: Release) -> None:
        await self._say(region, "Release", release)

    async def renew(self, region: str, renewal: Renewal) -> Heard[Renewed]:
        return self._heard(await self._say(region, "Renew", renewal), region, Renewed)

    async def notify(self, region: str, notice: Notice) -> None:
        await self._say(region, "Notify", notice)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        request = federation_pb2.PeerFetch(agreement=agreement, digest=digest, offset=offset)
        try:
            with cancelled.as_refusal():
                async for chunk in self._stub(region).Fetch(request, timeout=FETCH_S):
                    yield chunk.data
        except (grpc.RpcError, ShoalError) as cause:
            raise failed(cause, Code.PEER_UNREACHABLE, region) from cause

    async def measure(self, region: str) -> Seconds:
        """On a connection that stands: a call before it opens one."""
        await self._measured(region)
        return await self._measured(region)

    def roots_of(self, region: str) -> tuple[str, ...]:
        return roots_of(self._directory(), region)

    async def _measured(self, region: str) -> Seconds:
        began = self._clock.now()
        await self._call(region, "Measure", federation_pb2.MeasureRequest(), CALL_S)
        return Seconds(self._clock.now() - began)

    async def _say(self, region: str, method: str, noun: object) -> Any:
        return await self._call(region, method, self._signer().say(noun, region), CALL_S)

    async def _call(self, region: str, method: str, message: Any, timeout_s: float) -> Any:
        call = getattr(self._stub(region), method)(message, timeout=timeout_s)
        return await answered(call, Code.PEER_UNREACHABLE, region)

    def _stub(self, region: str) -> Any:
        return stub_of(self._channels, self._member(region))

    def _member(self, region: str) -> Member:
        member = member_of(self._directory(), region)
        if member is not None:
            return member
        raise refuse(
            Code.REGION_UNKNOWN, f"region {region!r:.80}", "a member of the federation", "see shoal federation regions"
        )

    def _heard(self, reply: federation_pb2.Said, region: str, kind: type[Noun]) -> Heard[Noun]:
        _check_by(reply, region)
        to, wall = self._signer().region, self._clock.wall()
        what = said.hear(reply, kind, to=to, roots_of=self.roots_of, wall=wall)
        return Heard(region, what, reply.SerializeToString())


def stub_of(channels: Channels, member: Member) -> Any:
    server = dns_of(member.region, Role.COORDINATOR, COORDINATOR)
    return federation_pb2_grpc.PeerStub(channels.to(member.address, member.roots, server))


def answer_of(
    reply: federation_pb2.Said, region: str, solicitation: Solicitation, roots_of: said.RootsOf, clock: Clock
) -> Heard[Answer]:
    """What `region` answered, verified; an answer to something else, or in another's name, is none.

    Raises ShoalError(REGION_MISMATCH | REPLAYED), and as `said.hear` does."""
    _check_by(reply, region)
    to, wall = solicitation.origin, clock.wall()
    what = said.hear_either(reply, Offer, Decline, to=to, roots_of=roots_of, wall=wall)
    if what.region != region:
        raise said.mismatch(f"a bid in the name of {what.region!r:.80}", region)
    if (what.solicitation, what.round) != (solicitation.id, solicitation.round):
        raise refuse(Code.REPLAYED, f"an answer to {what.solicitation!r:.80}", f"one to {solicitation.id}", "")
    return Heard(region, what, reply.SerializeToString())


def _check_by(reply: federation_pb2.Said, region: str) -> None:
    if reply.by != region:
        raise said.mismatch(f"an answer by {reply.by!r:.80}", region)
