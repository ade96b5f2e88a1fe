"""Service Peer: requests from other regions, and from the federation on their behalf.

The port's guard has checked the caller's certificate. Here a region may speak only for itself; the federation forwards
messages that the origin signed.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from shoal.coordinator.peers.messages import verify_message
from shoal.coordinator.ports import Blobs, Clock, FetchCounter, PeerEvents, VerifiedMessage
from shoal.types.agreement import Award, Notice, Release, Renewal
from shoal.types.device import Role
from shoal.types.offer import Solicitation
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import signed_envelope
from shoal.wire.certificates import identity_of_context
from shoal.wire.limits import CHUNK_BYTES

Noun = TypeVar("Noun")


class PeerService(federation_pb2_grpc.PeerServicer):
    """region: this one. roots_of: CAs of the federation's other members."""

    def __init__(
        self,
        region: str,
        events: PeerEvents,
        blobs: Blobs,
        signer: Callable[[], signed_envelope.RegionSigner],
        roots_of: signed_envelope.RootsOf,
        clock: Clock,
        fetches: FetchCounter,
    ) -> None:
        self._region = region
        self._events = events
        self._blobs = blobs
        self._signer = signer
        self._roots_of = roots_of
        self._clock = clock
        self._fetches = fetches

    async def Bid(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        asked = self._verify(request, Solicitation, context, to=signed_envelope.ANYONE)
        _check_signer(asked.content.origin, asked.signer)
        return self._signer().sign(await self._events.on_solicitation(asked), asked.signer)

    async def Award(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        award = self._verify(request, Award, context)
        _check_signer(award.content.origin, award.signer)
        return self._signer().sign(await self._events.on_award(award), award.signer)

    async def Release(self, request: federation_pb2.Said, context: Any) -> federation_pb2.ReleaseReply:
        release = self._verify(request, Release, context)
        _check_signer(release.content.origin, release.signer)
        await self._events.on_release(release)
        return federation_pb2.ReleaseReply()

    async def Renew(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        renewal = self._verify(request, Renewal, context)
        return self._signer().sign(await self._events.on_renewal(renewal), renewal.signer)

    async def Notify(self, request: federation_pb2.Said, context: Any) -> federation_pb2.NoticeReply:
        notice = self._verify(request, Notice, context)
        _check_signer(notice.content.by, notice.signer)
        await self._events.on_notice(notice)
        return federation_pb2.NoticeReply()

    async def Fetch(self, request: federation_pb2.PeerFetch, context: Any) -> AsyncIterator[federation_pb2.PeerChunk]:
        region = identity_of_context(context).region
        await self._events.authorise_fetch(region, request.agreement[:80], request.digest[:80])
        chunks = self._blobs.read(request.digest, max(0, request.offset))
        async for data in self._fetches.track(request.agreement, request.digest, chunks):
            for start in range(0, len(data), CHUNK_BYTES):
                yield federation_pb2.PeerChunk(data=data[start : start + CHUNK_BYTES])

    async def Measure(self, request: federation_pb2.MeasureRequest, context: Any) -> federation_pb2.MeasureReply:
        return federation_pb2.MeasureReply()

    def _verify(
        self, request: federation_pb2.Said, kind: type[Noun], context: Any, *, to: str = ""
    ) -> VerifiedMessage[Noun]:
        caller = identity_of_context(context)
        if caller.role is not Role.FEDERATION and caller.region != request.by:
            raise signed_envelope.region_mismatch(f"{caller.region} with what {request.by!r:.80} says", caller.region)
        wall = self._clock.wall()
        return verify_message(request, kind, to=to or self._region, roots_of=self._roots_of, wall=wall)


def _check_signer(claimed: str, by: str) -> None:
    if claimed != by:
        raise signed_envelope.region_mismatch(f"{by} in the name of {claimed!r:.80}", by)
