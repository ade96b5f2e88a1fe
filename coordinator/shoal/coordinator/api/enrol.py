"""The one service without a client certificate: a join token for a certificate."""

import ipaddress
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import structlog

from shoal.coordinator.controllers.enrolment import Enrolment
from shoal.coordinator.controllers.finish import finish
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.v1 import enrolment_pb2, enrolment_pb2_grpc
from shoal.wire.status import abort

log: Final = structlog.get_logger("shoal.coordinator.enrol")


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """address: where the link and the API listen, as joiners shall dial it."""

    def __init__(self, region: str, enrolment: Enrolment, address: Callable[[], str]) -> None:
        self._region = region
        self._enrolment = enrolment
        self._address = address

    async def Redeem(self, request: enrolment_pb2.RedeemRequest, context: Any) -> enrolment_pb2.RedeemReply:
        peer = _peer_ip(context.peer())
        try:
            redeemed = await finish(
                self._enrolment.redeem(request.token, request.csr_pem.encode(), request.name, peer=peer)
            )
        except ShoalError as error:
            log.warning("redemption refused", peer=peer, code=error.code)
            await abort(context, error.refusal)
        except Exception as error:
            log.exception("redemption failed", peer=peer, exc_info=error)
            await abort(context, Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log"))
        log.info("enrolled", role=redeemed.role, name=redeemed.name, peer=peer)
        return enrolment_pb2.RedeemReply(
            certificate_pem=redeemed.certificate_pem.decode(),
            ca_pem=redeemed.ca_pem.decode(),
            region=self._region,
            role=redeemed.role,
            name=redeemed.name,
            link_address=self._address(),
            api_address=self._address(),
        )


def _peer_ip(peer: str) -> str:
    """`ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000` -> the address; empty where there is none."""
    _, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""
