"""A connection to the coordinator that leads a region, wherever that is.

Any of several coordinators will do to begin with: calls that only the leader can answer go to the leader, also after
another one was elected.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Final, TypeVar

import grpc

from shoal.client.contexts import Context
from shoal.client.pem_files import WHOLE_WITHIN_S, read_pem_files
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall, show_seconds
from shoal.v1 import artifacts_pb2_grpc, operator_pb2, operator_pb2_grpc
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.handshake import HANDSHAKE_S, check_own, check_peer
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options

ANSWER_TIMEOUT_S: Final = 2.0
"""Seconds for a coordinator to answer whether it leads."""
FOLLOWER_WAIT_S: Final = 0.2
"""Seconds to wait for the other coordinators once one has answered that it leads."""
ELECTION_TIMEOUT_S: Final = 10.0
RETRY_PAUSE_S: Final = 0.25
MAX_ATTEMPTS: Final = 10
"""Attempts of one call, since the leader may change between them."""
_NOT_SENT: Final = "failed to connect"
"""gRPC's own words for a call that never left this machine; it has no other sign of that."""

T = TypeVar("T")


class LeaderConnection:
    """One channel to one coordinator of a region, which moves to the leader when needed."""

    def __init__(self, context: Context, within_s: float = math.inf) -> None:
        """within_s: seconds from now for all calls together, with the search for who leads. Raises
        ShoalError(UNAUTHENTICATED) if the context's files cannot be read."""
        self._context = context
        self._end = time.monotonic() + within_s  # noqa: TID251 - a command's own deadline
        try:
            credentials = grpc.ssl_channel_credentials(*read_pem_files(context, self.left_s(WHOLE_WITHIN_S)))
        except OSError as cause:
            denied = isinstance(cause, PermissionError)
            raise refuse(
                Code.UNAUTHENTICATED,
                f"{cause.filename}: {cause.strerror}",
                "the context's files",
                f"{'run this as the user who owns it, or ' if denied else ''}shoal context login",
            ) from cause
        self._server = dns_of(context.region, Role.COORDINATOR, "coordinator")
        self._credentials = credentials
        self.addresses = tuple(context.address.split(","))
        """Of the region's coordinators, from the context and from themselves; the last leader comes first."""
        self._dial(self.addresses[0])
        if len(self.addresses) > 1:
            self._find_leader()

    def close(self) -> None:
        self._channel.close()

    def left_s(self, most_s: float) -> float:
        """The seconds that are left for a call that may take so many."""
        return max(0.0, min(most_s, self._end - time.monotonic()))  # noqa: TID251 - a command's own deadline

    def call_leader(self, call: Callable[[], T], *, is_repeatable: bool) -> T:
        """Run `call` at the leader, to which this connection switches.

        is_repeatable: it may run twice. Other calls are repeated only if they were certainly not carried out. Raises
        ShoalError.
        """
        rounds = MAX_ATTEMPTS
        while True:
            begun = time.monotonic()  # noqa: TID251 - a command's own clock
            try:
                return call()
            except (grpc.RpcError, ShoalError) as cause:
                waited_s = time.monotonic() - begun  # noqa: TID251
                error = (
                    cause
                    if isinstance(cause, ShoalError)
                    else self.error_of(cause, waited_s, is_repeatable=is_repeatable)
                )
                elsewhere = error.code is Code.NOT_LEADER
                if error.code is Code.COORDINATOR_UNREACHABLE and len(self.addresses) > 1:
                    elsewhere = is_repeatable or _NOT_SENT in error.refusal.found
                rounds -= 1
                if not (rounds and elsewhere and self.wait_for_leader()):
                    raise error from cause

    def wait_for_leader(self) -> bool:
        """Return whether one leads, as soon as one does: after a loss, another is elected within seconds."""
        end = time.monotonic() + self.left_s(ELECTION_TIMEOUT_S)  # noqa: TID251 - a command's own deadline
        refused = self.address
        while not self._find_leader():
            if time.monotonic() + RETRY_PAUSE_S > end:  # noqa: TID251
                return False
            time.sleep(RETRY_PAUSE_S)  # noqa: TID251
        if self.address == refused:  # just elected, or deposed without knowing it yet
            time.sleep(RETRY_PAUSE_S)  # noqa: TID251
        return True

    def error_of(self, cause: grpc.RpcError, waited_s: float, *, is_repeatable: bool = True) -> ShoalError:
        """The coordinator's refusal. If gRPC says only `unavailable`, a separate TLS handshake finds the reason.

        waited_s: since the call began. is_repeatable: as for `call_leader`.
        """
        refusal = refusal_of(cause)
        if refusal.code is Code.UNIMPLEMENTED and not refusal.remedy:
            return refuse(
                refusal.code,
                f"{self.address} does not have what was called",
                "the region's coordinator, of this version or newer",
                "check that the context's address is the coordinator's --link, no other port; or shoal upgrade",
            )
        if refusal.code is Code.DEADLINE_EXCEEDED and not refusal.asked:  # gRPC's own: no coordinator said it
            remedy = (
                "try again; `shoal doctor` says how the region is"
                if is_repeatable
                else "look before you try again: it may have been carried out"
            )
            found = f"{self.address} has not answered within {show_seconds(waited_s)}"
            return refuse(refusal.code, found, "an answer of the region's coordinator", remedy)
        if refusal.code is not Code.COORDINATOR_UNREACHABLE:
            return ShoalError(refusal)
        try:
            check_own(self._context, Wall(time.time()))  # noqa: TID251 - a command's own clock
            check_peer(self._context, self.address, self._server, self.left_s(HANDSHAKE_S))
        except ShoalError as error:
            return error
        except (OSError, ValueError):
            pass  # nothing listens: as gRPC said
        return refuse(
            refusal.code,
            f"{self.address}: {_without_repetition(refusal.found)}",
            "the region's coordinator",
            "check that it runs (shoal dev status) and that the context's address is right",
        )

    def probe_coordinators(
        self, addresses: Iterable[str], *, every: bool = False
    ) -> dict[str, operator_pb2.WhoAmIReply]:
        """Call all at once and return those that answer soon; sooner once the leader has answered, unless `every`."""
        timeout_s = self.left_s(ANSWER_TIMEOUT_S)
        with ExitStack() as opened:
            calls = {}
            for address in addresses:
                stub = operator_pb2_grpc.OperatorStub(opened.enter_context(self._channel_to(address)))
                calls[address] = stub.WhoAmI.future(operator_pb2.WhoAmIRequest(), timeout=timeout_s)
            found, ends = {}, time.monotonic() + timeout_s  # noqa: TID251 - a command's own deadline
            for address, call in calls.items():
                now = time.monotonic()  # noqa: TID251
                with suppress(grpc.RpcError, grpc.FutureTimeoutError):
                    found[address] = call.result(max(0.0, ends - now))
                    if not (every or found[address].follows):
                        ends = min(ends, now + FOLLOWER_WAIT_S)
            return found

    def _dial(self, address: str) -> None:
        self.address = address
        self._channel = self._channel_to(address)
        self.operator = operator_pb2_grpc.OperatorStub(self._channel)
        self.artifacts = artifacts_pb2_grpc.ArtifactsStub(self._channel)

    def _channel_to(self, address: str) -> grpc.Channel:
        options = channel_options(LINK_BYTES, server_name=self._server)
        return grpc.secure_channel(address, self._credentials, options)

    def _find_leader(self) -> bool:
        """Connect to the leader, else to a coordinator that answers; return whether one leads."""
        answers = self.probe_coordinators(self.addresses)
        told = [each for reply in answers.values() for each in (reply.leader, *reply.coordinators) if each]
        if not _leader_of(answers) and (others := [each for each in dict.fromkeys(told) if each not in self.addresses]):
            answers |= self.probe_coordinators(others)
        chosen = _leader_of(answers) or next(iter(answers), self.addresses[0])
        if chosen != self.address:
            self._channel.close()
            self._dial(chosen)
        if leads := bool(_leader_of(answers)):
            self.addresses = tuple(dict.fromkeys((chosen, *self.addresses)))
        return leads


def _without_repetition(found: str) -> str:
    """gRPC's words without its list of addresses, which is the one address again, so that the reason fits a line."""
    begun, last, reason = found.partition("last error: ")
    return f"{_NOT_SENT}: {reason.rpartition(': ')[2]}" if last and begun.startswith(_NOT_SENT) else found


def _leader_of(answers: Mapping[str, operator_pb2.WhoAmIReply]) -> str:
    """The leader of the newest term: one that is cut off from the store may not know that another was elected."""
    leading = [address for address, reply in answers.items() if not reply.follows]
    return max(leading, key=lambda address: answers[address].term, default="")
