"""A typed client of one region's API, for the command line and for scripts.

    with RegionClient(Contexts().get()) as region:
        for node in region.get("nodes").nodes:
            print(node.node.name, node.liveness)

Every method raises ShoalError with the code that the coordinator gave. Any of several coordinators will do: calls that
only the leader can answer go to the leader.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc

from shoal.artifacts.backup import Backup
from shoal.client.connection import RETRY_PAUSE_S, LeaderConnection
from shoal.client.contexts import Context
from shoal.client.transfers import Progress, receive_backup, send_file
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.v1 import artifacts_pb2, nouns_pb2, operator_pb2

TIMEOUT_S: Final = 30.0
RESTART_TIMEOUT_S: Final = 60.0
"""Seconds for a coordinator to be restarted by its supervisor."""
READ_ONLY_METHODS: Final = frozenset(
    {
        "WhoAmI",
        "Plan",
        "Get",
        "Explain",
        "CanMove",
        "History",
        "Doctor",
        "GetAuthority",
        "GetFederation",
        "ExportMeasurements",
        "ListMeasurements",
        "OpenDashboard",
        "List",
        "Trace",
        "Timeline",
    }
)
"""Methods that change nothing, or of which a second call does no harm."""
NO_ANSWER_CODES: Final = frozenset({Code.COORDINATOR_UNREACHABLE, Code.DEADLINE_EXCEEDED, Code.NOT_LEADER})
"""How a call ends while no coordinator answers in time, or none leads."""
_STREAM_END_CODES: Final = (Code.COORDINATOR_UNREACHABLE, Code.CANCELLED, Code.NOT_LEADER)
"""How a stream ends when its coordinator is lost, stops, or no longer leads."""

T = TypeVar("T")


OnOutage = Callable[[Refusal | None], None]
"""Called once for each outage, with why a call is repeated, and with None when it was answered after that."""


def ignore_outage(why: Refusal | None) -> None:
    """For callers to whom an outage that passes is no news."""


def retry_while(call: Callable[[], T], codes: Collection[Code], on_outage: OnOutage = ignore_outage) -> T:
    """Repeat an idempotent call while it ends with one of these codes, for `RESTART_TIMEOUT_S`. Raises ShoalError."""
    end = time.monotonic() + RESTART_TIMEOUT_S  # noqa: TID251 - a command's own deadline
    is_out = False
    while True:
        try:
            found = call()
        except ShoalError as error:
            if error.code not in codes or time.monotonic() > end:  # noqa: TID251
                raise
            if not is_out:
                is_out = True
                on_outage(error.refusal)
        else:
            if is_out:
                on_outage(None)
            return found
        time.sleep(RETRY_PAUSE_S)  # noqa: TID251


class RegionClient:
    """One connection; closed on exit."""

    on_outage: OnOutage = staticmethod(ignore_outage)
    """Told of the outages that calls outlast which are repeated: those of `poll`, and of `events` that follow."""

    def __init__(self, context: Context, within_s: float = math.inf) -> None:
        """within_s: seconds from now for all its calls together; each has its own besides. Those that send or receive
        files, and streams, have none."""
        self.context = context
        self._connection = LeaderConnection(context, within_s)

    @property
    def address(self) -> str:
        """Of the coordinator that this client is connected to."""
        return self._connection.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the region's coordinators, from the context and from themselves; the last leader comes first."""
        return self._connection.addresses

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def who_am_i(self) -> operator_pb2.WhoAmIReply:
        """The leader's answer: only the leader knows the gateways."""

        def ask() -> operator_pb2.WhoAmIReply:
            reply = self._connection.operator.WhoAmI(
                operator_pb2.WhoAmIRequest(), timeout=self._connection.left_s(TIMEOUT_S)
            )
            if reply.follows:
                raise refuse(Code.NOT_LEADER, f"{self.address} follows", "the leader", "try again in a few seconds")
            return reply

        return self._connection.call_leader(ask, is_repeatable=True)

    def coordinators(self) -> Mapping[str, operator_pb2.WhoAmIReply | None]:
        """Address of each of the region's coordinators -> its answer; None: it does not answer."""
        answers = self._connection.probe_coordinators(self.addresses, every=True)
        told = {each for reply in answers.values() for each in reply.coordinators}
        if told:
            answers = self._connection.probe_coordinators(sorted(told), every=True)
        return {each: answers.get(each) for each in sorted(told or self.addresses)}

    def plan(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str] | None = None
    ) -> operator_pb2.PlanReply:
        request = operator_pb2.PlanRequest(documents=documents, digests=digests or {}, only_drift=not documents)
        return self._call("Plan", request)  # type: ignore[no-any-return]

    def apply(
        self, documents: Sequence[operator_pb2.Document], digests: Mapping[str, str] | None = None, plan_hash: str = "",
        *, with_plan: bool = True,
    ) -> operator_pb2.ApplyReply:  # fmt: skip
        """with_plan: False where the reply need not say what changes besides documents."""
        request = operator_pb2.ApplyRequest(
            documents=documents, digests=digests or {}, plan_hash=plan_hash, without_plan=not with_plan
        )
        return self._call("Apply", request)  # type: ignore[no-any-return]

    def history(self, tenant: str, name: str) -> tuple[operator_pb2.RevisionView, ...]:
        """Revisions of a workload and of the policies that they name, oldest first."""
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=name)
        return tuple(self._call("History", operator_pb2.HistoryRequest(workload=key)).revisions)

    def plan_rollback(self, tenant: str, name: str, to: int = 0) -> operator_pb2.PlanReply:
        """What `rollback` would do."""
        return self._call("Plan", operator_pb2.PlanRequest(rollback=_rollback(tenant, name, to)))  # type: ignore[no-any-return]

    def rollback(self, tenant: str, name: str, to: int = 0, plan_hash: str = "") -> operator_pb2.ApplyReply:
        """Apply an earlier revision of a workload, with its models. to: revision; 0: the one before the current one."""
        request = operator_pb2.ApplyRequest(rollback=_rollback(tenant, name, to), plan_hash=plan_hash)
        return self._call("Apply", request)  # type: ignore[no-any-return]

    def get(self, kind: str, name: str = "", tenant: str = "") -> operator_pb2.GetReply:
        request = operator_pb2.GetRequest(kind=kind, name=name, tenant=tenant)
        return self._call("Get", request)  # type: ignore[no-any-return]

    def poll(self, kind: str, name: str = "") -> operator_pb2.GetReply:
        """As `get`, for callers that poll: retries for `RESTART_TIMEOUT_S` while no coordinator that leads answers."""
        return retry_while(lambda: self.get(kind, name), NO_ANSWER_CODES, self.on_outage)

    def delete(self, kind: str, name: str, tenant: str = "") -> None:
        self._call("Delete", operator_pb2.DeleteRequest(kind=kind, name=name, tenant=tenant))

    def explain(self, tenant: str, name: str) -> operator_pb2.ExplainReply:
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=name)
        return self._call("Explain", operator_pb2.ExplainRequest(workload=key))  # type: ignore[no-any-return]

    def can_move(self, tenant: str, name: str, to: str) -> operator_pb2.CanMoveReply:
        """name: of a workload, else of a pushed model. to: NODE, NODE/DEVICE or REGION."""
        request = operator_pb2.CanMoveRequest(tenant=tenant, name=name, to=to)
        return self._call("CanMove", request)  # type: ignore[no-any-return]

    def cordon(self, node: str, *, cordoned: bool) -> operator_pb2.NodeView:
        request = operator_pb2.CordonRequest(node=node, cordoned=cordoned)
        return self._call("Cordon", request).node  # type: ignore[no-any-return]

    def migrate(
        self, tenant: str, name: str, to: str, replica: str = "", *, queue: bool = False
    ) -> operator_pb2.MigrationView:
        """to: NODE or NODE/DEVICE. replica: an assignment; empty: the first that is not on the target. queue: it waits
        if it is refused only for now.
        """
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=name)
        request = operator_pb2.MigrateRequest(workload=key, to=to, replica=replica, queue=queue)
        return self._call("Migrate", request).migration  # type: ignore[no-any-return]

    def cancel_migration(self, migration: str, workload: str = "", tenant: str = "") -> operator_pb2.MigrationView:
        """workload, tenant: what the migration must belong to, if given."""
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=workload) if workload else None
        request = operator_pb2.CancelMigrationRequest(id=migration, workload=key)
        return self._call("CancelMigration", request).migration  # type: ignore[no-any-return]

    def drain(self, node: str) -> operator_pb2.DrainReply:
        return self._call("Drain", operator_pb2.DrainRequest(node=node))  # type: ignore[no-any-return]

    def events(self, after: int = 0, *, follow: bool = False, limit: int = 0) -> Iterator[operator_pb2.Event]:
        """limit: newest past events; 0: all that are kept. follow: then each new one, without end.

        When a coordinator goes away, following continues after the last event, at the one that leads. It ends once
        every stream has failed for `RESTART_TIMEOUT_S`.
        """
        seen = after
        out_since: float | None = None

        def on_answer() -> None:
            nonlocal out_since
            if out_since is not None:
                out_since = None
                self.on_outage(None)

        while True:
            # Once something was seen, a limit would leave out what happened while nobody answered.
            request = operator_pb2.EventsRequest(after=seen, follow=follow, limit=limit if seen == after else 0)
            begun = time.monotonic()  # noqa: TID251 - a command's own clock
            try:
                stream = self._connection.operator.Events(request, timeout=None if follow else TIMEOUT_S)
                if out_since is not None:
                    # Its first answer is the next event, which may be long in coming: one that lasts will do.
                    time.sleep(RETRY_PAUSE_S)  # noqa: TID251
                    if stream.is_active():
                        on_answer()
                for event in stream:
                    on_answer()
                    yield event
                    seen = event.sequence
                return
            except grpc.RpcError as cause:
                now = time.monotonic()  # noqa: TID251
                error = self._connection.error_of(cause, now - begun)
                is_over = out_since is not None and now - out_since > RESTART_TIMEOUT_S
                if not follow or error.code not in _STREAM_END_CODES or is_over:
                    raise error from cause
            if out_since is None:
                out_since = now
                self.on_outage(error.refusal)
            retry_while(self.who_am_i, NO_ANSWER_CODES)

    def backup(
        self, path: Path, *, models: bool = False, progress: Callable[[int], None] = lambda done: None
    ) -> Backup:
        """Write the region's state to a new file that only its owner can read, and verify it.

        models: include their bytes. progress: called with the bytes received. Raises ShoalError(CONFLICT) if the file
        exists.
        """
        request = operator_pb2.BackupRequest(models=models)
        return receive_backup(self._connection, request, path, progress)

    def logs(self, node: str = "", *, lines: int = 100, follow: bool = False) -> Iterator[str]:
        """The last log lines of a node's processes, oldest first, one JSON object each; with `follow`, then new ones.
        node: empty for the coordinator."""
        request = operator_pb2.LogsRequest(node=node, lines=lines, follow=follow)

        def call() -> tuple[list[str], Iterator[operator_pb2.LogsReply]]:
            replies = iter(self._connection.operator.Logs(request, timeout=None if follow else TIMEOUT_S))
            first = next(replies, None)  # a refusal comes before the first reply
            return list(first.lines) if first is not None else [], replies

        begun = time.monotonic()  # noqa: TID251 - a command's own clock
        first, replies = self._connection.call_leader(call, is_repeatable=True)
        yield from first
        try:
            for reply in replies:
                yield from reply.lines
        except grpc.RpcError as cause:
            raise self._connection.error_of(cause, time.monotonic() - begun) from cause  # noqa: TID251

    def trace(self, name: str) -> operator_pb2.TraceReply:
        """name: of a trace, a migration, a negotiation or its agreement. Raises ShoalError(NOT_FOUND)."""
        return self._call("Trace", operator_pb2.TraceRequest(id=name))  # type: ignore[no-any-return]

    def timeline(self, name: str = "", tenant: str = "default", *, coarse: bool = False) -> operator_pb2.TimelineReply:
        """Figures of a workload, or of the region (no name), over the last hour in steps of 10 s; coarse: over the last
        day in steps of five minutes."""
        key = nouns_pb2.WorkloadKey(tenant=tenant, name=name) if name else None
        return self._call("Timeline", operator_pb2.TimelineRequest(workload=key, coarse=coarse))  # type: ignore[no-any-return]

    def diagnostics(self) -> operator_pb2.GetDiagnosticsReply:
        return self._call("GetDiagnostics", operator_pb2.GetDiagnosticsRequest())  # type: ignore[no-any-return]

    def create_token(
        self,
        role: str,
        name: str = "",
        valid_s: float = 3600.0,
        labels: Mapping[str, str] | None = None,
        allow_labels: Iterable[str] = (),
    ) -> operator_pb2.CreateTokenReply:
        """labels: of the node that joins with it. allow_labels: patterns of label names that the node may declare
        itself."""
        request = operator_pb2.CreateTokenRequest(
            role=role, name=name, valid_s=valid_s, labels=labels, allow_labels=allow_labels
        )
        return self._call("CreateToken", request)  # type: ignore[no-any-return]

    def open_dashboard(self) -> operator_pb2.OpenDashboardReply:
        """A one-time link to the dashboard, as its parts."""
        return self._call("OpenDashboard", operator_pb2.OpenDashboardRequest())  # type: ignore[no-any-return]

    def doctor(self) -> operator_pb2.DoctorReply:
        return self._call("Doctor", operator_pb2.DoctorRequest())  # type: ignore[no-any-return]

    def revoke(
        self,
        name: str,
        *,
        role: str = "",
        reason: str,
        keep_enrolled: bool = False,
        dry_run: bool = False,
        force: bool = False,
    ) -> operator_pb2.RevokeReply:
        """Revoke an identity; return what ended with it, and the serials of all certificates that are refused from now
        on.

        role: empty for the node of that name. keep_enrolled: identities that enrolled with its tokens stay. dry_run:
        only report what it would end. force: even if no operator is left.
        """
        request = operator_pb2.RevokeRequest(
            name=name, role=role, reason=reason, keep_enrolled=keep_enrolled, dry_run=dry_run, force=force
        )
        return self._call("Revoke", request)  # type: ignore[no-any-return]

    def resolve_duplicate(self, node: str, *, keep: str = "running") -> operator_pb2.NodeView:
        request = operator_pb2.SettleRequest(node=node, keep=keep)
        return self._call("Settle", request).node  # type: ignore[no-any-return]

    def label(self, node: str, labels: Mapping[str, str], remove: Iterable[str] = ()) -> operator_pb2.NodeView:
        request = operator_pb2.LabelNodeRequest(node=node, set=labels, remove=remove)
        return self._call("Label", request).node  # type: ignore[no-any-return]

    def measure(self, node: str, device: str = "") -> tuple[str, ...]:
        """Ask for new measurements; returns the devices that were asked for."""
        request = operator_pb2.MeasureNodeRequest(node=node, device=device)
        return tuple(self._call("Measure", request).devices)

    def release(self, node: str) -> operator_pb2.NodeView:
        request = operator_pb2.ReleaseNodeRequest(node=node)
        return self._call("Release", request).node  # type: ignore[no-any-return]

    def authority(self) -> operator_pb2.GetAuthorityReply:
        request = operator_pb2.GetAuthorityRequest()
        return self._call("GetAuthority", request)  # type: ignore[no-any-return]

    def rotate(self, stage: str = "") -> operator_pb2.GetAuthorityReply:
        request = operator_pb2.RotateAuthorityRequest(stage=stage)
        return self._call("RotateAuthority", request).authority  # type: ignore[no-any-return]

    def set_signal(self, name: str, value: str) -> operator_pb2.SignalView:
        """Set `price` or `carbon` by hand, with its unit; an empty value clears it."""
        request = operator_pb2.SetSignalRequest(name=name, value=value)
        return self._call("SetSignal", request).signal  # type: ignore[no-any-return]

    def export_measurements(self) -> bytes:
        """The document that other regions import."""
        return self._call("ExportMeasurements", operator_pb2.ExportMeasurementsRequest()).document  # type: ignore[no-any-return]

    def import_measurements(self, document: bytes, *, dry_run: bool = False) -> operator_pb2.ImportMeasurementsReply:
        """Keep what another region exported. dry_run: only report what of it would count."""
        request = operator_pb2.ImportMeasurementsRequest(document=document, dry_run=dry_run)
        return self._call("ImportMeasurements", request)  # type: ignore[no-any-return]

    def imported_measurements(self) -> tuple[operator_pb2.ImportedMeasurementsView, ...]:
        return tuple(self._call("ListMeasurements", operator_pb2.ListMeasurementsRequest()).imported)

    def remove_measurements(self, region: str) -> None:
        """Forget what was imported of a region."""
        self._call("RemoveMeasurements", operator_pb2.RemoveMeasurementsRequest(region=region))

    def join_federation(self, address: str, token: str) -> operator_pb2.FederationView:
        """address: where the federation redeems tokens."""
        request = operator_pb2.JoinFederationRequest(address=address, token=token)
        return self._call("JoinFederation", request).federation  # type: ignore[no-any-return]

    def leave_federation(self, *, forget: bool = False) -> None:
        self._call("LeaveFederation", operator_pb2.LeaveFederationRequest(forget=forget))

    def drain_federation(self) -> int:
        """Agreements that are not over yet; no new one begins for ten seconds."""
        reply = self._call("LeaveFederation", operator_pb2.LeaveFederationRequest(drain=True))
        return int(reply.agreements)

    def federation(self) -> operator_pb2.FederationView | None:
        """None if the region is in no federation."""
        reply = self._call("GetFederation", operator_pb2.GetFederationRequest())
        return reply.federation if reply.HasField("federation") else None

    def models(self, name: str = "") -> tuple[artifacts_pb2.Model, ...]:
        request = artifacts_pb2.ListModelsRequest(name=name)
        return tuple(self._call("List", request).models)

    def packs(self) -> tuple[artifacts_pb2.Pack, ...]:
        """Sample packs that the region holds, once for each model that they were checked for."""
        return tuple(self._call("List", artifacts_pb2.ListModelsRequest()).packs)

    def push_samples(self, path: Path, model: str, progress: Progress | None = None) -> artifacts_pb2.PushReply:
        """Send an .npz file with which migrations of a pushed model (name or digest) are verified."""
        return send_file(self._connection, "Push", path, "", progress, b"", samples_of=model)

    def push(
        self, path: Path, name: str = "", progress: Progress | None = None, *, signature: bytes = b"",
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> artifacts_pb2.PushReply:  # fmt: skip
        """Send one .onnx file, with its OpenSSF model signature if there is one. The coordinator verifies and inspects
        it before storing. shapes: by input, those that its costs are counted at; -1 leaves an axis to the inspection.
        """
        return send_file(self._connection, "Push", path, name, progress, signature, shapes=shapes)

    def inspect(self, path: Path, progress: Progress | None = None) -> artifacts_pb2.PushReply:
        """As `push`, without storing."""
        return send_file(self._connection, "Inspect", path, "", progress, b"")

    def remove_model(self, name: str) -> artifacts_pb2.RemoveModelReply:
        request = artifacts_pb2.RemoveModelRequest(name=name)
        return self._call("Remove", request)  # type: ignore[no-any-return]

    def clear_model(self, model: str, allow_version: int = 0) -> operator_pb2.ClearModelReply:
        """Clear a model's poisoned state; with a version, allow that older signed version again."""
        request = operator_pb2.ClearModelRequest(model=model, allow_version=allow_version)
        return self._call("ClearModel", request)  # type: ignore[no-any-return]

    def _call(self, method: str, request: Any) -> Any:
        """method: of the Operator service, else of Artifacts."""

        def call() -> Any:
            operator, artifacts = self._connection.operator, self._connection.artifacts
            stub = operator if hasattr(operator, method) else artifacts
            return getattr(stub, method)(request, timeout=self._connection.left_s(TIMEOUT_S))

        return self._connection.call_leader(call, is_repeatable=method in READ_ONLY_METHODS)


def _rollback(tenant: str, name: str, to: int) -> operator_pb2.RollbackTo:
    return operator_pb2.RollbackTo(workload=nouns_pb2.WorkloadKey(tenant=tenant, name=name), revision=to)
