"""Messages between supervisor and front, and how they are packed into frames.

Kinds that a front answers: `configure` (a ServingConfig), `verify` (a VerificationOrder; answers a Verdict), `record`
(a VerificationOrder; answers a ReferenceRecording), `stats` (FrontStats), `spans` (SpansAsked; answers SpansFound),
`lease` (its end and claim), `drain`, `stop`.

A front pushes `wake` with the assignment of an unloaded replica that requests wait for.
"""

import base64
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.agent.core.wakes import UnloadedReplica
from shoal.agent.frames import FrameMessage
from shoal.agent.ports import FrontStats, LocalWorker, ReferenceRecording, StatefulReplica, VerificationSource
from shoal.types.assignment import AgreementCounts, Credential, Forwarding, Ingress, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Handover, SessionSource, Verdict, Verification, Verifier
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

SOCKET: Final = "front.sock"
RECORD: Final = "front.json"
LOCK: Final = "front.lock"
WAKE: Final = "wake"
"""What a front pushes when requests wait for an unloaded replica: its assignment is in the header."""
ASKED: Final = "asked"
"""What a front pushes when its statistics name another workload that it has no routes of."""
_PEER_TUPLES: Final = ("roots", "gateways", "agreements", "revoked")


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Configuration of a front process, fixed for its lifetime."""

    # Name of this agent, as in its certificate.
    node: str
    # Region of this agent, as in its certificate.
    region: str
    # Address that the data port and the metrics endpoint listen on.
    host: str
    # The data port: clients, other fronts, and requests between agents.
    port: int
    # Path of this agent's certificate with chain, PEM.
    certificate: str
    # Path of the certificate's private key, PEM.
    key: str
    # Path of the region's CA certificates, PEM.
    authority: str
    # Directory of the front's socket, lock and record; mode 0700.
    run_dir: str
    # Port of its metrics endpoint; None for no endpoint of its own.
    metrics_port: int | None = None
    # Seconds without a connected supervisor after which the front exits.
    orphan_after_s: float = 60.0
    # Deadline of a request whose caller sets none, seconds.
    timeout_s: float = 60.0
    # Longest time for the calls inside to end when the front stops, seconds.
    drain_s: float = 10.0
    # What may wait at this front.
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    # Share of the requests entering here that are traced, 0 to 1.
    trace_ratio: float = 0.0
    # OTLP collector that spans are sent to; empty for none.
    otlp: str = ""
    # Address that `health_port` listens on.
    health_host: str = ""
    # Port of the health check for probes, plain HTTP; None for none.
    health_port: int | None = None
    # Path of the X25519 private key that authenticates its forwards; empty: it signs none.
    forward_key: str = ""
    # Memory limit of this process in bytes, where it is below the limits of machine and control groups; 0 for those
    # alone.
    memory_bytes: int = 0
    # Which tenants may register system shared memory here.
    shared_memory: tuple[SharedMemoryGrant, ...] = ()

    def socket_path(self) -> Path:
        return Path(self.run_dir) / SOCKET

    def record_path(self) -> Path:
        return Path(self.run_dir) / RECORD

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "FrontConfig":
        """Raises ShoalError(STATE_CORRUPT)."""
        try:
            fields = json.loads(text)
            grants = tuple(SharedMemoryGrant(**each) for each in fields.get("shared_memory", ()))
            return FrontConfig(**{**fields, "limits": AdmissionLimits(**fields["limits"]), "shared_memory": grants})
        except (ValueError, TypeError, KeyError) as error:
            raise refuse(Code.STATE_CORRUPT, f"a front's configuration: {error}", "", "restart the agent") from error


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """The complete serving configuration of the data plane."""

    # All routes.
    routes: tuple[Route, ...] = ()
    # Bearer tokens of tenants, by their SHA-256.
    credentials: tuple[Credential, ...] = ()
    # Workers of this node that take requests.
    workers: tuple[LocalWorker, ...] = ()
    # Serials (decimal) of revoked certificates of this region.
    revoked_serials: tuple[str, ...] = ()
    # Other regions that this gateway exchanges requests with.
    peers: tuple[PeerTrust, ...] = ()
    # Replicas here whose answers or captured requests a verifier may read.
    verification_sources: tuple[VerificationSource, ...] = ()
    # Replicas here that keep sessions, whether or not their worker runs.
    stateful_replicas: tuple[StatefulReplica, ...] = ()
    # Which fronts may forward here; None where the coordinator does not say, then every front may.
    forwarding: Forwarding | None = None
    # What tenants may use of this front; one that is not listed is unlimited.
    tenants: tuple[TenantLimit, ...] = ()
    # Replicas here without a worker, that requests wait for.
    unloaded: tuple[UnloadedReplica, ...] = ()
    # True: the region may have workloads that `routes` does not list.
    routes_on_demand: bool = False


@dataclass(frozen=True, slots=True)
class VerificationOrder:
    """Order to verify a worker, or to record its answers. `pack` is as in the Front port."""

    worker: LocalWorker
    verification: Verification
    pack: str


def pack_order(order: VerificationOrder) -> bytes:
    asked = base64.b64encode(nouns.encode(order.verification)).decode()
    return json.dumps({"worker": asdict(order.worker), "asked": asked, "pack": order.pack}).encode()


def unpack_order(payload: bytes) -> VerificationOrder:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said = json.loads(payload)
        asked = nouns.decode(Verification, base64.b64decode(said["asked"]))
        return VerificationOrder(_local_worker(said["worker"]), asked, str(said["pack"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("order to verify", error) from error


def pack_recording(recording: ReferenceRecording) -> FrameMessage:
    verdict = base64.b64encode(nouns.encode(recording.verdict)).decode()
    return FrameMessage("recorded", {"verdict": verdict}, recording.content)


def unpack_recording(message: FrameMessage) -> ReferenceRecording:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        verdict = nouns.decode(Verdict, base64.b64decode(message.header["verdict"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("verdict of a recording", error) from error
    return ReferenceRecording(verdict, message.payload)


def pack(configuration: ServingConfig) -> bytes:
    return json.dumps(
        {
            "routes": [base64.b64encode(nouns.encode(route)).decode() for route in configuration.routes],
            "credentials": [asdict(credential) for credential in configuration.credentials],
            "workers": [asdict(worker) for worker in configuration.workers],
            "revoked": configuration.revoked_serials,
            "peers": [asdict(peer) for peer in configuration.peers],
            "witnesses": [asdict(witness) for witness in configuration.verification_sources],
            "stateful_replicas": [asdict(replica) for replica in configuration.stateful_replicas],
            "forwarding": _encode_forwarding(configuration.forwarding),
            "tenants": [asdict(limit) for limit in configuration.tenants],
            "unloaded": [asdict(replica) for replica in configuration.unloaded],
            "routes_on_demand": configuration.routes_on_demand,
        }
    ).encode()


def unpack(payload: bytes) -> ServingConfig:
    """Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said = json.loads(payload)
        return ServingConfig(
            routes=tuple(nouns.decode(Route, base64.b64decode(route)) for route in said["routes"]),
            credentials=tuple(
                Credential(str(each["tenant"]), str(each["token_sha256"]), Wall(float(each["expires_at"])))
                for each in said["credentials"]
            ),
            workers=tuple(_local_worker(each) for each in said["workers"]),
            revoked_serials=tuple(map(str, said["revoked"])),
            peers=tuple(
                PeerTrust(str(each["region"]), *(tuple(map(str, each[name])) for name in _PEER_TUPLES))
                for each in said["peers"]
            ),
            verification_sources=tuple(
                VerificationSource(
                    str(each["assignment"]), tuple(Verifier(**one) for one in each["verifiers"]), each["capture"]
                )
                for each in said["witnesses"]
            ),
            stateful_replicas=tuple(map(_stateful_replica, said["stateful_replicas"])),
            forwarding=_decode_forwarding(said.get("forwarding")),
            tenants=tuple(TenantLimit(**each) for each in said.get("tenants", ())),
            unloaded=tuple(map(_unloaded_replica, said.get("unloaded", ()))),
            routes_on_demand=bool(said.get("routes_on_demand", False)),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("configuration", error) from error


def _encode_forwarding(forwarding: Forwarding | None) -> str | None:
    return None if forwarding is None else base64.b64encode(nouns.encode(forwarding)).decode()


def _decode_forwarding(said: str | None) -> Forwarding | None:
    """None also from an older supervisor, which does not send it."""
    return None if said is None else nouns.decode(Forwarding, base64.b64decode(said))


def _stateful_replica(said: dict[str, Any]) -> StatefulReplica:
    handover = Handover(**said["handover"]) if said["handover"] is not None else None
    handover_sources = tuple(SessionSource(**one) for one in said["handover_sources"])
    session = {str(name): str(output) for name, output in said["session"].items()}
    return StatefulReplica(str(said["assignment"]), WorkloadKey(*said["workload"]), session, handover, handover_sources)


def _unloaded_replica(said: dict[str, Any]) -> UnloadedReplica:
    failure = said["failure"]
    if failure is not None:
        failure = Refusal(Code(failure["code"]), failure["found"], failure["asked"], failure["remedy"])
    return UnloadedReplica(**{**said, "workload": WorkloadKey(*said["workload"]), "failure": failure})


def _local_worker(said: dict[str, Any]) -> LocalWorker:
    return LocalWorker(said["assignment"], WorkloadKey(*said["workload"]), said["socket"], said["nonce"])


def pack_lease(until: Elapsed, claim: str) -> bytes:
    """`until` is on the machine's own elapsed clock (`MachineClock.ticks`), not on the supervisor's."""
    return json.dumps({"until": until, "claim": claim}).encode()


def unpack_lease(payload: bytes) -> tuple[Elapsed, str]:
    """(until, claim). Raises ShoalError(MESSAGE_INVALID)."""
    try:
        lease = json.loads(payload)
        return Elapsed(float(lease["until"])), str(lease.get("claim", ""))
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("lease", error) from error


def pack_stats(stats: FrontStats) -> bytes:
    return json.dumps(asdict(stats)).encode()


def unpack_stats(payload: bytes) -> FrontStats:
    """Fields that an older front does not send get their defaults. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        said: dict[str, Any] = json.loads(payload)
        return FrontStats(
            ready=bool(said["ready"]),
            ingress=tuple(Ingress(**{**each, "workload": WorkloadKey(*each["workload"])}) for each in said["ingress"]),
            in_flight=tuple((str(name), int(count)) for name, count in said["in_flight"]),
            agreement_counts=tuple(
                AgreementCounts(**{**each, "latencies": tuple(each.get("latencies", ()))})
                for each in said["agreement_counts"]
            ),
            sessions=tuple((str(name), int(count)) for name, count in said["sessions"]),
            denied=tuple((str(name), int(count)) for name, count in said.get("denied", ())),
            tenants=tuple(TenantUse(**each) for each in said.get("tenants", ())),
            unloaded=tuple(map(str, said.get("unloaded", ()))),
            asked=None if (names := said.get("asked")) is None else tuple(WorkloadKey(*each) for each in names),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise _invalid("statistics", error) from error


def _invalid(what: str, error: Exception) -> ShoalError:
    return refuse(Code.MESSAGE_INVALID, f"{what}: {error}"[:300], f"a front's {what}", "run one version of the agent")
