"""What supervisor and front say to each other, and its form in a frame.

Kinds that a front answers: `configure` (a Configuration), `verify` (an Order; a Verdict), `record` (an Order;
Recorded), `stats` (FrontStats), `spans` (SpansAsked; SpansFound), `lease` (until when), `drain`, `stop`.
"""

import base64
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal.agent.core.routing import Limits
from shoal.agent.frames import Message
from shoal.agent.ports import FrontStats, Keeper, LocalWorker, Recorded, Witness
from shoal.types.assignment import Credential, Crossing, Ingress, PeerTrust
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import Giver, Handover, Verdict, Verification, Verifier
from shoal.types.route import Route
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

SOCKET: Final = "front.sock"
RECORD: Final = "front.json"
LOCK: Final = "front.lock"
_OF_PEERS: Final = ("roots", "gateways", "agreements", "revoked")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """How a front is started; for as long as it lives.

    node, region: of this agent, as in its certificate. host: address to listen on. The ports are real ones (the
    supervisor has reserved them). run_dir: where its socket, lock and record lie (0700). metrics_port: None for no
    endpoint of its own. orphan_after_s: it ends when no supervisor has been connected for so long. trace_ratio: share
    of the requests that enter here that are traced; otlp: the collector that their spans are sent to, "" for none.
    """

    node: str
    region: str
    host: str
    grpc_port: int
    token_port: int
    rest_port: int
    certificate: str
    key: str
    authority: str
    run_dir: str
    metrics_port: int | None = None
    orphan_after_s: float = 60.0
    timeout_s: float = 60.0
    drain_s: float = 10.0
    limits: Limits = field(default_factory=Limits)
    trace_ratio: float = 0.0
    otlp: str = ""

    def socket(self) -> Path:
        return Path(self.run_dir) / SOCKET

    def record(self) -> Path:
        return Path(self.run_dir) / RECORD

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "FrontConfig":
        """Raises ShoalError(STATE_CORRUPT)."""
        try:
            fields = json.loads(text)
            return FrontConfig(**{**fields, "limits": Limits(**fields["limits"])})
        except (ValueError, TypeError, KeyError) as error:
            raise refuse(Code.STATE_CORRUPT, f"a front's configuration: {error}", "", "restart the agent") from error


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the data plane serves, whole. revoked: serials of certificates that are refused. peers: other regions."""

    routes: tuple[Route, ...] = ()
    credentials: tuple[Credential, ...] = ()
    workers: tuple[LocalWorker, ...] = ()
    revoked: tuple[str, ...] = ()
    peers: tuple[PeerTrust, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    keepers: tuple[Keeper, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """To compare what a worker answers with what `asked` names, or to record it. pack: as the Front port says."""

    worker: LocalWorker
    asked: Verification
    pack: str


def pack_order(order: Order) -> bytes:
    asked = base64.b64encode(nouns.encode(order.asked)).decode()
    return json.dumps({"worker": asdict(order.worker), "asked": asked, "pack": order.pack}).encode()


def unpack_order(payload: bytes) -> Order:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said = json.loads(payload)
        asked = nouns.decode(Verification, base64.b64decode(said["asked"]))
        return Order(_worker(said["worker"]), asked, str(said["pack"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("order to verify", error) from error


def pack_recorded(recorded: Recorded) -> Message:
    verdict = base64.b64encode(nouns.encode(recorded.verdict)).decode()
    return Message("recorded", {"verdict": verdict}, recorded.content)


def unpack_recorded(message: Message) -> Recorded:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        verdict = nouns.decode(Verdict, base64.b64decode(message.header["verdict"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("verdict of a recording", error) from error
    return Recorded(verdict, message.payload)


def pack(configuration: Configuration) -> bytes:
    return json.dumps(
        {
            "routes": [base64.b64encode(nouns.encode(route)).decode() for route in configuration.routes],
            "credentials": [asdict(credential) for credential in configuration.credentials],
            "workers": [asdict(worker) for worker in configuration.workers],
            "revoked": configuration.revoked,
            "peers": [asdict(peer) for peer in configuration.peers],
            "witnesses": [asdict(witness) for witness in configuration.witnesses],
            "keepers": [asdict(keeper) for keeper in configuration.keepers],
        }
    ).encode()


def unpack(payload: bytes) -> Configuration:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said = json.loads(payload)
        return Configuration(
            routes=tuple(nouns.decode(Route, base64.b64decode(route)) for route in said["routes"]),
            credentials=tuple(
                Credential(str(each["tenant"]), str(each["token_sha256"]), Wall(float(each["expires_at"])))
                for each in said["credentials"]
            ),
            workers=tuple(_worker(each) for each in said["workers"]),
            revoked=tuple(map(str, said["revoked"])),
            peers=tuple(
                PeerTrust(str(each["region"]), *(tuple(map(str, each[name])) for name in _OF_PEERS))
                for each in said["peers"]
            ),
            witnesses=tuple(
                Witness(str(each["assignment"]), tuple(Verifier(**one) for one in each["verifiers"]), each["capture"])
                for each in said["witnesses"]
            ),
            keepers=tuple(map(_keeper, said["keepers"])),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("configuration", error) from error


def _keeper(said: dict[str, Any]) -> Keeper:
    handover = Handover(**said["handover"]) if said["handover"] is not None else None
    givers = tuple(Giver(**one) for one in said["givers"])
    session = {str(name): str(output) for name, output in said["session"].items()}
    return Keeper(str(said["assignment"]), WorkloadKey(*said["workload"]), session, handover, givers)


def _worker(said: dict[str, Any]) -> LocalWorker:
    return LocalWorker(said["assignment"], WorkloadKey(*said["workload"]), said["socket"], said["nonce"])


def pack_lease(until: Elapsed) -> bytes:
    """until: on the machine's own scale."""
    return json.dumps({"until": until}).encode()


def unpack_lease(payload: bytes) -> Elapsed:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return Elapsed(float(json.loads(payload)["until"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("lease", error) from error


def pack_stats(stats: FrontStats) -> bytes:
    return json.dumps(asdict(stats)).encode()


def unpack_stats(payload: bytes) -> FrontStats:
    """What an older front does not say yet is as by default. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said: dict[str, Any] = json.loads(payload)
        return FrontStats(
            ready=bool(said["ready"]),
            ingress=tuple(Ingress(**{**each, "workload": WorkloadKey(*each["workload"])}) for each in said["ingress"]),
            in_flight=tuple((str(name), int(count)) for name, count in said["in_flight"]),
            crossings=tuple(
                Crossing(**{**each, "latencies": tuple(each.get("latencies", ()))}) for each in said["crossings"]
            ),
            sessions=tuple((str(name), int(count)) for name, count in said["sessions"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("statistics", error) from error


def _invalid(what: str, error: Exception) -> ShoalError:
    return refuse(Code.MESSAGE_INVALID, f"{what}: {error}"[:300], f"a front's {what}", "run one version of the agent")
