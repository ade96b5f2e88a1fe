"""Other fronts of a region, as a front sees them."""

from shoal.agent.dataplane.upstream import CallContext
from shoal.agent.frames import PendingCall
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import ShoalError
from shoal.types.route import Endpoint
from shoal.types.units import Seconds

ANSWER = oip.ModelInferResponse(model_name="reader").SerializeToString()


class NoPeers:
    """No other front."""

    def configure(self, _listed: object) -> None: ...

    def is_connecting(self, _endpoint: Endpoint) -> bool:
        return False

    def rtt_s(self, _endpoint: Endpoint) -> Seconds:
        return Seconds(0.0)


class OpenPeer:
    """The replica at another front, as the test wants it."""

    def __init__(self) -> None:
        self.sent: list[tuple[PendingCall, CallContext]] = []
        self.asked: list[Endpoint] = []
        self.withdrawn = 0
        self.refusal: ShoalError | None = None
        self.rtt_s = Seconds(0.0)

    def begin_infer(self, pending: PendingCall, endpoint: Endpoint, asked: bytes, context: CallContext) -> object:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append((pending, context))
        self.asked.append(endpoint)
        return len(self.sent)

    def end_infer(self, call: object) -> None:
        self.withdrawn += call is not None

    def after_call(self) -> None: ...


class OnePeer(NoPeers):
    """Clients of other fronts: one that is open, or none. What is asked for in a task is answered at once."""

    def __init__(self, peer: OpenPeer | None = None) -> None:
        self.peer = peer
        self.asked = 0
        self.payers: list[str] = []
        """Whose requests wanted to go at once."""
        self.task_payers: list[str] = []
        """Whose requests went in a task."""

    def connection_to(self, _endpoint: Endpoint, _asked: bytes, payer: str) -> OpenPeer | None:
        self.payers.append(payer)
        return self.peer

    async def infer(self, _endpoint: Endpoint, _asked: bytes, context: CallContext) -> bytes:
        self.asked += 1
        self.task_payers.append(context.payer)
        return ANSWER
