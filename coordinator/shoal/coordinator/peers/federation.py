"""The federation over gRPC: ports.FederationLink and ports.FederationDoor for a region, ports.Candidates for the
federation."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.core.federation.trusted_roots import check_roots
from shoal.coordinator.peers.channels import Channels, await_answer, has_unknown_issuer
from shoal.coordinator.peers.grpc import CALL_S, stub_of
from shoal.coordinator.peers.messages import verify_answer
from shoal.coordinator.ports import AdvertiseAnswer, Clock, JoinedFederation, Meter, VerifiedMessage
from shoal.types.agreement import ReportContent
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.offer import Advertisement, Answer, Directory, FederationRoots, Member, Solicitation, roots_of
from shoal.types.token import JoinToken, parse_join_token
from shoal.types.units import Seconds, Wall
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import nouns, signed_envelope
from shoal.wire.enrol import open_pinned_channel
from shoal.wire.identity import dns_of
from shoal.wire.request_limits import ENVELOPE_CONTENT
from shoal.wire.trust import check_authorities

FEDERATION: Final = "federation"
"""Name in the federation's certificate, whichever machine it runs on."""
JOIN_S: Final = 15.0
ANSWER_ALLOWANCE_S: Final = 0.5
"""Seconds to the federation and back, in addition to its candidates' time."""

log: Final = structlog.get_logger("shoal.coordinator.peers")


