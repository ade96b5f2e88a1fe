"""The federation's services: requests of members, and the service that admits new members."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import structlog

from shoal.coordinator.api.enrol import answer_or_abort
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.identity.enrolment import REGION, Enrolment
from shoal.coordinator.core.federation.rules import SOLICITATION_BYTES, check_member
from shoal.coordinator.ports import Clock, RotatingAuthority, VerifiedMessage
from shoal.types.agreement import ReportContent
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import check_name
from shoal.types.offer import Advertisement, Directory, FederationRoots, Member, Solicitation
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import nouns, signed_envelope
from shoal.wire.certificates import identity_of_context
from shoal.wire.identity import peer_ip
from shoal.wire.trust import check_authorities

Noun = TypeVar("Noun")

ADVERTISEMENT_BYTES: Final = 64 * 2**10

log: Final = structlog.get_logger("shoal.coordinator.federation")


class FederationService(federation_pb2_grpc.FederationServicer):
    """name: the federation's; authority: its CAs. The port's guard has checked the caller's certificate against its
    region's CAs."""

    def __init__(self, name: str, controller: FederationController, clock: Clock, authority: RotatingAuthority) -> None:
        self._name = name
        self._controller = controller
        self._clock = clock
        self._authority = authority

    async def Advertise(self, request: federation_pb2.Said, context: Any) -> federation_pb2.AdvertiseReply:
        if len(request.content) > ADVERTISEMENT_BYTES:
            raise _invalid(f"{len(request.content)} bytes, at most {ADVERTISEMENT_BYTES}")
        try:
            heard = self._verify(request, Advertisement, context)
        except ShoalError as error:
            if error.code in (Code.MESSAGE_INVALID, Code.FIELD_TOO_MANY):
                raise _invalid(error.refusal.found) from error
            raise
        directory = await self._controller.advertise(heard)
        return federation_pb2.AdvertiseReply(
            directory=_to_wire(directory),
            lease_s=heard.content.lease_s,
            roots=_to_wire(self._roots_for(heard.content.trusted_roots)),
        )

    async def Solicit(self, request: federation_pb2.Said, context: Any) -> federation_pb2.SolicitReply:
        if len(request.content) > SOLICITATION_BYTES:
            found, most = f"{len(request.content)} bytes", f"at most {SOLICITATION_BYTES}"
            raise refuse(Code.TOO_LARGE, found, most, "ask for fewer models in one policy")
        heard = self._verify(request, Solicitation, context, to=signed_envelope.ANYONE)
        answers = await self._controller.solicit(heard)
        return federation_pb2.SolicitReply(answers=[federation_pb2.Said.FromString(each.evidence) for each in answers])

    async def Report(self, request: federation_pb2.Said, context: Any) -> federation_pb2.ReportReply:
        heard = self._verify(request, ReportContent, context)
        return federation_pb2.ReportReply(next_sequence=await self._controller.report(heard))

    async def Update(self, request: federation_pb2.Said, context: Any) -> federation_pb2.UpdateReply:
        heard = self._verify(request, Member, context)
        _check_member(heard.content, heard.signer)
        return federation_pb2.UpdateReply(directory=_to_wire(await self._controller.update(heard)))

    async def Leave(self, request: federation_pb2.LeaveRequest, context: Any) -> federation_pb2.LeaveReply:
        await self._controller.remove(identity_of_context(context).region)
        return federation_pb2.LeaveReply()

    def _roots_for(self, trusted: tuple[str, ...]) -> FederationRoots | None:
        """The federation's CAs, unless the region trusts these and no others. A region that tells of none could not
        adopt them."""
        authority = self._authority
        if not trusted or {*trusted} == {*authority.fingerprints}:
            return None
        return FederationRoots(authority.roots, authority.since)

    def _verify(
        self, request: federation_pb2.Said, kind: type[Noun], context: Any, *, to: str = ""
    ) -> VerifiedMessage[Noun]:
        caller = identity_of_context(context)
        if caller.region != request.by:
            raise signed_envelope.region_mismatch(f"{caller.region} with what {request.by!r:.80} says", caller.region)
        roots_of, wall = self._controller.roots_of, self._clock.wall()
        what = signed_envelope.verify_envelope(request, kind, to=to or self._name, roots_of=roots_of, wall=wall)
        return VerifiedMessage(request.by, what, request.SerializeToString())


class JoiningService(federation_pb2_grpc.JoiningServicer):
    """address: where members call. authority: the federation's CAs."""

    def __init__(
        self,
        name: str,
        controller: FederationController,
        enrolment: Enrolment,
        clock: Clock,
        address: Callable[[], str],
        authority: RotatingAuthority,
    ) -> None:
        self._name = name
        self._controller = controller
        self._enrolment = enrolment
        self._clock = clock
        self._address = address
        self._authority = authority

    async def Join(self, request: federation_pb2.JoinRequest, context: Any) -> federation_pb2.JoinReply:
        peer = peer_ip(context.peer())
        directory = await answer_or_abort("Join", self._join(request, peer), peer, context)
        log.info("region_joined", region=request.region, address=request.address, peer=peer)
        return federation_pb2.JoinReply(
            federation=self._name,
            address=self._address(),
            roots=self._authority.roots,
            directory=nouns.to_wire(directory),
            roots_since=self._authority.since,
        )

    async def _join(self, request: federation_pb2.JoinRequest, peer: str) -> Directory:
        roots = tuple(request.roots)
        member = Member(check_name(request.region, "region"), request.address, roots, request.residency)
        _check_member(member, member.region)
        proof, wall = request.proof, self._clock.wall()
        signed_envelope.check(proof, signed_envelope.JOIN, to=self._name, roots_of=lambda region: roots, wall=wall)
        if (proof.by, proof.content) != (member.region, request.token.encode()):
            raise signed_envelope.region_mismatch(f"a proof by {proof.by!r:.80}, or over another token", member.region)
        try:
            return await self._enrolment.spend(
                request.token,
                REGION,
                member.region,
                lambda used: self._controller.admit(member, extra=used),
                peer=peer,
            )
        except ShoalError as error:
            # The first reply may have been lost, so the holder of the same CA may redeem the token again.
            if error.code is not Code.TOKEN_USED or self._controller.roots_of(member.region) != roots:
                raise
            return self._controller.directory_for(member.region)


def _check_member(member: Member, region: str) -> None:
    """region: who says this about itself. Raises ShoalError(FIELD_INVALID)."""
    if (refusal := check_member(member)) is not None:
        raise ShoalError(refusal)
    check_authorities(member.roots, region)


def _to_wire(noun: Directory | FederationRoots | None) -> Any:
    return None if noun is None else nouns.to_wire(noun)


def _invalid(found: str) -> ShoalError:
    return refuse(Code.ADVERT_INVALID, found, "what a region can have", "the last good one counts until it is old")
