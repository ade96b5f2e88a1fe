"""Service Peer: what other regions ask of this one, and the federation on their behalf.

The port's guard has judged the caller's certificate. Here a region may speak for itself alone; the federation carries
what the origin signed.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from shoal.coordinator.controllers.fetches import Fetches
from shoal.coordinator.ports import Blobs, Clock, Heard, PeerEvents
from shoal.types.agreement import Award, Notice, Release, Renewal
from shoal.types.device import Role
from shoal.types.offer import Solicitation
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import said
from shoal.wire.identity import identity_of_context
from shoal.wire.limits import CHUNK_BYTES

Noun = TypeVar("Noun")


class PeerService(federation_pb2_grpc.PeerServicer):
    """region: this one. roots_of: of the federation's other members."""

    def __init__(
        self,
        region: str,
        events: PeerEvents,
        blobs: Blobs,
        signer: Callable[[], said.Signer],
        roots_of: said.RootsOf,
        clock: Clock,
        fetches: Fetches,
    ) -> None:
        self._region = region
        self._events = events
        self._blobs = blobs
        self._signer = signer
        self._roots_of = roots_of
        self._clock = clock
        self._fetches = fetches

    async def Bid(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        asked = self._hear(request, Solicitation, context, to=said.ANYONE)
        _check_own(asked.what.origin, asked.by)
        return self._signer().say(await self._events.bid(asked), asked.by)

    async def Award(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        award = self._hear(request, Award, context)
        _check_own(award.what.origin, award.by)
        return self._signer().say(await self._events.awarded(award), award.by)

    async def Release(self, request: federation_pb2.Said, context: Any) -> federation_pb2.ReleaseReply:
        release = self._hear(request, Release, context)
        _check_own(release.what.origin, release.by)
        await self._events.released(release)
        return federation_pb2.ReleaseReply()

    async def Renew(self, request: federation_pb2.Said, context: Any) -> federation_pb2.Said:
        renewal = self._hear(request, Renewal, context)
        return self._signer().say(await self._events.renewed(renewal), renewal.by)

    async def Notify(self, request: federation_pb2.Said, context: Any) -> federation_pb2.NoticeReply:
        notice = self._hear(request, Notice, context)
        _check_own(notice.what.by, notice.by)
        await self._events.noticed(notice)
        return federation_pb2.NoticeReply()

    async def Fetch(self, request: federation_pb2.PeerFetch, context: Any) -> AsyncIterator[federation_pb2.PeerChunk]:
        region = identity_of_context(context).region
        await self._events.lend(region, request.agreement[:80], request.digest[:80])
        chunks = self._blobs.read(request.digest, max(0, request.offset))
        async for data in self._fetches.counted(request.agreement, request.digest, chunks):
            for start in range(0, len(data), CHUNK_BYTES):
                yield federation_pb2.PeerChunk(data=data[start : start + CHUNK_BYTES])

    async def Measure(self, request: federation_pb2.MeasureRequest, context: Any) -> federation_pb2.MeasureReply:
        return federation_pb2.MeasureReply()

    def _hear(self, request: federation_pb2.Said, kind: type[Noun], context: Any, *, to: str = "") -> Heard[Noun]:
        caller = identity_of_context(context)
        if caller.role is not Role.FEDERATION and caller.region != request.by:
            raise said.mismatch(f"{caller.region} with what {request.by!r:.80} says", caller.region)
        wall = self._clock.wall()
        what = said.hear(request, kind, to=to or self._region, roots_of=self._roots_of, wall=wall)
        return Heard(request.by, what, request.SerializeToString())


def _check_own(named: str, by: str) -> None:
    if named != by:
        raise said.mismatch(f"{by} in the name of {named!r:.80}", by)