class GrpcFederation:
    """current_federation: the federation that this region has joined; None without one."""

    def __init__(
        self,
        channels: Channels,
        signer: Callable[[], signed_envelope.RegionSigner],
        current_federation: Callable[[], JoinedFederation | None],
        clock: Clock,
        meter: Meter,
    ) -> None:
        self._channels = channels
        self._signer = signer
        self._current_federation = current_federation
        self._clock = clock
        self._meter = meter
        self._last_address = ""

    async def advertise(self, advertisement: Advertisement) -> AdvertiseAnswer:
        reply = await self._send_signed("Advertise", advertisement, CALL_S)
        directory = nouns.from_wire(Directory, reply.directory) if reply.HasField("directory") else None
        roots = nouns.from_wire(FederationRoots, reply.roots) if reply.HasField("roots") else None
        return AdvertiseAnswer(directory, roots)

    async def solicit(self, solicitation: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        asked = self._signer().sign(solicitation, signed_envelope.ANYONE)
        reply = await self._call("Solicit", asked, solicitation.answer_s + ANSWER_ALLOWANCE_S)
        found = list[VerifiedMessage[Answer]]()
        for each in reply.answers:
            try:
                found.append(verify_answer(each, each.by, solicitation, self._roots_of, self._clock.wall()))
            except ShoalError as error:
                self._meter.count(metrics.ANSWERS_REFUSED, code=error.code)
                log.warning("peer_answer_dropped", region=each.by[:80], code=error.code, error=str(error))
        return tuple({each.signer: each for each in found}.values())

    async def report(self, content: ReportContent) -> int:
        reply = await self._send_signed("Report", content, CALL_S)
        return int(reply.next_sequence)

    async def update(self, member: Member) -> Directory:
        reply = await self._send_signed("Update", member, CALL_S)
        return nouns.from_wire(Directory, reply.directory)

    async def leave(self) -> None:
        await self._call("Leave", federation_pb2.LeaveRequest(), CALL_S)

    async def join(self, address: str, token: str, member: Member) -> JoinedFederation:
        claim = parse_join_token(token)
        proof = self._signer().sign_bytes(signed_envelope.JOIN, claim.text.encode(), claim.region)
        request = federation_pb2.JoinRequest(
            token=claim.text,
            region=member.region,
            address=member.address,
            roots=member.roots,
            residency=member.residency,
            proof=proof,
        )
        reply = await asyncio.to_thread(_join_any, address.split(","), claim, request)
        roots, directory = tuple(reply.roots), nouns.from_wire(Directory, reply.directory)
        if (refusal := check_roots(FederationRoots(roots, Wall(reply.roots_since)), self._clock.wall())) is not None:
            raise ShoalError(refusal)
        check_authorities(roots, claim.region)
        return JoinedFederation(claim.region, reply.address, roots, directory, Wall(reply.roots_since))

    def _roots_of(self, region: str) -> tuple[str, ...]:
        return roots_of(self._require_federation().directory, region)

    async def _send_signed(self, method: str, noun: object, timeout_s: float) -> Any:
        return await self._call(method, self._signer().sign(noun, self._require_federation().federation), timeout_s)

    async def _call(self, method: str, message: Any, timeout_s: float) -> Any:
        """Calls the replica that answered last, else the next one. Calls are idempotent, so a repeated one gets the
        same answer."""
        joined = self._require_federation()
        server = dns_of(joined.federation, Role.FEDERATION, FEDERATION)
        replicas = joined.address.split(",")
        if self._last_address in replicas:
            replicas.remove(self._last_address)
            replicas.insert(0, self._last_address)
        while True:
            address = replicas.pop(0)
            stub = federation_pb2_grpc.FederationStub(self._channels.to(address, joined.roots, server, address))
            call = getattr(stub, method)(message, timeout=timeout_s)
            try:
                reply = await await_answer(call, Code.FEDERATION_UNREACHABLE, joined.federation)
            except ShoalError as error:
                if error.code is not Code.FEDERATION_UNREACHABLE:
                    raise
                if not replicas:
                    if has_unknown_issuer(error.refusal):
                        raise _untrusted(joined, address) from error
                    raise
            else:
                self._last_address = address
                return reply

    def _require_federation(self) -> JoinedFederation:
        joined = self._current_federation()
        if joined is None:
            raise refuse(Code.FEDERATION_UNREACHABLE, "this region is in no federation", "one", "shoal federation join")
        return joined


class GrpcCandidates:
    """ports.Candidates. roots_of: the CAs of each member."""

    def __init__(self, channels: Channels, roots_of: signed_envelope.RootsOf, clock: Clock) -> None:
        self._channels = channels
        self._roots_of = roots_of
        self._clock = clock

    async def ask(self, member: Member, request: bytes, timeout_s: Seconds) -> VerifiedMessage[Answer]:
        message = federation_pb2.Said.FromString(request)
        call = stub_of(self._channels, member).Bid(message, timeout=timeout_s)
        reply = await await_answer(call, Code.PEER_UNREACHABLE, member.region)
        solicitation = nouns.decode(Solicitation, message.content, ENVELOPE_CONTENT)
        return verify_answer(reply, member.region, solicitation, self._roots_of, self._clock.wall())


def _untrusted(joined: JoinedFederation, address: str) -> ShoalError:
    return refuse(
        Code.CERT_UNTRUSTED,
        f"{joined.federation} at {address} shows a certificate of a CA that this region does not know",
        "one of a CA that it was told of",
        "look who answers there; if its CA was rotated twice while this region was away: shoal federation leave "
        "--forget, then join with a new token",
    )


def _join_any(
    addresses: Sequence[str], claim: JoinToken, request: federation_pb2.JoinRequest
) -> federation_pb2.JoinReply:
    """Joins at the first replica that answers. Redeeming the same token again returns the same reply."""
    *others, last = addresses
    for address in others:
        try:
            return _join(address, claim, request)
        except ShoalError as error:
            if error.code is not Code.FEDERATION_UNREACHABLE:
                raise
    return _join(last, claim, request)


def _join(address: str, claim: JoinToken, request: federation_pb2.JoinRequest) -> federation_pb2.JoinReply:
    """Blocking."""
    server = dns_of(claim.region, Role.FEDERATION, FEDERATION)
    try:
        with open_pinned_channel(address, claim, server) as channel:
            reply: federation_pb2.JoinReply = federation_pb2_grpc.JoiningStub(channel).Join(request, timeout=JOIN_S)
            return reply
    except ShoalError as error:
        if error.code is not Code.COORDINATOR_UNREACHABLE:
            raise
        found = error.refusal.found
        raise refuse(Code.FEDERATION_UNREACHABLE, found, "a federation's port", "check the address") from error
