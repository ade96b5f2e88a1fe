"""The one service without a client certificate: a join token, or a certificate that is held, for a new certificate."""

from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import structlog

from shoal.coordinator.controllers.enrolment import Enrolment
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.controllers.renewal import Renewal
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.identity import peer_ip
from shoal.wire.status import abort

T = TypeVar("T")

log: Final = structlog.get_logger("shoal.coordinator.enrol")


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """address: where the link and the API listen, enrol_address: where this does, as joiners shall dial them.

    mqtt_address: of the region's broker; empty without one.
    """

    def __init__(
        self,
        region: str,
        enrolment: Enrolment,
        renewal: Renewal,
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
        redeemed = await answer("redemption", asked, peer, context)
        log.info("enrolled", role=redeemed.role, name=redeemed.name, peer=peer)
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
        renewed = await answer("renewal", asked, peer, context)
        log.info("renewed", identity=renewed.identity.uri, peer=peer)
        return enrolment_pb2.RenewCertificateReply(
            certificate_pem=renewed.certificate_pem.decode(),
            ca_pem=renewed.ca_pem.decode(),
            link_address=self._address(),
            api_address=self._address(),
        )


class ElsewhereEnrolment(enrolment_pb2_grpc.EnrolmentServicer):
    """Of a coordinator that does not lead. elsewhere: the refusal that says who does."""

    def __init__(self, elsewhere: Callable[[str], Refusal | None]) -> None:
        self._elsewhere = elsewhere

    async def Redeem(self, request: enrolment_pb2.RedeemRequest, context: Any) -> enrolment_pb2.RedeemReply:
        return await self._refuse("Redeem", context)

    async def Challenge(self, request: enrolment_pb2.ChallengeRequest, context: Any) -> enrolment_pb2.ChallengeReply:
        return await self._refuse("Challenge", context)

    async def Renew(
        self, request: enrolment_pb2.RenewCertificateRequest, context: Any
    ) -> enrolment_pb2.RenewCertificateReply:
        return await self._refuse("Renew", context)

    async def _refuse(self, method: str, context: Any) -> NoReturn:
        refusal = self._elsewhere(method)
        assert refusal is not None, "no method of enrolment is a follower's"
        await abort(context, refusal)


async def answer(what: str, asked: Coroutine[Any, Any, T], peer: str, context: Any) -> T:
    """What a stranger gets: the answer, or a coded refusal and a line in the log."""
    try:
        return await finish(asked)
    except ShoalError as error:
        log.warning(f"{what} refused", peer=peer, code=error.code)
        await abort(context, error.refusal)
    except Exception as error:
        log.exception(f"{what} failed", peer=peer, exc_info=error)
        await abort(context, Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log"))
