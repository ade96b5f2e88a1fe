"""Signed messages of other regions, as they become events: of the right region, and with nothing that no region means.

Every message between regions passes here, in requests (`server`) and in answers (`grpc`, `federation`).
"""

from typing import Final, TypeVar

from shoal.coordinator.core.negotiation.message_rules import message_refusal
from shoal.coordinator.ports import VerifiedMessage
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.offer import Answer, Decline, Offer, Solicitation
from shoal.types.units import Wall
from shoal.v1 import federation_pb2
from shoal.wire import signed_envelope

Noun = TypeVar("Noun")

ANSWER_BYTES: Final = 64 * 1024
"""Largest answer of another region, as of what it sends by itself: it is kept as evidence, and decides what is kept."""


def verify_message(
    said: federation_pb2.Said, kind: type[Noun], *, to: str, roots_of: signed_envelope.RootsOf, wall: Wall
) -> VerifiedMessage[Noun]:
    """Raises ShoalError(MESSAGE_INVALID), and as `signed_envelope.verify_envelope` does."""
    return _verified(said, signed_envelope.verify_envelope(said, kind, to=to, roots_of=roots_of, wall=wall))


def verify_answer(
    reply: federation_pb2.Said, region: str, solicitation: Solicitation, roots_of: signed_envelope.RootsOf, wall: Wall
) -> VerifiedMessage[Answer]:
    """Verifies the answer of `region`. Refuses an answer to something else, or in another region's name.

    Raises ShoalError(REGION_MISMATCH | REPLAYED | TOO_LARGE), and as `verify_message` does.
    """
    check_reply(reply, region)
    what = signed_envelope.verify_either(reply, Offer, Decline, to=solicitation.origin, roots_of=roots_of, wall=wall)
    if what.region != region:
        raise signed_envelope.region_mismatch(f"a bid in the name of {what.region!r:.80}", region)
    if (what.solicitation, what.round) != (solicitation.id, solicitation.round):
        raise refuse(Code.REPLAYED, f"an answer to {what.solicitation!r:.80}", f"one to {solicitation.id}", "")
    return _verified(reply, what)


def check_reply(reply: federation_pb2.Said, region: str) -> None:
    """Raises ShoalError(REGION_MISMATCH | TOO_LARGE)."""
    if (size := reply.ByteSize()) > ANSWER_BYTES:
        raise refuse(Code.TOO_LARGE, f"an answer of {size} bytes", f"at most {ANSWER_BYTES}", "update that region")
    if reply.by != region:
        raise signed_envelope.region_mismatch(f"an answer by {reply.by!r:.80}", region)


def _verified(said: federation_pb2.Said, what: Noun) -> VerifiedMessage[Noun]:
    if (refusal := message_refusal(what)) is not None:
        raise ShoalError(refusal)
    return VerifiedMessage(said.by, what, said.SerializeToString())
