"""The only service without client certificates: exchanges a join token, or a held certificate, for a new
certificate."""

from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import structlog

from shoal.coordinator.controllers.identity.enrolment import Enrolment
from shoal.coordinator.controllers.identity.renewal import CertificateRenewal
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.grpcio_status import abort
from shoal.wire.identity import peer_ip

T = TypeVar("T")

log: Final = structlog.get_logger("shoal.coordinator.enrol")


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """address: where joiners reach the link and the API. enrol_address: where they reach this service.

    mqtt_address: of the region's broker; empty without one.
    """

    def __init__(
        self,
        region: str,
        enrolment: Enrolment,
        renewal: CertificateRenewal,
        address: Callable[[], str],
        enrol_address: Callable[[], str],
        mqtt_address: str = "",
    ) -> None:
        self._region = region
        self._enrolment = enrolment
        self._renewal = renewal
        self._address = address
        self._enrol_address = enrol_address
        self._mqtt_address = mqtt_address

    async def Redeem(self, request: enrolment_pb2.RedeemRequest, context: Any) -> enrolment_pb2.RedeemReply:
        peer = peer_ip(context.peer())
        asked = self._enrolment.redeem(request.token, request.csr_pem.encode(), request.name, peer=peer)
        redeemed = await answer_or_abort("Redeem", asked, peer, context)
        log.info("member_enrolled", role=redeemed.role, name=redeemed.name, peer=peer)
        return enrolment_pb2.RedeemReply(
            certificate_pem=redeemed.certificate_pem.decode(),
            ca_pem=redeemed.ca_pem.decode(),
            region=self._region,
            role=redeemed.role,
            name=redeemed.name,
            link_address=self._address(),
            api_address=self._address(),
            enrol_address=self._enrol_address(),
            mqtt_address=self._mqtt_address,
        )

    async def Challenge(self, request: enrolment_pb2.ChallengeRequest, context: Any) -> enrolment_pb2.ChallengeReply:
        return enrolment_pb2.ChallengeReply(nonce=self._renewal.challenge())

    async def Renew(
        self, request: enrolment_pb2.RenewCertificateRequest, context: Any
    ) -> enrolment_pb2.RenewCertificateReply:
        peer = peer_ip(context.peer())
        asked = self._renewal.renew(
            request.certificate_pem.encode(), request.csr_pem.encode(), request.nonce, request.signature, peer=peer
        )
        renewed = await answer_or_abort("Renew", asked, peer, context)
        log.info("certificate_renewed", identity=renewed.identity.uri, peer=peer)
        return enrolment_pb2.RenewCertificateReply(
            certificate_pem=renewed.certificate_pem.decode(),
            ca_pem=renewed.ca_pem.decode(),
            link_address=self._address(),
            api_address=self._address(),
        )


class FollowerEnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """The service on a coordinator that does not lead. redirect: the refusal that names the leader."""

    def __init__(self, redirect: Callable[[str], Refusal | None]) -> None:
        self._redirect = redirect

    async def Redeem(self, request: enrolment_pb2.RedeemRequest, context: Any) -> enrolment_pb2.RedeemReply:
        return await self._refuse("Redeem", context)

    async def Challenge(self, request: enrolment_pb2.ChallengeRequest, context: Any) -> enrolment_pb2.ChallengeReply:
        return await self._refuse("Challenge", context)

    async def Renew(
        self, request: enrolment_pb2.RenewCertificateRequest, context: Any
    ) -> enrolment_pb2.RenewCertificateReply:
        return await self._refuse("Renew", context)

    async def _refuse(self, method: str, context: Any) -> NoReturn:
        refusal = self._redirect(method)
        assert refusal is not None, "no method of enrolment is a follower's"
        await abort(context, refusal)


async def answer_or_abort(method: str, work: Coroutine[Any, Any, T], peer: str, context: Any) -> T:
    """Gives an unauthenticated caller the answer, or a coded refusal that is also logged."""
    try:
        return await run_to_completion(work)
    except ShoalError as error:
        log.warning("call_refused", method=method, peer=peer, code=error.code)
        await abort(context, error.refusal)
    except Exception as error:
        log.exception("call_failed", method=method, peer=peer, exc_info=error)
        await abort(context, Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log"))
